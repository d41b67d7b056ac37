"""EAGLE heads on disk: our own layout, the published EAGLE-3 one, and that of `speculators`.

All three are a folder with config.json and safetensors. Tensors have the names of `head_shapes` in ours; the others
name some of them differently and cannot say everything. What a head is, is a `HeadConfig` in every case.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from outrider.errors import BadCheckpoint, InvalidRequest, UnsupportedModel, naming
from outrider.load.cards import ENGINES, DraftFacts
from outrider.load.checkpoint import (
    INDEX,
    PICKLES,
    Checkpoint,
    GgufCheckpoint,
    check_float,
    open_checkpoint,
    open_safetensors,
    pickle_refused,
    read_json,
    tensor_of,
    weight_files,
)
from outrider.load.config import ModelConfig
from outrider.load.families import config_from_json

FREQUENT = "frequent"  # ids that the target writes most, in falling order: of a head that knows all of them

OWN, VERSION = "outrider_head", 1
FLAGS = ("tap_norms", "norm_output", "shared_head", "joint_norm", "normed_residual")
# The same in the other layouts; a shared head is one whose folder has none.
PUBLISHED = {
    "tap_norms": "fc_norm",
    "norm_output": "norm_output",
    "joint_norm": "norm_before_fc",
    "normed_residual": "norm_before_residual",
}
TAPS = "eagle_aux_hidden_state_layer_ids"
LAYOUTS = ("outrider", "eagle3", "speculators")
SHARD_BYTES = 15 << 20
SPECULATIVE_TOKENS = 5  # that an exported head suggests to engines that ask it
MAX_HEAD_LAYERS = 64  # checked before anything is made per layer
EMBEDDING = "embed_tokens.weight"
# Beside a head's own tensors: a map that d2t says already, and copies of the target's.
IGNORED = ("t2d", EMBEDDING, "verifier_norm.weight", "verifier_lm_head.weight")


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """The head's layers, shaped like layers of its family, and how it is tied to its target."""

    layer: ModelConfig  # its vocabulary and hidden size are the target's
    draft_vocab: int
    taps: tuple[int, ...]  # i: what enters the target's layer i; the number of layers: what leaves the last
    layers: int = 1  # the first reads embedding and hidden state, further ones are ordinary
    tap_norms: bool = False  # an RMS norm for each tap before the fusion
    norm_output: bool = False  # the normed hidden state is fed back
    shared_head: bool = False  # logits by rows of the target's own head
    joint_norm: bool = False  # one RMS norm over all taps together before the fusion
    normed_residual: bool = False  # the first layer adds to its normed input

    @property
    def whole(self) -> bool:
        """Its vocabulary is the target's."""
        return self.draft_vocab == self.layer.vocab


def is_eagle(path: Path) -> bool:
    try:
        raw = read_json(path / "config.json", optional=True) if path.is_dir() else {}
    except BadCheckpoint:
        return False
    kinds = str(raw.get("architectures")).lower()
    return "eagle" in kinds or "draft_vocab_size" in raw or "speculators_model_type" in raw


def read_head(folder: Path, target: ModelConfig, words: int = 0) -> tuple[HeadConfig, dict[str, Tensor]]:
    """What the head is, and its tensors under our own names, as they are stored. With `words`, a head that shares its
    target's matrix and says which words are frequent keeps so many of them.
    """
    raw = read_json(folder / "config.json")
    fields = _own_fields(folder, raw[OWN]) if OWN in raw else None
    if "speculators_model_type" in raw:
        raw = _unnested(folder, raw)
    with naming(folder / "config.json"):
        layer = config_from_json({**raw, "model_type": "llama", "num_hidden_layers": 1})
    if layer.hidden != target.hidden or layer.vocab != target.vocab:
        raise BadCheckpoint(
            f"{folder} is a head for a target of hidden size {layer.hidden} and vocabulary {layer.vocab}; "
            f"this target has {target.hidden} and {target.vocab}"
        )
    if layer.specs[0].qkv_bias or layer.specs[0].mlp_bias:
        raise UnsupportedModel(
            f"{folder} is a head with biases (attention_bias, mlp_bias), which are not supported"
        )
    draft_vocab = raw.get("draft_vocab_size") or layer.vocab
    tensors = _tensors(folder)
    if fields is None:
        alone = draft_vocab == layer.vocab and "lm_head.weight" not in tensors
        fields = {**_published_fields(folder, raw, target), "shared_head": alone}
    _check_fields(folder, fields, target)
    config = HeadConfig(layer, draft_vocab, **fields)
    _check(folder, tensors, config)
    if FREQUENT in tensors and 0 < words < len(tensors[FREQUENT]):
        ids = tensors.pop(FREQUENT)[:words].long().sort().values
        return replace(config, draft_vocab=words), {**tensors, "d2t": ids - torch.arange(words)}
    return config, tensors


def _own_fields(folder: Path, own: Any) -> dict[str, Any]:
    """Of a HeadConfig, what the layer's shape does not say."""
    known = {"taps": [], "layers": 1, **dict.fromkeys(FLAGS, False)}
    if not isinstance(own, dict) or own.get("version") != VERSION or set(own) - set(known) - {"version"}:
        raise BadCheckpoint(f"{folder}: {OWN} should be of version {VERSION} and have {', '.join(known)}")
    made = {name: own.get(name, default) for name, default in known.items()}
    return {**made, "taps": tuple(made["taps"]) if isinstance(made["taps"], list) else made["taps"]}


def _unnested(folder: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """The config of `speculators` as if it were a published one."""
    kind, layer = raw["speculators_model_type"], raw.get("transformer_layer_config")
    if kind != "eagle3":
        raise UnsupportedModel(
            f"{folder} is a draft of the kind {kind!r:.40}; of speculators, only eagle3 is read"
        )
    if not isinstance(layer, dict):
        raise BadCheckpoint(f"{folder}: config.json has no 'transformer_layer_config'")
    if PUBLISHED["normed_residual"] not in raw:  # readers differ in what they take it for
        raise BadCheckpoint(f"{folder}: config.json has no 'norm_before_residual'; write true or false there")
    return {**layer, **{name: value for name, value in raw.items() if name != "transformer_layer_config"}}


def _published_fields(folder: Path, raw: dict[str, Any], target: ModelConfig) -> dict[str, Any]:
    nested = raw.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise BadCheckpoint(f"{folder}: eagle_config should be an object, not {nested!r:.60}")

    def said(name: str, default: Any) -> Any:
        found = nested.get(name, raw.get(name))
        return default if found is None else found

    if not said("use_aux_hidden_state", True):
        raise UnsupportedModel(
            f"{folder} is a head without fusion (use_aux_hidden_state is false), as EAGLE-3 has it"
        )
    if said("target_hidden_size", target.hidden) != target.hidden:
        raise BadCheckpoint(
            f"{folder} is a head for a target of hidden size {said('target_hidden_size', 0)}; this one has "
            f"{target.hidden}"
        )
    taps = said(TAPS, None) or eagle_taps(target.layers)
    if isinstance(taps, list) and all(type(tap) is int for tap in taps):
        taps = tuple(sorted(set(taps)))
    return {
        "taps": taps,
        "layers": said("num_hidden_layers", 1),
        **{name: said(theirs, False) for name, theirs in PUBLISHED.items()},
    }


def _check_fields(folder: Path, fields: dict[str, Any], target: ModelConfig) -> None:
    taps, layers = fields["taps"], fields["layers"]
    if not (
        taps and isinstance(taps, tuple) and all(type(t) is int and 0 <= t <= target.layers for t in taps)
    ):
        raise BadCheckpoint(
            f"{folder}: taps must name layers from 0 to {target.layers} of the target, not {taps!r:.80}"
        )
    if type(layers) is not int or not 0 < layers <= MAX_HEAD_LAYERS:
        raise BadCheckpoint(f"{folder}: a head of {layers!r:.20} layers cannot be right")
    for name in FLAGS:
        if type(fields[name]) is not bool:
            raise BadCheckpoint(f"{folder}: {name} should be true or false, not {fields[name]!r:.20}")
    if fields["tap_norms"] and fields["joint_norm"]:
        raise UnsupportedModel(f"{folder} norms its taps one by one and together; either is read, not both")


def eagle_taps(layers: int) -> tuple[int, ...]:
    """Where published heads look: at what enters the third layer, the middle one, and the third from the
    end.
    """
    return (min(2, layers - 1), layers // 2, max(layers - 3, 0))


def layer_prefix(number: int) -> str:
    return "midlayer." if number == 0 else f"layers.{number}."


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
    """By our own names, without what is not the head's."""
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
                tensors[name.replace("layers.0.", "midlayer.")] = tensor_of(opened, name, folder / shard)
    norms = sorted(name for name in tensors if name.startswith("fc_norm."))
    if norms:  # fc_norm.0.weight, fc_norm.1.weight, ...: one of each tap
        ordered = [tensors.pop(name) for name in sorted(norms, key=lambda name: (len(name), name))]
        if len({one.shape for one in ordered}) > 1:
            raise BadCheckpoint(f"{folder}: the shapes of {', '.join(norms)} differ")
        tensors["tap_norms.weight"] = torch.stack(ordered)
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
        if name != "d2t":
            check_float(tensors[name], name, folder)
    if FREQUENT in tensors:
        if not (config.whole and config.shared_head):
            raise UnsupportedModel(
                f"{folder}: {FREQUENT} is for a head that shares its target's whole matrix"
            )
        _check_ids(folder, tensors[FREQUENT], config, FREQUENT)
    for name in sorted(set(tensors) - set(expected) - {FREQUENT}):
        raise UnsupportedModel(f"{folder} has a tensor {name!r}, which no head that its config describes has")
    if not config.whole:
        _check_map(folder, tensors["d2t"], config)


def _check_map(folder: Path, d2t: Tensor, config: HeadConfig) -> None:
    if d2t.dim() != 1 or d2t.is_floating_point():
        raise BadCheckpoint(f"{folder}: d2t is no list of ids")
    _check_ids(folder, torch.arange(len(d2t)) + d2t.long(), config, "d2t")


def _check_ids(folder: Path, ids: Tensor, config: HeadConfig, name: str) -> None:
    if ids.dim() != 1 or ids.is_floating_point():
        raise BadCheckpoint(f"{folder}: {name} is no list of ids")
    if bool((ids < 0).any()) or bool((ids >= config.layer.vocab).any()):
        raise BadCheckpoint(
            f"{folder}: {name} points outside the target's vocabulary of {config.layer.vocab}"
        )
    if len(ids.unique()) != len(ids):
        raise BadCheckpoint(f"{folder}: {name} gives two words of the head the same id")


# -------------------------------------------------------------------------------------------------- writing


def write_head(
    folder: Path,
    config: HeadConfig,
    tensors: Mapping[str, Tensor],
    layout: str = "outrider",
    target: ModelConfig | None = None,
    target_name: str = "",
) -> None:
    """Write a head, its numbers rounded to bfloat16. Layouts other than our own are for a `target` and have the head's
    matrix, also where `config` shares the target's: then `tensors` must hold those rows as lm_head.weight.
    """
    if layout == "outrider":
        own = {"version": VERSION, "taps": list(config.taps), "layers": config.layers}
        raw = {**_layer_json(config), OWN: {**own, **{name: getattr(config, name) for name in FLAGS}}}
        names = [name for name, _ in head_shapes(config)] + [FREQUENT] * (FREQUENT in tensors)
        _write(folder, raw, {name: tensors[name] for name in names})
        return
    if layout not in LAYOUTS:
        raise InvalidRequest(f"layout {layout!r} is not one of {', '.join(LAYOUTS)}", "layout")
    if target is None:
        raise ValueError("heads for other engines are written for a target")
    raw, exported = _exported(replace(config, shared_head=False), tensors, target)
    _write(folder, _nested(raw, target_name) if layout == "speculators" else raw, exported)


def _exported(
    config: HeadConfig, tensors: Mapping[str, Tensor], target: ModelConfig
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors under their published names."""
    if len(set(config.taps)) < len(config.taps):
        raise UnsupportedModel(f"only our own layout can name a tap twice: {config.taps}")
    # Other engines hand them over like this.
    order = sorted(range(len(config.taps)), key=lambda j: config.taps[j])
    made = {name: tensors[name] for name, _ in head_shapes(config)}
    wide = made["fc.weight"].unflatten(1, (len(order), -1))
    made["fc.weight"] = wide[:, order].flatten(1)
    if config.joint_norm:
        made["input_norm.weight"] = made["input_norm.weight"].unflatten(0, (len(order), -1))[order].flatten()
    if config.tap_norms:
        norms = made.pop("tap_norms.weight")
        made |= {f"fc_norm.{i}.weight": norms[j] for i, j in enumerate(order)}
    if not config.whole:
        ids = torch.arange(config.draft_vocab) + made["d2t"].long().cpu()
        made["t2d"] = torch.zeros(config.layer.vocab, dtype=torch.bool).index_fill(0, ids, True)
    raw = _layer_json(config)
    if config.taps != eagle_taps(target.layers):
        raw |= {TAPS: [config.taps[j] for j in order], "num_aux_hidden_states": len(order)}
    return {**raw, **{theirs: getattr(config, name) for name, theirs in PUBLISHED.items()}}, made


def _nested(raw: dict[str, Any], target_name: str) -> dict[str, Any]:
    """A published config as `speculators` has it."""
    outside = {name: raw.pop(name) for name in ("draft_vocab_size", *PUBLISHED.values())}
    outside |= {TAPS: raw.pop(TAPS)} if TAPS in raw else {}
    # The inner config is a model's own, which engines take for that of the head.
    inner = {**raw, "architectures": ["LlamaForCausalLM"]}
    method = {"proposal_type": "greedy", "speculative_tokens": SPECULATIVE_TOKENS, "verifier_accept_k": 1}
    return {
        "architectures": ["Eagle3DraftModel"],
        "model_type": "speculators",
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{**method, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": target_name, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": inner,
        **outside,
        "torch_dtype": "bfloat16",
    }


def engines_that_load(config: HeadConfig, target: ModelConfig) -> tuple[str, ...]:
    """Engines that can serve it, exported where need be."""
    plain = not (config.tap_norms or config.norm_output or config.joint_norm or config.normed_residual)
    if len(set(config.taps)) < len(config.taps):
        return ("outrider",)
    if plain and config.layers == 1 and config.taps == eagle_taps(target.layers):
        return ("outrider", "vllm", "sglang")
    return ("outrider", "vllm")


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
        (folder / "model.safetensors").write_bytes(save(shards[0], {"format": "pt"}))
    else:
        _write_shards(folder, shards)
    (folder / "config.json").write_text(json.dumps(raw, indent=1) + "\n")


def _write_shards(folder: Path, shards: list[dict[str, Tensor]]) -> None:
    where: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        name = f"model-{i:05}-of-{len(shards):05}.safetensors"
        (folder / name).write_bytes(save(shard, {"format": "pt"}))
        where.update(dict.fromkeys(shard, name))
    total = sum(map(_nbytes, shards))
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")


def _nbytes(shard: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in shard.values())


def card_facts(draft: Path, target: Checkpoint) -> DraftFacts:
    """What the files of a draft say of it, for its card: kind, layout, size, and the engines that load it."""
    opened = open_checkpoint(draft)
    if not is_eagle(draft):
        layout = "gguf" if isinstance(opened, GgufCheckpoint) else "huggingface"
        return DraftFacts("lm", layout, count_parameters(opened), ENGINES[layout])
    raw = opened.raw_config
    layout = "outrider" if OWN in raw else "speculators" if "speculators_model_type" in raw else "eagle3"
    assert target.config is not None
    able = engines_that_load(read_head(draft, target.config)[0], target.config)
    engines = tuple(name for name in ENGINES[layout] if name in able)
    return DraftFacts("eagle", layout, count_parameters(opened), engines)


def count_parameters(checkpoint: Checkpoint) -> int:
    """Without maps, and copies of what the target has."""
    names = (name for name in checkpoint.names() if name not in IGNORED and name != "d2t")
    return sum(prod(checkpoint.shape(name)) for name in names)
