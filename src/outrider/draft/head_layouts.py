"""How an EAGLE head lies on disk: our own layout, the published EAGLE-3 one, and that of `speculators`.

All three are a folder with config.json and safetensors. Tensors have the names of `head_shapes` in ours; the others
name some of them differently and cannot say everything. What a head is, is a `HeadConfig` in every case.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.draft.eagle_head import EagleHead, HeadConfig, layer_prefix
from outrider.errors import BadCheckpoint, UnsupportedModel
from outrider.load.checkpoint import INDEX, PICKLES, open_safetensors, pickle_refused, read_json, weight_files
from outrider.load.config import ModelConfig, config_from_json
from outrider.model.decoder import Layered
from outrider.types import MAX_NODES

OWN, VERSION = "outrider_head", 1
SHARD_BYTES = 15 << 20
# Beside a head's own tensors: maps that d2t says already, and copies of the target's.
IGNORED = ("t2d", "embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight")


def load_eagle(
    folder: Path, target: Layered, context: int, network: type[EagleHead] = EagleHead
) -> EagleHead:
    """A head from a folder in any of the layouts."""
    config, tensors = read_head(folder, target.config)
    return network(config, lambda name: tensors[name].float(), target, context + MAX_NODES + 1)


def read_head(folder: Path, target: ModelConfig) -> tuple[HeadConfig, dict[str, Tensor]]:
    """What the head is, and its tensors under our own names, as they are stored."""
    raw = read_json(folder / "config.json")
    layer = config_from_json({**raw, "model_type": "llama", "num_hidden_layers": 1})
    if layer.hidden != target.hidden or layer.vocab != target.vocab:
        raise BadCheckpoint(
            f"{folder} is a head for a target of hidden size {layer.hidden} and vocabulary {layer.vocab}; "
            f"this target has {target.hidden} and {target.vocab}"
        )
    draft_vocab = int(raw.get("draft_vocab_size") or layer.vocab)
    config = HeadConfig(layer, draft_vocab, **_own_fields(folder, raw, target))
    tensors = _tensors(folder)
    _check(folder, tensors, config)
    return config, tensors


def _own_fields(folder: Path, raw: dict[str, Any], target: ModelConfig) -> dict[str, Any]:
    """The rest of a HeadConfig."""
    own = raw.get(OWN)
    if own is None:
        return {"taps": eagle_taps(target.layers)}
    known = {"taps": (), "layers": 1, **dict.fromkeys(FLAGS, False)}
    if not isinstance(own, dict) or own.get("version") != VERSION or set(own) - set(known) - {"version"}:
        raise BadCheckpoint(f"{folder}: {OWN} should be version {VERSION} with {', '.join(known)}")
    made = {name: own.get(name, default) for name, default in known.items()}
    taps, layers = made["taps"], made["layers"]
    if not taps or not all(type(t) is int and 0 <= t <= target.layers for t in taps):
        raise BadCheckpoint(
            f"{folder}: taps must name layers from 0 to {target.layers} of the target, not {taps!r:.80}"
        )
    if type(layers) is not int or not 0 < layers <= target.layers:
        raise BadCheckpoint(f"{folder}: {layers!r:.20} layers cannot be right")
    if made["tap_norms"] and made["joint_norm"]:
        raise BadCheckpoint(f"{folder}: tap_norms and joint_norm exclude each other")
    return {**made, "taps": tuple(taps)}


FLAGS = ("tap_norms", "norm_output", "shared_head", "joint_norm", "normed_residual")


def eagle_taps(layers: int) -> tuple[int, ...]:
    """Where published heads look: at what enters the third layer, the middle one, and the third from the
    end.
    """
    return (min(2, layers - 1), layers // 2, max(layers - 3, 0))


def head_shapes(config: HeadConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of a head by its name in our own layout."""
    c, h, taps = config.layer, config.layer.hidden, len(config.taps)
    q, kv, inner = c.heads * c.head_dim, c.kv_heads * c.head_dim, c.intermediate
    yield "fc.weight", (h, taps * h)
    if config.tap_norms:
        yield "tap_norms.weight", (taps, h)
    if config.joint_norm:
        yield "input_norm.weight", (taps * h,)
    yield "midlayer.hidden_norm.weight", (h,)
    for i in range(config.layers):
        inputs = h if i else 2 * h
        for name, shape in (
            ("input_layernorm", (h,)), ("post_attention_layernorm", (h,)), ("self_attn.q_proj", (q, inputs)),
            ("self_attn.k_proj", (kv, inputs)), ("self_attn.v_proj", (kv, inputs)), ("self_attn.o_proj", (h, q)),
            ("mlp.gate_proj", (inner, h)), ("mlp.up_proj", (inner, h)), ("mlp.down_proj", (h, inner)),
        ):  # fmt: skip
            yield f"{layer_prefix(i)}{name}.weight", shape
    yield "norm.weight", (h,)
    if not config.shared_head:
        yield "lm_head.weight", (config.draft_vocab, h)
    if not config.whole:
        yield "d2t", (config.draft_vocab,)


def _tensors(folder: Path) -> dict[str, Tensor]:
    if not any(folder.glob("*.safetensors")):
        for file in sorted(folder.iterdir()):
            if file.suffix in PICKLES:
                raise pickle_refused(file)
        raise BadCheckpoint(f"{folder} holds no .safetensors file")
    tensors: dict[str, Tensor] = {}
    for shard in weight_files(folder):
        opened = open_safetensors(folder / shard)
        for name in opened.keys():  # noqa: SIM118 - not a dict
            if name not in IGNORED:
                tensors[name.replace("layers.0.", "midlayer.")] = opened.get_tensor(name)
    return tensors


def _check(folder: Path, tensors: dict[str, Tensor], config: HeadConfig) -> None:
    """Every tensor is there in its shape, and no other."""
    if config.whole and "d2t" in tensors:
        _check_map(folder, tensors["d2t"], config)
        if bool(tensors.pop("d2t").any()):
            raise BadCheckpoint(f"{folder}: d2t mixes up a vocabulary that is whole")
    expected = dict(head_shapes(config))
    for name, shape in expected.items():
        if name not in tensors:
            raise BadCheckpoint(f"{folder} has no tensor {name!r}: not an EAGLE-3 head, or of another shape")
        if tuple(tensors[name].shape) != shape:
            raise BadCheckpoint(f"{folder}: {name} has shape {tuple(tensors[name].shape)}, expected {shape}")
    for name in sorted(set(tensors) - set(expected)):
        raise UnsupportedModel(f"{folder} has a tensor {name!r}, which no head that its config describes has")
    if not config.whole:
        _check_map(folder, tensors["d2t"], config)


def _check_map(folder: Path, d2t: Tensor, config: HeadConfig) -> None:
    ids = torch.arange(len(d2t)) + d2t.long()
    if bool((ids < 0).any()) or bool((ids >= config.layer.vocab).any()):
        raise BadCheckpoint(f"{folder}: d2t points outside the target's vocabulary of {config.layer.vocab}")
    if len(ids.unique()) != len(ids):
        raise BadCheckpoint(f"{folder}: d2t gives two words of the head the same id")


# -------------------------------------------------------------------------------------------------- writing


def write_head(folder: Path, config: HeadConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write a head in our own layout, its numbers rounded to bfloat16."""
    own = {"version": VERSION, "taps": list(config.taps), "layers": config.layers}
    raw = {**_layer_json(config), OWN: {**own, **{name: getattr(config, name) for name in FLAGS}}}
    _write(folder, raw, {name: tensors[name] for name, _ in head_shapes(config)})


def _layer_json(config: HeadConfig) -> dict[str, Any]:
    c = config.layer
    scaling = {} if c.rope.kind == "default" else {"rope_type": c.rope.kind, **c.rope.scaling}
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": c.vocab,
        "draft_vocab_size": config.draft_vocab, "hidden_size": c.hidden, "intermediate_size": c.intermediate,
        "num_hidden_layers": config.layers, "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim, "hidden_act": "silu", "rms_norm_eps": c.norm_eps, "rope_theta": c.rope.theta,
        **({"rope_scaling": scaling} if scaling else {}), "max_position_embeddings": c.context,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip


def _write(folder: Path, raw: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Shards of at most SHARD_BYTES, but for a tensor that is larger by itself. What lay there before goes."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("model*.safetensors"), folder / INDEX):
        old.unlink(missing_ok=True)
    rounded = {
        name: (t.to(torch.bfloat16) if t.is_floating_point() else t).cpu().contiguous()
        for name, t in tensors.items()
    }
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in rounded.items():
        if shards[-1] and _nbytes(shards[-1]) + tensor.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", {"format": "pt"})
    else:
        _write_shards(folder, shards)
    (folder / "config.json").write_text(json.dumps(raw, indent=1) + "\n")


def _write_shards(folder: Path, shards: list[dict[str, Tensor]]) -> None:
    where: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        name = f"model-{i:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / name, {"format": "pt"})
        where.update(dict.fromkeys(shard, name))
    total = sum(map(_nbytes, shards))
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")


def _nbytes(shard: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in shard.values())


def parameters(config: HeadConfig) -> int:
    """Numbers that a head has of its own."""
    return sum(prod(shape) for name, shape in head_shapes(config) if name != "d2t")
