"""gpt-oss's experts in MXFP4: the same numbers as transformers reads from the file, and errors by name otherwise."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from outrider.errors import BadCheckpoint
from outrider.load.checkpoint import check_shapes, open_checkpoint
from outrider.load.quants import Blocks
from outrider.model.decoder import Decoder, make_kernels
from outrider.serve import model_size
from outrider.settings import Settings, cache_folder
from tests.load.test_folder_fuzz import RUNS, survives
from tests.load.tiny import byte_level_backend, vocabulary
from tests.model.batches import Reader, furthest, random_ids
from tests.model.families import POSITIONS, make_theirs

WEIGHTS = "model.safetensors"
STACKS = re.compile(r"model\.layers\.\d\.mlp\.experts\.(gate_up|down)_proj")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model in MXFP4, and the same in the numbers that transformers makes of it."""
    folders = tmp_path_factory.mktemp("packed"), tmp_path_factory.mktemp("plain")
    model = make_theirs("gpt_oss-usual", vocab_size=len(vocabulary()))
    generator = torch.Generator().manual_seed(3)
    packed = dict(model.state_dict())
    plain = dict(packed)
    for name in [name for name in packed if STACKS.fullmatch(name)]:
        experts, inputs, outputs = packed.pop(name).shape
        blocks = torch.randint(
            0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8
        )
        scales = torch.randint(119, 124, blocks.shape[:3], generator=generator, dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    raw = model.config.to_dict()
    for folder, tensors, more in zip(
        folders, (packed, plain), ({"quant_method": "mxfp4"}, None), strict=True
    ):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
        config = raw | ({} if more is None else {"quantization_config": more})
        (folder / "config.json").write_text(json.dumps(config))
        byte_level_backend().save(str(folder / "tokenizer.json"))
    return folders


def logits(folder: Path, kind: str) -> Tensor:
    checkpoint = open_checkpoint(folder)
    check_shapes(checkpoint)
    config, read = checkpoint.config, checkpoint.stored if kind == "stored" else checkpoint.tensor
    assert config is not None
    model = Decoder(config, read, make_kernels(config, POSITIONS, 1, cache_folder() / "kernels", "auto"))
    return Reader(config).read(model, random_ids(config.vocab, 20))


def test_the_numbers_are_those_of_transformers(made: tuple[Path, Path]) -> None:
    packed, plain = map(open_checkpoint, made)
    assert packed.names() == plain.names()
    stack = load_file(made[1] / WEIGHTS)["model.layers.1.mlp.experts.gate_up_proj"][2].T  # outputs in turns
    for part, first in (("gate", 0), ("up", 1)):
        assert torch.equal(plain.tensor(f"model.layers.1.mlp.experts.2.{part}_proj.weight"), stack[first::2])
    kinds = {name: packed.stored_format(name) for name in packed.names()}
    assert {name for name, kind in kinds.items() if kind == "MXFP4"} == {
        name for name in kinds if ".experts." in name and name.endswith("weight")
    }
    for name in packed.names():
        assert torch.equal(packed.tensor(name), plain.tensor(name)), name
        stored = packed.stored(name)
        assert torch.equal(stored.float(), plain.tensor(name)), name
        kept = packed.for_gpu(name, "cpu")
        assert torch.equal(kept.float(), plain.tensor(name)), name
        assert isinstance(stored, Blocks) == isinstance(kept, Blocks) == (kinds[name] == "MXFP4")


def test_logits_are_those_of_the_widened_model(made: tuple[Path, Path]) -> None:
    """To the last bit where it is widened; kept in four bits, activations are rounded to eight."""
    packed, plain = made
    widened = logits(plain, "float32")
    assert torch.equal(logits(packed, "float32"), widened)
    assert furthest(logits(packed, "stored"), widened) < 0.1  # seen: 0.053


def test_a_gguf_file_has_the_same_blocks(made: tuple[Path, Path], tmp_path: Path) -> None:
    import gguf

    packed = open_checkpoint(made[0])
    config = packed.config
    assert config is not None
    stacks: dict[str, np.ndarray] = {}
    for i, spec in enumerate(config.specs):
        assert spec.experts is not None
        for part in ("gate", "up", "down"):
            own = [packed.stored(f"model.layers.{i}.mlp.experts.{e}.{part}_proj.weight") for e in range(8)]
            stacks[f"blk.{i}.ffn_{part}_exps.weight"] = np.stack([one.raw.numpy() for one in own])  # type: ignore[union-attr]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gpt-oss")
    writer.add_uint32("gpt-oss.unused", 1)
    for name, array in stacks.items():
        writer.add_tensor(name, array, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    from outrider.load.gguf import GgufFile

    file = GgufFile(tmp_path / "m.gguf")
    for name in stacks:
        stack = file.stack(name)
        assert isinstance(stack, Blocks) and file.stored_format(name) == "MXFP4"
        assert np.array_equal(stack.raw.numpy(), stacks[name])
        whole = file.read(name)
        number = int(name.split(".")[1])
        part = name.split("_")[1]
        assert torch.equal(whole[3], packed.tensor(f"model.layers.{number}.mlp.experts.3.{part}_proj.weight"))


def changed(folder: Path, tmp_path: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / WEIGHTS)
    return tmp_path


STACK = "model.layers.0.mlp.experts.down_proj"
EXPERT = "mlp.experts"
LIES: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "no scales": (lambda t: t.pop(f"{STACK}_scales"), f"no tensor '{STACK}_scales'"),
    "no blocks": (lambda t: t.pop(f"{STACK}_blocks"), "no tensor 'model.layers.0.mlp.experts.0.down_proj.weight'"),
    "no sinks": (lambda t: t.pop("model.layers.1.self_attn.sinks"), "no tensor 'model.layers.1.self_attn.sinks'"),
    "sinks of other heads": (
        lambda t: t.update({"model.layers.1.self_attn.sinks": torch.ones(3)}), "sinks' of .* has shape"
    ),
    "an expert too few": (lambda t: t.update({f"{STACK}_blocks": t[f"{STACK}_blocks"][:7]}), "down_proj"),
    "an odd number of bytes": (lambda t: t.update({f"{STACK}_blocks": t[f"{STACK}_blocks"][..., :15]}), "down_proj"),
    "a group too few": (lambda t: t.update({f"{STACK}_blocks": t[f"{STACK}_blocks"][:, :, :2]}), "down_proj"),
    "scales of other groups": (lambda t: t.update({f"{STACK}_scales": t[f"{STACK}_scales"][..., :2]}), "has scales of"),
    "scales as floats": (lambda t: t.update({f"{STACK}_scales": t[f"{STACK}_scales"].float()}), "has scales of"),
    "blocks as floats": (lambda t: t.update({f"{STACK}_blocks": t[f"{STACK}_blocks"].half()}), "not bytes in blocks"),
    "a scale that is no number": (lambda t: t[f"{STACK}_scales"].view(-1).fill_(255), "is corrupt"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_what_does_not_fit_is_named(lie: str, made: tuple[Path, Path], tmp_path: Path) -> None:
    change, said = LIES[lie]
    checkpoint = open_checkpoint(changed(made[0], tmp_path, change))
    with pytest.raises(BadCheckpoint, match=said):
        check_shapes(checkpoint)
        for name in checkpoint.names():
            checkpoint.stored(name)


def test_any_damage_is_an_error_by_name(made: tuple[Path, Path], tmp_path: Path) -> None:
    folder = changed(made[0], tmp_path, lambda tensors: None)
    data, dice = (folder / WEIGHTS).read_bytes(), random.Random(5)
    header = 8 + int.from_bytes(data[:8], "little")
    sound = 0
    for run in range(min(RUNS, 12)):
        broken = bytearray(data[: dice.randrange(len(data))] if run % 3 == 0 else data)
        for _ in range(run % 4):
            broken[dice.randrange(min(header if run % 2 else len(broken), len(broken)))] ^= (
                1 << dice.randrange(8)
            )
        (folder / WEIGHTS).write_bytes(broken)
        sound += survives(folder, (WEIGHTS, "mlp", "model."))
    assert sound < 12


def test_a_config_that_gpt_oss_never_has_is_refused(made: tuple[Path, Path], tmp_path: Path) -> None:
    folder = changed(made[0], tmp_path, lambda tensors: None)
    raw = json.loads((folder / "config.json").read_text())
    for field, value in (
        ("swiglu_limit", 0.0),
        ("swiglu_limit", None),
        ("swiglu_alpha", 2.0),
        ("hidden_act", "gelu"),
    ):
        (folder / "config.json").write_text(json.dumps({**raw, field: value}))
        with pytest.raises(Exception, match=r"swiglu|hidden_act"):
            open_checkpoint(folder)


def test_a_gpu_has_room_for_experts_in_four_bits(
    made: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_size, "runs_on_gpu", lambda settings: True)
    monkeypatch.setattr(model_size, "gpu_memory", lambda: (1 << 30, 1 << 30))
    packed, plain = (
        model_size.model_size(str(folder), "none", Settings(cache_bytes=1 << 20)) for folder in made
    )
    stored = open_checkpoint(made[0])
    numbers = sum(math.prod(stored.shape(name)) for name in stored.names() if stored.has_mxfp4(name))
    assert numbers > 0 and plain.weights - packed.weights == int(numbers * (2 - 17 / 32))
