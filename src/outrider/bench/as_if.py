"""A small model in the shape of a big one: the big one's cost, the small one's text. widen.py makes its tensors.

It says what a big model costs to run. It says nothing of what a big model would write.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.bench.widen import Wide, named_layers, shape_of, widen
from outrider.bench.widen_head import WidenedHead
from outrider.engine.build import Reshape
from outrider.engine.llm import LLM
from outrider.engine.memory import runs_on_gpu
from outrider.errors import InvalidRequest, UnsupportedModel
from outrider.load.checkpoint import Checkpoint, expected_shapes
from outrider.load.config import ModelConfig
from outrider.load.heads import HeadConfig, head_shapes, is_eagle, read_head
from outrider.load.sampling import SamplingDefaults
from outrider.load.tokenizer import Tokenizer
from outrider.settings import Settings

MEANING = (
    "The model is {small}, its tensors widened to the shape {shape} without changing what it computes: times are "
    "what a model of that shape costs; text, acceptance and identity are the small model's. It says nothing of what "
    "a big model would write."
)


class WideCheckpoint(Checkpoint):
    """A checkpoint in another shape. Its tensors are made when they are asked for, where and as they will be used."""

    config: ModelConfig

    def __init__(
        self,
        small: Checkpoint,
        wide: Wide,
        device: str | torch.device = "cpu",
        kept: tuple[int, ...] | None = None,
    ) -> None:
        """The `kept` layers of the small model are used, all of them by default."""
        if small.config is None:
            raise UnsupportedModel(f"{small.path.name} is of a family that cannot be widened")
        self.small, self.path = small, small.path
        self.kept = tuple(range(small.config.layers)) if kept is None else kept
        self.dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
        self.config, self._read = widen(small.config, small.tensor, wide, device, self.dtype, self.kept)
        self.raw_config = config_json(self.config)
        self._shapes = dict(expected_shapes(self.config))

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def tensor(self, name: str, device: torch.device | str | None = None) -> Tensor:
        """Where it was made, unless said otherwise."""
        return self._read(name) if device is None else self._read(name).to(device)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.small.tokenizer

    @property
    def chat_template(self) -> str | None:
        return self.small.chat_template

    @property
    def sampling(self) -> SamplingDefaults:
        return self.small.sampling

    @property
    def total_bytes(self) -> int:
        return sum(math.prod(shape) for shape in self._shapes.values()) * self.dtype.itemsize


class WideHead(WideCheckpoint):
    """What the memory of a head in another shape is reckoned from; `AsIf` makes its tensors."""

    def __init__(self, small: Checkpoint, head: HeadConfig, dtype: torch.dtype) -> None:
        self.small, self.path, self.dtype, self.config = small, small.path, dtype, head.layer
        self._shapes = dict(head_shapes(head))


def config_json(config: ModelConfig) -> dict[str, Any]:
    """A model of the usual shape, or in experts, as Hugging Face's config.json has it."""
    if config.rope.kind != "default":
        raise UnsupportedModel(f"rotary scaling {config.rope.kind!r} cannot be written down here")
    mixture = config.specs[0].experts  # of a Mixtral
    sizes = {"intermediate_size": config.intermediate if mixture is None else mixture.width}
    if mixture is not None:
        sizes |= {"num_local_experts": mixture.count, "num_experts_per_tok": mixture.per_token}
    return {
        "model_type": config.family, "vocab_size": config.vocab, "hidden_size": config.hidden,
        "num_hidden_layers": config.layers, "num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim, **sizes,
        "max_position_embeddings": config.context, "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta, "tie_word_embeddings": config.tied,
        "eos_token_id": list(config.eos_ids), "bos_token_id": config.bos_id,
    }  # fmt: skip


class AsIf(LLM):
    """An LLM whose model, and draft model if there is one, have another shape; everything else is as ever."""

    def __init__(
        self,
        model: Any,
        shape: str,
        settings: Settings,
        draft: str = "auto",
        draft_shape: str | None = None,
        draft_layers: str | None = None,
    ) -> None:
        """With a `draft_shape` the draft is the model itself, some of its layers (`named_layers`), in that shape."""
        if draft_shape is None and draft_layers is not None:
            raise InvalidRequest("--draft-layers says how --draft-as-if is made; give both", "draft_layers")
        if draft_shape is not None and draft != "auto":
            raise InvalidRequest("--draft-as-if makes the draft; leave out --draft", "draft")
        self.shape, self.draft_shape, self.draft_layers = shape, draft_shape, draft_layers
        self._wide = shape_of(shape)
        self._draft_wide = None if draft_shape is None else shape_of(draft_shape)
        # Tensors are made where the model runs: drawing them on a GPU takes a second, copying them there minutes.
        self.place = "cuda" if runs_on_gpu(settings) else "cpu"
        reshape = Reshape(self.widened_target, self.reshaped_draft, self._read_head)
        draft = draft if draft_shape is None else str(model)
        super().__init__(model, draft=draft, settings=settings, reshape=reshape)

    def widened_target(self, small: Checkpoint) -> WideCheckpoint:
        self.wide = WideCheckpoint(small, self._wide, self.place)
        return self.wide

    def widened_draft(self, small: Checkpoint) -> WideCheckpoint:
        """If layers were not chosen, with as many as the shape has room for."""
        assert self._draft_wide is not None and small.config is not None
        count = small.config.layers
        all_that_fit = str(min(count, self._draft_wide.layers))
        kept = named_layers(count, all_that_fit if self.draft_layers is None else self.draft_layers)
        return WideCheckpoint(small, self._draft_wide, self.place, kept)

    def described(self) -> dict[str, Any]:
        """What this is, for reports."""
        wide = self.wide
        made = {"shape": self.shape, "parameters": wide.config.parameters, "small": wide.path.name}
        if self.draft_shape is not None:
            draft = self.widened_draft(wide.small)
            layers = f"{len(draft.kept)} of {len(wide.kept)}"
            if left_out := sorted(set(wide.kept) - set(draft.kept)):
                layers += f" (without {', '.join(map(str, left_out))})"
            kind = self.settings.draft_weights
            made["draft"] = {
                "shape": self.draft_shape, "layers": layers, "parameters": draft.config.parameters,
                **({} if kind in ("bfloat16", "stored") else {"weights": kind}),
            }  # fmt: skip
        return {**made, "meaning": MEANING.format(small=wide.path.name, shape=self.shape)}

    def _read_head(
        self, folder: Path, target: ModelConfig, words: int
    ) -> tuple[HeadConfig, dict[str, Tensor]]:
        made = self.widened_head(folder, words)
        return made.head, {name: made.read(name) for name, _ in head_shapes(made.head)}

    def widened_head(self, folder: Path, words: int = 0) -> WidenedHead:
        """A head for the small model, as wide as the target is."""
        wide = self.wide
        assert wide.small.config is not None
        config, tensors = read_head(folder, wide.small.config, words)
        read = lambda name: tensors[name].float()  # noqa: E731 - a name for a reader
        return WidenedHead(config, read, self._wide, torch.device(self.place), wide.dtype)

    def reshaped_draft(self, checkpoint: Checkpoint) -> Checkpoint:
        """A head as wide as the target; another draft in its own shape, if it was given one."""
        if is_eagle(checkpoint.path):
            return WideHead(checkpoint, self.widened_head(checkpoint.path).head, self.wide.dtype)
        return checkpoint if self._draft_wide is None else self.widened_draft(checkpoint)
