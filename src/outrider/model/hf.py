"""Any other transformers causal LM behind the decoder's `forward`: its modules, Outrider's slots and trees.

The model's attention is replaced through transformers' attention interface: keys and values go to slots and
attention reads the slot tables, with the same kernels as the one decoder. The batch travels down the call as
a keyword argument. Linear layers become row-invariant kernels; activations and rotary tables are computed a
row at a time, because torch's vector code rounds the end of a tensor differently from its middle. Norms are
row-wise already.

Not supported: custom code (never run), pickle (never read), and features that the attention kernel does not have. A
model that needs one of these, or whose logits differ from transformers' own on a short trial, is refused by name at
load. A model whose rows still depend on each other (mostly experts) runs one row at a time, with a warning.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from outrider.cache.formats import keep
from outrider.cache.store import KeyValueStore
from outrider.errors import BadCheckpoint, InvalidRequest, OutriderError, UnsupportedModel, install
from outrider.load.checkpoint import Checkpoint
from outrider.load.config import LayerSpec, ModelConfig, end_ids
from outrider.load.families import FAMILIES
from outrider.load.json_files import read_json
from outrider.model.decoder import choose_kernels
from outrider.model.hf_trial import Trial
from outrider.model.parallel import ALONE
from outrider.model.rope import RopeTables
from outrider.model.torch_import import import_all_of_torch
from outrider.types import MAX_NODES, Batch

import_all_of_torch()
try:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.utils import logging as transformers_logging

    from outrider.model.hf_rows import make_rows_independent
except ImportError:  # an extra; load_hf says how to get it
    transformers = None

NAME = "outrider"  # of the attention function and of the keyword argument that carries a pass
TOLERANCE = 5e-4  # of the largest logit, between Outrider's pass and transformers' own
MASK_BUFFERS = (
    ".attn.bias",
    ".attn.masked_bias",
    ".rotary_emb.inv_freq",
    ".attention.bias",
    ".attention.masked_bias",
)
FULL, SLIDING = "full_attention", "sliding_attention"
# What attention may be given beside queries, keys, values, window and scale without changing its result.
HARMLESS = {
    "dropout", "is_causal", "position_ids", "position_embeddings", "cache_position", "past_key_values",
    "use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict",
}  # fmt: skip


def load_hf(checkpoint: Checkpoint, threads: int, kernel_folder: Path, kernels: str) -> HfModel:
    """Builds, converts and tries out the model of a checkpoint whose family the decoder does not know."""
    if transformers is None:
        kind = checkpoint.raw_config.get("model_type")
        raise UnsupportedModel(f"model_type {kind!r} needs transformers; {install('hf')}")
    transformers.AttentionInterface.register(NAME, slot_attention)
    module = _build(checkpoint)
    config = _model_config(module, checkpoint)
    trial = Trial(config)
    with _named(config.family), torch.no_grad():
        expected = trial.expected(lambda ids: module(input_ids=ids, use_cache=False).logits[0])
        module.set_attn_implementation(NAME)
        chosen = choose_kernels(
            config, RopeTables(config.context + MAX_NODES + 1), threads, kernel_folder, kernels
        )
        make_rows_independent(module, chosen)
        model = HfModel(config, module, chosen)
        _check(model, trial, expected)
    return model


class HfModel:
    """A transformers model as the engine sees it."""

    device, dtype, group = torch.device("cpu"), torch.float32, ALONE
    kept = torch.float32
    experts_read = 0.0  # it does not count them

    def __init__(self, config: ModelConfig, module: Any, kernels: Any) -> None:
        self.config, self.module, self.kernels = config, module, kernels
        self.draw, self.filter_logits = kernels.draw, kernels.filter_logits
        self.one_row_a_pass = False
        self._picks_rows = "logits_to_keep" in inspect.signature(module.forward).parameters

    def weight_bytes(self) -> int:
        return self.dtype.itemsize * self.config.parameters

    def forward(self, batch: Batch, store: KeyValueStore) -> Tensor:
        if not self.one_row_a_pass:
            return self._pass(batch, store)
        wanted = set(batch.logit_rows.tolist())
        logits = {r: self._pass(_row(batch, r, r in wanted), store) for r in range(batch.rows)}
        kept = [logits[r] for r in batch.logit_rows.tolist()]
        return torch.cat(kept) if kept else torch.empty(0, self.config.vocab)

    @torch.no_grad()  # not inference_mode: the logits are edited in place later
    def _pass(self, batch: Batch, store: KeyValueStore) -> Tensor:
        kept = {"logits_to_keep": batch.logit_rows} if self._picks_rows else {}
        out = self.module(
            input_ids=batch.ids[None],
            position_ids=self._positions(batch)[None],
            use_cache=False,
            **kept,
            **{NAME: SlotPass(batch, store, self.kernels)},
        )
        logits = out.logits[0] if self._picks_rows else out.logits[0, batch.logit_rows]
        return logits.float().contiguous()

    def _positions(self, batch: Batch) -> Tensor:
        """Clamps positions to the model's range. Draft tokens may lie beyond it, but none is accepted there."""
        last = self.config.context - 1
        outside = batch.positions > last
        if bool(outside.any()) and bool((outside & (batch.ancestors == 0)).any()):
            raise InvalidRequest(f"{self.config.family} reads at most {last + 1} tokens", "context")
        return batch.positions.clamp(max=last).long()


# ------------------------------------------------------------------------------------------------ attention


class Pass(Protocol):
    """What one forward call carries down to every attention layer."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor: ...


@dataclass(slots=True)
class SlotPass:
    """Writes keys and values to their slots, then attends over what each row sees."""

    batch: Batch
    store: KeyValueStore
    kernels: Any

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
        keys, values = self.store.keys[layer], self.store.values[layer]
        keep(keys, self.batch.slots, k)
        keep(values, self.batch.slots, v)
        return self.kernels.attention(q.contiguous(), self.batch, keys, values, window, scale)


@dataclass(frozen=True, slots=True)
class LayerShape:
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(slots=True)
class ProbePass:
    """Records what each layer asks of attention, and computes nothing."""

    shapes: dict[int, LayerShape] = field(default_factory=dict)
    windows: dict[int, int] = field(default_factory=dict)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
        if k.shape != v.shape:
            raise UnsupportedModel(f"keys {list(k.shape[1:])} and values {list(v.shape[1:])} differ in size")
        if layer in self.shapes:
            raise UnsupportedModel(f"layer {layer} has two attentions")
        self.shapes[layer] = LayerShape(q.shape[1], k.shape[1], q.shape[2])
        self.windows[layer] = window
        return q


def slot_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, R, head_dim]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    outrider: Pass | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in place of its own attention; returns [1, R, heads, head_dim]."""
    if outrider is None:
        raise UnsupportedModel("it does not hand keyword arguments down to its attention")
    for name, value_of in extras.items():
        if value_of is not None and name not in HARMLESS:
            raise UnsupportedModel(f"its attention uses {REASONS.get(name, name)}")
    if attention_mask is not None:
        raise UnsupportedModel("it builds an attention mask of its own")
    if not (getattr(module, "is_causal", True) and extras.get("is_causal") in (None, True)):
        raise UnsupportedModel("its attention is not causal")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    layer: Any = module.layer_idx
    return outrider.attend(layer, q, k, v, sliding_window or 0, scale)[None], None


REASONS = {
    "softcap": "soft-capped scores (softcap)",
    "s_aux": "attention sinks (s_aux)",
    "position_bias": "a position bias (ALiBi or the like)",
}


def _row(batch: Batch, row: int, wanted: bool) -> Batch:
    """A batch of one row. Earlier rows have written what it sees: parents come before their children."""
    names = ("ids", "positions", "slots", "table_rows", "prefix", "ancestors")
    one = {name: getattr(batch, name)[row : row + 1] for name in names}
    return replace(batch, **one, logit_rows=torch.zeros(int(wanted), dtype=torch.int64))


# -------------------------------------------------------------------------------------------------- building


def _build(checkpoint: Checkpoint) -> Any:
    """The transformers model with the checkpoint's tensors, float32, its own plain attention."""
    config, kind = _hf_config(checkpoint.raw_config)
    wanted = [name for name in checkpoint.names() if not name.endswith(MASK_BUFFERS)]
    with _quiet(), _named(str(config.model_type)):
        module, info = kind.from_pretrained(
            None,
            config=config,
            state_dict={name: checkpoint.tensor(name) for name in wanted},
            attn_implementation="eager",
            dtype=torch.float32,
            ignore_mismatched_sizes=True,  # they are named below
            output_loading_info=True,
        )
    for what, found in (
        ("has no tensor", info["missing_keys"]),
        ("has a tensor its model_type does not use,", info["unexpected_keys"]),
        ("has a tensor of the wrong shape,", [entry[0] for entry in info["mismatched_keys"]]),
    ):
        if found:
            raise BadCheckpoint(f"{checkpoint.path} {what} {sorted(found)[0]!r}")
    return module.eval().requires_grad_(False)


def _hf_config(raw: dict[str, Any]) -> tuple[Any, Any]:
    """The transformers config and model class for a config.json; refuses by name what cannot work."""
    name = raw.get("model_type")
    if name not in CONFIG_MAPPING:
        why = (
            "needs code of its own (auto_map), which is never run" if raw.get("auto_map") else "is not known"
        )
        raise UnsupportedModel(f"model_type {name!r} {why}; Outrider's own families: {', '.join(FAMILIES)}")
    with _quiet(), _named(str(name)):
        config = CONFIG_MAPPING[name].from_dict({k: v for k, v in raw.items() if k != "auto_map"})
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"model_type {name!r} is an encoder-decoder")
    if config.sub_configs:
        raise UnsupportedModel(
            f"model_type {name!r} is multimodal or nested ({', '.join(config.sub_configs)})"
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(f"model_type {name!r} is not a causal language model in transformers")
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    kind = kind[0] if isinstance(kind, (list, tuple)) else kind
    for reason in _obstacles(config, kind):
        raise UnsupportedModel(f"model_type {name!r}: {reason}")
    return config, kind


def _obstacles(config: Any, kind: Any) -> Iterator[str]:
    """Refuses what the config alone shows to be unsupported."""
    if getattr(config, "quantization_config", None):
        yield "its weights are quantised; use the unquantised model"
    if getattr(kind, "_is_stateful", False):
        yield "it keeps a recurrent state (state-space, linear attention, convolution), not keys and values"
    others = sorted(set(getattr(config, "layer_types", None) or ()) - {FULL, SLIDING})
    if others:
        yield f"it has layers of type {', '.join(others)}"
    if not getattr(kind, "_supports_attention_backend", False):
        yield "its attention does not go through transformers' attention interface"
    if getattr(config, "add_cross_attention", False):
        yield "it has cross-attention"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        yield "its attention uses soft-capped scores (attn_logit_softcapping)"
    if getattr(config, "num_kv_shared_layers", None):
        yield "some of its layers share keys and values (num_kv_shared_layers)"


def _model_config(module: Any, checkpoint: Checkpoint) -> ModelConfig:
    """Sizes from a probing pass, because config.json files name them differently."""
    hf, probe = module.config, ProbePass()
    name = str(hf.model_type)
    usual = module.config._attn_implementation
    module.set_attn_implementation(NAME)
    with _named(name), torch.no_grad():
        first = torch.zeros(1, 1, dtype=torch.int64)
        logits = module(input_ids=first, position_ids=first, use_cache=False, **{NAME: probe}).logits
    module.set_attn_implementation(usual)
    layers = len(probe.shapes)
    if not layers or sorted(probe.shapes) != list(range(layers)) or layers != hf.num_hidden_layers:
        raise UnsupportedModel(f"model_type {name!r}: attention was seen in {layers} of its layers only")
    if len(set(probe.shapes.values())) > 1:
        raise UnsupportedModel(f"model_type {name!r}: its layers differ in heads or head sizes")
    context = _context(hf)
    windows = tuple(_effective(probe.windows[i], context) for i in range(layers))
    if windows != _declared_windows(hf, layers, context):
        raise UnsupportedModel(f"model_type {name!r}: its sliding windows do not reach its attention")
    shape, inner = probe.shapes[0], getattr(hf, "intermediate_size", None) or 4 * hf.hidden_size
    return ModelConfig(
        family=name,
        vocab=logits.shape[-1],
        hidden=hf.hidden_size,
        specs=tuple(
            LayerSpec(shape.heads, shape.kv_heads, shape.head_dim, inner, None, window) for window in windows
        ),
        context=context,
        norm_eps=0.0,  # the module itself applies norms, rotations and biases
        tied=bool(getattr(hf, "tie_word_embeddings", False)),
        eos_ids=end_ids(
            checkpoint.raw_config, read_json(checkpoint.path / "generation_config.json", optional=True)
        ),
        bos_id=getattr(hf, "bos_token_id", None),
        raw=checkpoint.raw_config,
    )


def _context(hf: Any) -> int:
    """Maximum context; with scaling by the longest row of a pass, only the range that it leaves unchanged."""
    context = int(getattr(hf, "max_position_embeddings", None) or 2048)
    rope = getattr(hf, "rope_parameters", None) or {}
    for part in [rope, *(p for p in rope.values() if isinstance(p, dict))]:
        if part.get("rope_type") in ("dynamic", "longrope"):
            context = min(context, int(part.get("original_max_position_embeddings") or context))
    return context


def _declared_windows(hf: Any, layers: int, context: int) -> tuple[int, ...]:
    window = getattr(hf, "sliding_window", None) or 0
    if getattr(hf, "use_sliding_window", True) is False:
        window = 0
    kinds = getattr(hf, "layer_types", None) or [SLIDING] * layers
    return tuple(_effective(window if kind == SLIDING else 0, context) for kind in kinds)


def _effective(window: int, context: int) -> int:
    return window if window < context else 0


# -------------------------------------------------------------------------------------------------- checking


def _check(model: HfModel, trial: Trial, expected: Tensor) -> None:
    """Refuses a model whose logits differ from transformers'; runs rows one by one if they depend on each other."""
    together = trial.run(model.forward)
    model.one_row_a_pass = True
    alone = trial.run(model.forward)
    model.one_row_a_pass = not torch.equal(together, alone)
    if model.one_row_a_pass:
        warnings.warn(
            f"rows of model_type {model.config.family!r} depend on the rows beside them; it runs one row at "
            "a time, so that its output does not depend on the batch",
            stacklevel=3,
        )
    difference = float((alone - expected).abs().max() / expected.abs().max())
    if not difference <= TOLERANCE:
        raise UnsupportedModel(
            f"its logits differ from transformers' own by {difference:.1e} of the largest (at most "
            f"{TOLERANCE:.0e} is rounding)"
        )


@contextlib.contextmanager
def _named(model_type: str) -> Iterator[None]:
    """Re-raises errors inside a transformers model with the model's name."""
    try:
        yield
    except UnsupportedModel as reason:
        raise UnsupportedModel(f"model_type {model_type!r}: {reason}") from None
    except OutriderError:
        raise
    except Exception as error:
        raise UnsupportedModel(f"model_type {model_type!r} failed in transformers: {error}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences progress bars and reports; what matters in them becomes an error here."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
