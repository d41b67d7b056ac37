"""Checkpoints of both formats: the same names and values, and every way a folder can be wrong."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from outrider.errors import BadCheckpoint, ModelNotFound, UnsupportedModel
from outrider.load.checkpoint import INDEX, Checkpoint, check_shapes, open_checkpoint, open_safetensors

from . import tiny


def assert_same_tensors(checkpoint: Checkpoint, weights: dict[str, torch.Tensor]) -> None:
    assert sorted(checkpoint.names()) == sorted(weights)
    for name, value in weights.items():
        found = checkpoint.tensor(name)
        assert found.dtype == torch.float32
        assert torch.equal(found, value.float()), name
        assert checkpoint.shape(name) == tuple(value.shape)


def test_a_folder_s_bfloat16_matrices_stay_bfloat16(tmp_path: Path) -> None:
    weights = tiny.hf_weights()
    names = [name for name in weights if weights[name].dim() == 2]
    stored = {name: w.bfloat16() if name in names[1:] else w for name, w in weights.items()}
    tiny.write_folder(tmp_path)
    save_file(stored, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    for name, value in stored.items():
        found = checkpoint.stored(name)
        assert isinstance(found, torch.Tensor) and torch.equal(found, value) and found.dtype == value.dtype
        assert checkpoint.stored_format(name) == str(value.dtype).removeprefix("torch.")


# ----------------------------------------------------------------------------------------------------- GGUF


def test_gguf_has_hugging_faces_names_and_row_order(tiny_gguf: Path) -> None:
    checkpoint = open_checkpoint(tiny_gguf)
    assert_same_tensors(checkpoint, tiny.hf_weights())
    check_shapes(checkpoint)
    assert checkpoint.config is not None
    assert checkpoint.config.family == "llama"
    assert checkpoint.tokenizer is checkpoint.tokenizer
    assert checkpoint.chat_template is None
    assert checkpoint.total_bytes == tiny_gguf.stat().st_size


def test_gguf_biases_are_unpermuted_too(tmp_path: Path) -> None:
    weights = tiny.hf_weights(tied=False)
    for name, value in list(weights.items()):
        if "self_attn" in name:
            weights[name.replace("weight", "bias")] = torch.randn(len(value))
    tiny.write_gguf(tmp_path / "b.gguf", tensors=tiny.gguf_tensors(weights))
    checkpoint = open_checkpoint(tmp_path / "b.gguf")
    assert_same_tensors(checkpoint, weights)
    check_shapes(checkpoint)
    assert checkpoint.config is not None
    spec = checkpoint.config.specs[0]
    assert (spec.qkv_bias, spec.out_bias, checkpoint.config.tied) == (True, True, False)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_gguf_qwen_rows_are_not_permuted(tmp_path: Path, family: str) -> None:
    kind = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}[family]
    sizes: dict[str, Any] = {
        k: v for k, v in tiny.hf_config().items() if k not in ("model_type", "eos_token_id")
    }
    model = kind[1](kind[0](**sizes, head_dim=tiny.HIDDEN // tiny.HEADS))
    weights = {n: v.detach().clone() for n, v in model.state_dict().items() if n != "lm_head.weight"}
    metadata = tiny.model_metadata(family) | tiny.tokenizer_metadata("qwen2")
    tiny.write_gguf(tmp_path / "q.gguf", metadata, tiny.gguf_tensors(weights, permuted=False))
    checkpoint = open_checkpoint(tmp_path / "q.gguf")
    assert_same_tensors(checkpoint, weights)
    check_shapes(checkpoint)


def test_gguf_quantised(tmp_path: Path) -> None:
    kinds = {
        "blk.0.ffn_up.weight": gguf.GGMLQuantizationType.Q4_1,
        "token_embd.weight": gguf.GGMLQuantizationType.Q8_0,
    }
    tiny.write_gguf(tmp_path / "q.gguf", kinds=kinds)
    checkpoint = open_checkpoint(tmp_path)  # a folder with one .gguf is that .gguf
    original = tiny.hf_weights()
    for name, near in (("model.layers.0.mlp.up_proj.weight", 0.25), ("model.embed_tokens.weight", 0.02)):
        difference = (checkpoint.tensor(name) - original[name]).abs().max()
        assert 0 < difference < near
        assert checkpoint.shape(name) == tuple(original[name].shape)


def test_gguf_with_llama3_rope(tmp_path: Path) -> None:
    tensors = tiny.gguf_tensors(tiny.hf_weights()) | {"rope_freqs.weight": np.ones(4, np.float32)}
    tiny.write_gguf(tmp_path / "r.gguf", tensors=tensors)
    checkpoint = open_checkpoint(tmp_path / "r.gguf")  # all ones: a factor of 1
    assert checkpoint.config is not None
    assert checkpoint.config.rope.kind == "llama3"
    assert_same_tensors(checkpoint, tiny.hf_weights())


def test_gguf_strange_tensors_are_named(tmp_path: Path) -> None:
    for name in ("blk.0.ffn_gate_exps.weight", "v.patch_embd.weight", "blk.00.attn_q.weight"):
        tiny.write_gguf(tmp_path / "s.gguf", tensors={name: np.ones((8, 8), np.float32)})
        with pytest.raises(UnsupportedModel, match=name):
            open_checkpoint(tmp_path / "s.gguf")


def test_gguf_wrong_shapes_are_named(tmp_path: Path) -> None:
    weights = tiny.hf_weights()
    del weights["model.layers.1.mlp.up_proj.weight"]
    tiny.write_gguf(tmp_path / "a.gguf", tensors=tiny.gguf_tensors(weights))
    with pytest.raises(BadCheckpoint, match=r"no tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        check_shapes(open_checkpoint(tmp_path / "a.gguf"))
    metadata = tiny.model_metadata(feed_forward_length=63) | tiny.tokenizer_metadata()
    tiny.write_gguf(tmp_path / "b.gguf", metadata)
    with pytest.raises(
        BadCheckpoint, match=r"gate_proj\.weight' .* has shape \[64, 32\]; its config says \[63, 32\]"
    ):
        check_shapes(open_checkpoint(tmp_path / "b.gguf"))
    with pytest.raises(BadCheckpoint, match=r"no tensor 'lm_head\.weight'"):
        open_checkpoint(tmp_path / "b.gguf").tensor("lm_head.weight")


def test_gguf_chat_template(tmp_path: Path) -> None:
    metadata = (
        tiny.model_metadata() | tiny.tokenizer_metadata() | {"tokenizer.chat_template": "{{ messages }}"}
    )
    tiny.write_gguf(tmp_path / "c.gguf", metadata)
    assert open_checkpoint(tmp_path / "c.gguf").chat_template == "{{ messages }}"


@pytest.mark.model
def test_the_built_in_model(smollm2_checkpoint: Checkpoint) -> None:
    check_shapes(smollm2_checkpoint)
    assert smollm2_checkpoint.config is not None
    c = smollm2_checkpoint.config
    assert (c.layers, c.hidden, c.heads, c.kv_heads, c.head_dim) == (30, 576, 9, 3, 64)
    assert (c.vocab, c.intermediate, c.context, c.tied, c.rope.theta) == (49152, 1536, 8192, True, 100000.0)
    assert c.eos_ids == (2,)
    for name in smollm2_checkpoint.names():
        assert torch.isfinite(smollm2_checkpoint.tensor(name)).all()
    assert "<|im_start|>" in (smollm2_checkpoint.chat_template or "")


# ---------------------------------------------------------------------------------------------- safetensors


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_safetensors(tmp_path: Path, shards: int, dtype: torch.dtype) -> None:
    tiny.write_folder(tmp_path, shards, dtype)
    checkpoint = open_checkpoint(tmp_path)
    assert_same_tensors(checkpoint, {name: value.to(dtype) for name, value in tiny.hf_weights().items()})
    check_shapes(checkpoint)
    assert checkpoint.chat_template == "T"
    assert checkpoint.tokenizer.eos_ids == (0,)
    assert checkpoint.total_bytes == sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))


def test_saved_by_transformers(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    config = {k: v for k, v in tiny.hf_config().items() if k != "model_type"}
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    check_shapes(checkpoint)
    state = model.state_dict()
    for name in checkpoint.names():
        assert torch.equal(checkpoint.tensor(name), state[name])


def test_unknown_families_have_no_config(tmp_path: Path) -> None:
    tiny.write_folder(tmp_path, model_type="gpt2")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config is None
    assert checkpoint.raw_config["model_type"] == "gpt2"
    check_shapes(checkpoint)


def test_end_ids_of_both_configs(tmp_path: Path) -> None:
    tiny.write_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 0]}')
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config is not None
    assert checkpoint.config.eos_ids == (0, 7)
    assert checkpoint.tokenizer.eos_ids == (0, 7)


def test_where_a_chat_template_may_be(tmp_path: Path) -> None:
    tiny.write_folder(tmp_path)
    named = [{"name": "tools", "template": "A"}, {"name": "default", "template": "B"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert open_checkpoint(tmp_path).chat_template == "B"
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert open_checkpoint(tmp_path).chat_template is None
    (tmp_path / "chat_template.json").write_text('{"chat_template": "C"}')
    assert open_checkpoint(tmp_path).chat_template == "C"
    (tmp_path / "chat_template.jinja").write_text("D")
    assert open_checkpoint(tmp_path).chat_template == "D"


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "model.pth", "last.ckpt"])
def test_pickle_is_refused(tmp_path: Path, file: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny.hf_config()))
    (tmp_path / file).write_bytes(b"\x80\x04")
    for path in (tmp_path, tmp_path / file):
        with pytest.raises(BadCheckpoint, match=f"{file} is in pickle form, .*safetensors"):
            open_checkpoint(path)


def test_the_line_that_a_refused_pickle_is_told_with_converts_it(tmp_path: Path) -> None:
    """Tied weights share their memory there, which safetensors does not have."""
    folder = tmp_path / "a model's"
    tiny.write_folder(folder)
    tensors = load_file(folder / "model.safetensors")
    torch.save({**tensors, "also": next(iter(tensors.values()))}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadCheckpoint) as refused:
        open_checkpoint(folder)
    line = str(refused.value).splitlines()[1].strip()
    subprocess.run(shlex.split(line), check=True)
    opened = open_checkpoint(folder)
    assert all(torch.equal(opened.tensor(name), tensors[name]) for name in tensors)


def edit_index(path: Path, name: str, file: Any) -> None:
    index = json.loads((path / INDEX).read_text())
    index["weight_map"][name] = file
    (path / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..\\x.safetensors", "x.bin", 3]
)
def test_an_index_must_stay_in_its_folder(tmp_path: Path, file: Any) -> None:
    folder = tmp_path / "model"
    tiny.write_folder(folder, shards=2)
    save_file({"stolen": torch.ones(1)}, tmp_path / "x.safetensors")
    edit_index(folder, "stolen", file)
    with pytest.raises(BadCheckpoint, match="not a file of this folder"):
        open_checkpoint(folder)


def test_an_index_must_tell_the_truth(tmp_path: Path) -> None:
    tiny.write_folder(tmp_path, shards=2)
    edit_index(tmp_path, "model.ghost.weight", "model-00001-of-00002.safetensors")
    with pytest.raises(BadCheckpoint, match=r"'model\.ghost\.weight' is in model-00001"):
        open_checkpoint(tmp_path)
    tiny.write_folder(tmp_path, shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match="lacks model-00002-of-00002"):
        open_checkpoint(tmp_path)
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(BadCheckpoint, match="no weight_map"):
        open_checkpoint(tmp_path)


def test_two_files_with_one_tensor(tmp_path: Path) -> None:
    tiny.write_folder(tmp_path, shards=2)
    first, second = sorted(tmp_path.glob("model-*.safetensors"))
    weights = load_file(second) | {
        "model.norm.weight": torch.ones(32),
        "model.embed_tokens.weight": torch.ones(1),
    }
    save_file(weights, second)
    with pytest.raises(BadCheckpoint, match=f"is in both {first.name} and {second.name}"):
        open_checkpoint(tmp_path)


def test_a_file_of_another_user_is_said_to_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.write_folder(tmp_path)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(
        BadCheckpoint, match=r"model\.safetensors cannot be read by this user: permission denied"
    ):
        open_safetensors(tmp_path / "model.safetensors")


def test_damaged_safetensors(tmp_path: Path) -> None:
    tiny.write_folder(tmp_path)
    sound = (tmp_path / "model.safetensors").read_bytes()
    for content in (b"", sound[:100], sound[:-1], b"\xff" * 64, (2**62).to_bytes(8, "little") + sound[8:]):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(BadCheckpoint, match=r"model\.safetensors"):
            open_checkpoint(tmp_path)


@pytest.mark.parametrize("content", ["", "[1]", "{", "[" * 100_000, "\xff", '{"model_type": "llama"}'])
def test_damaged_config(tmp_path: Path, content: str) -> None:
    tiny.write_folder(tmp_path)
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(BadCheckpoint, match=r"config\.json"):
        open_checkpoint(tmp_path)


def test_stored_integers_are_refused(tmp_path: Path) -> None:
    tiny.write_folder(tmp_path)
    save_file({"model.norm.weight": torch.ones(32, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="int8"):
        open_checkpoint(tmp_path).tensor("model.norm.weight")


def test_incomplete_folders(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(BadCheckpoint, match="holds no weights"):
        open_checkpoint(tmp_path)
    tiny.write_folder(tmp_path)
    with pytest.raises(BadCheckpoint, match="give the folder"):
        open_checkpoint(tmp_path / "model.safetensors")
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedModel, match=r"no tokenizer\.json"):
        _ = open_checkpoint(tmp_path).tokenizer
    (tmp_path / "config.json").unlink()
    with pytest.raises(BadCheckpoint, match=r"no config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(tiny.hf_config()))
    with pytest.raises(BadCheckpoint, match=r"2 \.safetensors files"):
        open_checkpoint(tmp_path)


def test_several_ggufs_need_a_name(tmp_path: Path, tiny_gguf: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(tiny_gguf.read_bytes())
    with pytest.raises(BadCheckpoint, match=r"name one: a\.gguf, b\.gguf"):
        open_checkpoint(tmp_path)
