"""Checkpoints that were quantised before they were published. The packers here are written from the formats'
descriptions, number by number; autoawq 0.2.9 and compressed-tensors 0.20 pack and unpack alike.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider import LLM
from outrider.errors import BadCheckpoint, OutriderError, UnsupportedModel
from outrider.load.checkpoint import check_shapes, open_checkpoint
from outrider.load.quants import Blocks
from tests.load import tiny

GROUP = 32
PLACES = {"in order": range(8), "awq": (0, 2, 4, 6, 1, 3, 5, 7)}  # the column in each place of a word


def words(numbers: np.ndarray, bits: int, places: Any = None) -> Tensor:
    """[rows, n] -> int32 [rows, n * bits / 32]."""
    each = 32 // bits
    found = np.zeros((len(numbers), -(-numbers.shape[1] // each)), np.uint32)
    for row, values in enumerate(numbers):
        for column, value in enumerate(values):
            place = (places or list(range(each))).index(column % each)
            found[row, column // each] |= np.uint32(int(value) << (bits * place))
    return torch.from_numpy(found.view(np.int32))


class Made:
    """A matrix quantised at random: its parts, and the floats they stand for."""

    def __init__(self, shape: tuple[int, int], seed: int, bits: int, symmetric: bool) -> None:
        dice = np.random.default_rng(seed)
        outputs, inputs = shape
        self.bits, self.shape = bits, shape
        self.numbers = dice.integers(0, 1 << bits, shape)
        groups = (outputs, inputs // GROUP)
        middle = 1 << (bits - 1)
        self.offsets = np.full(groups, middle) if symmetric else dice.integers(0, 1 << bits, groups)
        self.scales = (dice.random(groups) * 0.02 / middle + 0.001).astype(np.float16)
        self.group_of = np.arange(inputs) // GROUP

    @property
    def floats(self) -> Tensor:
        wide = self.offsets[:, self.group_of], self.scales.astype(np.float32)[:, self.group_of]
        return torch.from_numpy(((self.numbers - wide[0]) * wide[1]).astype(np.float32))


def gptq(made: Made, version: int = 1, ordered: bool = False) -> dict[str, Tensor]:
    if ordered:
        made.group_of = np.random.default_rng(1).permutation(made.group_of)
    stored = (made.offsets - (version == 1)) % (1 << made.bits)
    return {
        "qweight": words(made.numbers.T.copy().T, made.bits).T.contiguous(),
        "qzeros": words(stored.T, made.bits),
        "scales": torch.from_numpy(made.scales.T.copy()),
        "g_idx": torch.from_numpy(made.group_of.astype(np.int32)),
    }


def awq(made: Made) -> dict[str, Tensor]:
    places = list(PLACES["awq"])
    return {
        "qweight": words(made.numbers.T, 4, places),
        "qzeros": words(made.offsets.T, 4, places),
        "scales": torch.from_numpy(made.scales.T.copy()),
    }


def pack_quantized(made: Made, symmetric: bool) -> dict[str, Tensor]:
    offsets = {} if symmetric else {"weight_zero_point": words(made.offsets.T, made.bits).T.contiguous()}
    return {
        "weight_packed": words(made.numbers, made.bits),
        "weight_scale": torch.from_numpy(made.scales),
        "weight_shape": torch.tensor(made.shape),
        **offsets,
    }


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}


def method(kind: str) -> dict[str, Any]:
    bits = 8 if "8" in kind.split()[-1] else 4
    if kind.startswith("gptq"):
        version = {"checkpoint_format": "gptq_v2"} if "v2" in kind else {}
        return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, **version}
    if kind.startswith("awq"):
        return {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
    return compressed("pack-quantized", num_bits=bits, group_size=GROUP, symmetric="asymmetric" not in kind)


def parts(kind: str, shape: tuple[int, int], seed: int) -> tuple[dict[str, Tensor], Tensor]:
    made = Made(shape, seed, 8 if "8" in kind.split()[-1] else 4, "asymmetric" not in kind)
    if kind.startswith("gptq"):
        found = gptq(made, 2 if "v2" in kind else 1, "ordered" in kind)
    else:
        found = awq(made) if kind.startswith("awq") else pack_quantized(made, "asymmetric" not in kind)
    return found, made.floats


def write(path: Path, kind: str) -> dict[str, Tensor]:
    """A folder whose linear layers are quantised; their floats by name."""
    tiny.write_folder(path, quantization_config=method(kind))
    weights = load_file(path / "model.safetensors")
    floats, stored = {}, {}
    for seed, (name, weight) in enumerate(weights.items()):
        if "_proj" not in name:
            stored[name] = weight
            continue
        found, floats[name] = parts(kind, tuple(weight.shape), seed)
        stored |= {
            f"{name.removesuffix('weight')}{part}": tensor.contiguous() for part, tensor in found.items()
        }
    save_file(stored, path / "model.safetensors")
    return floats


KINDS = {
    "gptq 4": "Q4_0",
    "gptq 8": "Q8_0",
    "gptq v2 4": "Q4_0",
    "gptq asymmetric 4": "Q4_1",
    "gptq asymmetric 8": "GPTQ of 8 bits",
    "gptq ordered 4": "GPTQ of 4 bits",
    "awq 4": "Q4_0",
    "awq asymmetric 4": "Q4_1",
    "compressed 4": "Q4_0",
    "compressed 8": "Q8_0",
    "compressed asymmetric 4": "Q4_1",
}


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_have_the_published_numbers(tmp_path: Path, kind: str) -> None:
    floats = write(tmp_path, kind)
    opened = open_checkpoint(tmp_path)
    check_shapes(opened)
    assert sorted(opened.names()) == sorted(tiny.hf_weights())
    for name, expected in floats.items():
        one_group = "ordered" in kind and expected.shape[1] == GROUP
        form = "Q4_0" if one_group else KINDS[kind]
        assert opened.shape(name) == expected.shape and opened.stored_format(name) == form
        assert torch.allclose(opened.tensor(name), expected, rtol=1e-6, atol=1e-9)
        stored = opened.stored(name)
        assert isinstance(stored, Blocks) == form.startswith("Q")
        # Offsets times scales are rounded to float16 in Q4_1: at most 15 / 2048 of a step.
        step = expected.abs().amax(1, keepdim=True) / 8
        assert ((stored.float() - expected).abs() <= step * (15 / 2048 if form == "Q4_1" else 1e-6)).all()
    assert torch.equal(opened.tensor("model.norm.weight"), tiny.hf_weights()["model.norm.weight"])


@pytest.mark.parametrize("blocks", [[2, 3], None])
def test_float8_with_scales_by_block_or_output(tmp_path: Path, blocks: list[int] | None) -> None:
    how = (
        {"quant_method": "fp8", "weight_block_size": blocks}
        if blocks
        else compressed("float-quantized", num_bits=8)
    )
    tiny.write_folder(tmp_path, quantization_config=how)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    small = weights[name].to(torch.float8_e4m3fn)
    outputs, inputs = small.shape
    if blocks:
        scale = torch.rand(-(-outputs // 2), -(-inputs // 3)) + 0.5
        expected = small.float() * scale[torch.arange(outputs) // 2][:, torch.arange(inputs) // 3]
    else:
        scale = torch.rand(outputs, 1) + 0.5
        expected = small.float() * scale
    weights |= {name: small, f"{name}_scale{'_inv' if blocks else ''}": scale}
    save_file(weights, tmp_path / "model.safetensors")
    opened = open_checkpoint(tmp_path)
    check_shapes(opened)
    assert torch.equal(opened.tensor(name), expected) and opened.stored_format(name) == "FP8"
    assert (
        opened.stored_format("lm_head.weight" if "lm_head.weight" in weights else "model.norm.weight")
        == "float32"
    )


@pytest.mark.parametrize("kind", ["gptq 4", "awq asymmetric 4", "gptq ordered 4"])
@pytest.mark.filterwarnings("ignore:matrices of")
def test_a_model_answers_with_them(tmp_path: Path, kind: str) -> None:
    """In float32 as the same numbers stored in float32 do, and drafts change nothing where they stay in blocks."""
    floats = write(tmp_path / "packed", kind)
    tiny.write_folder(tmp_path / "plain")
    save_file(
        {**load_file(tmp_path / "plain" / "model.safetensors"), **floats},
        tmp_path / "plain" / "model.safetensors",
    )
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}

    def answer(folder: str, draft: str, weights: str) -> list[int]:
        with LLM(str(tmp_path / folder), draft=draft, weights=weights) as llm:
            return llm.generate(["hello hello hello"], **asked)[0].token_ids

    assert answer("packed", "none", "float32") == answer("plain", "none", "float32")
    assert answer("packed", "lookup", "stored") == answer("packed", "none", "stored")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "GPTQ of 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "layout 'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "layout 'gemv'"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes, which is not read; GPTQ and AWQ"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size 0"),
        (compressed("int-quantized", num_bits=8), "layout 'int-quantized'"),
        (compressed("pack-quantized", num_bits=4, actorder="group"), "actorder 'group'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ("awq", "quantised with 'awq'"),
    ],
)
def test_what_is_not_read_is_named(tmp_path: Path, config: Any, said: str) -> None:
    tiny.write_folder(tmp_path, quantization_config=config)
    with pytest.raises(OutriderError, match=said):
        open_checkpoint(tmp_path)


def test_parts_that_are_missing_or_do_not_fit(tmp_path: Path) -> None:
    write(tmp_path, "gptq asymmetric 4")
    name = "model.layers.0.mlp.up_proj"
    whole = load_file(tmp_path / "model.safetensors")
    for part, changed, said in (
        ("scales", whole[f"{name}.scales"][:, :-1].contiguous(), "cannot be unpacked"),
        ("qweight", whole[f"{name}.qweight"].float(), "stored as torch.float32"),
        ("qweight", whole[f"{name}.qweight"][0].contiguous(), "packed numbers have shape"),
        ("g_idx", whole[f"{name}.g_idx"] + 99, "cannot be unpacked"),
    ):
        save_file(whole | {f"{name}.{part}": changed}, tmp_path / "model.safetensors")
        with pytest.raises(BadCheckpoint, match=said) as found:
            opened = open_checkpoint(tmp_path)
            opened.shape(f"{name}.weight")
            opened.stored(f"{name}.weight")
        assert f"{name}.weight" in str(found.value)
    without = {key: value for key, value in whole.items() if key != f"{name}.qzeros"}
    save_file(without, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=f"no tensor '{name}.weight'"):
        check_shapes(open_checkpoint(tmp_path))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {
        kind: tmp_path_factory.mktemp("kind")
        for kind in ("gptq 4", "awq asymmetric 4", "compressed asymmetric 4")
    }
    for kind, path in made.items():
        write(path, kind)
        (path / "sound").write_bytes((path / "model.safetensors").read_bytes())
    return made


@given(data=st.data())
def test_damaged_parts_are_errors_and_no_crash(folders: dict[str, Path], data: st.DataObject) -> None:
    path = folders[data.draw(st.sampled_from(sorted(folders)))]
    whole = load_file(path / "sound")
    name = "model.layers.1.self_attn.k_proj"
    part = data.draw(st.sampled_from(sorted(key for key in whole if key.startswith(name))))
    shape = tuple(data.draw(st.lists(st.integers(0, 9), max_size=3)))
    kind = data.draw(st.sampled_from([torch.int32, torch.int64, torch.float16, torch.uint8, torch.bool]))
    save_file(whole | {part: torch.ones(shape, dtype=kind)}, path / "model.safetensors")
    try:
        opened = open_checkpoint(path)
        check_shapes(opened)
        opened.stored_format(f"{name}.weight")
        opened.stored(f"{name}.weight")
        opened.tensor(f"{name}.weight")
    except (BadCheckpoint, UnsupportedModel) as problem:
        assert json.dumps(str(problem))
