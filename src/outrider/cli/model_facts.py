"""What `outrider models show` tells of a model: read from its files, without loading its weights."""

from __future__ import annotations

import math
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.draft.table import same_tokens
from outrider.errors import OutriderError
from outrider.load.checkpoint import Checkpoint, open_checkpoint
from outrider.load.find import list_models, published_sampling
from outrider.load.heads import is_eagle
from outrider.load.pairs import find_pair
from outrider.load.progress import file_size
from outrider.load.template import ChatTemplate


@dataclass(frozen=True, slots=True)
class ModelFacts:
    path: str
    bytes: int
    family: str
    parameters: int
    context: int | None  # None: only transformers knows
    vocab: int
    template: str  # of chats, in words
    end_tokens: tuple[str, ...]
    sampling: dict[str, float]
    sampling_source: str
    drafts: tuple[str, ...]  # what --draft may be given with this model
    pair: str | None  # that --draft auto takes

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        sampling = ", ".join(f"{name} {value:g}" for name, value in self.sampling.items())
        return [
            ("path", self.path),
            ("size", file_size(self.bytes)),
            ("family", self.family),
            ("parameters", f"{self.parameters / 1e6:.0f} million"),
            ("context", "as transformers has it" if self.context is None else f"{self.context} tokens"),
            ("tokenizer", f"{self.vocab} tokens, ends with {' or '.join(self.end_tokens) or 'none'}"),
            ("chat template", self.template),
            ("sampling", f"{sampling} (from {self.sampling_source})" if sampling else self.sampling_source),
            ("drafts that fit", ", ".join(self.drafts)),
            ("draft by auto", "lookup" if self.pair is None else f"the pair {self.pair}"),
        ]


def facts_of(path: Path, cache: Path) -> ModelFacts:
    checkpoint = open_checkpoint(path)
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    pair = find_pair(checkpoint, cache)
    said = checkpoint.sampling
    sampling = said if said.values else published_sampling(path, cache)
    return ModelFacts(
        path=str(checkpoint.path),
        bytes=checkpoint.total_bytes,
        family=f"{checkpoint.raw_config.get('model_type')} (through transformers)"
        if config is None
        else config.family,
        parameters=_parameters(checkpoint),
        context=None if config is None else config.context,
        vocab=tokenizer.vocab_size,
        template=_template(checkpoint),
        end_tokens=tuple(_printable(tokenizer.strings()[i]) for i in tokenizer.eos_ids),
        sampling=dict(sampling.values),
        sampling_source=sampling.source,
        drafts=tuple(_drafts(checkpoint, cache)),
        pair=None if pair is None else pair.name,
    )


def _parameters(checkpoint: Checkpoint) -> int:
    return sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names())


def _printable(text: str) -> str:
    """A file's words must not steer the terminal."""
    return text if text.isprintable() else repr(text)


def _template(checkpoint: Checkpoint) -> str:
    source = checkpoint.chat_template
    if source is None:
        return "none: use outrider generate"
    try:
        ChatTemplate.for_tokenizer(source, checkpoint.tokenizer)
    except OutriderError as problem:
        return f"cannot be used: {problem}"
    return f"its own, {len(source)} characters{', with tools' if 'tools' in source else ''}"


def _drafts(target: Checkpoint, cache: Path) -> list[str]:
    """What needs no second model, then smaller models of this machine that have the target's tokens."""
    fitting = ["lookup", *(["early_exit"] if target.config is not None else [])]
    for entry in list_models(cache):
        if entry.path is None or entry.path == target.path or is_eagle(entry.path):
            continue  # whether a head was trained for this model is known once it is loaded
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                other = open_checkpoint(entry.path)
                same_tokens(target.tokenizer, other.tokenizer, entry.path)
            except OutriderError:
                continue
        if _parameters(other) < _parameters(target):
            fitting.append(entry.name)
    return fitting
