"""The table of drafters: from parts of what the user wrote (names.py) to objects with four verbs.

The only place that knows them all.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

from outrider.cache.store import KeyValueStore
from outrider.cache.table import SlotTable
from outrider.draft.custom import make_custom
from outrider.draft.drafter import Drafter, DrafterContext
from outrider.draft.eagle import EagleDrafter, load_eagle
from outrider.draft.early_exit import EarlyExitDrafter
from outrider.draft.exits import find_exit
from outrider.draft.lm import LmDrafter
from outrider.draft.lookup import LookupDrafter
from outrider.draft.merged import MergedDrafter
from outrider.draft.names import Part
from outrider.errors import BadCheckpoint, InvalidRequest, UnsupportedModel
from outrider.load.checkpoint import Checkpoint, open_checkpoint
from outrider.load.tokenizer import Tokenizer
from outrider.model.decoder import Layered, Model, kv_bytes


@dataclass(slots=True)
class Bench:
    """What drafters are made from: the target, its cache, and how to find and load other models."""

    target: Model
    tokenizer: Tokenizer
    store: KeyValueStore
    table: SlotTable
    context: int
    cache_bytes: int
    find: Callable[[str], Path]
    load: Callable[[Checkpoint], Model]
    samples: Callable[[], list[list[int]]]  # token ids to search a good exit on

    def described(self) -> DrafterContext:
        """For drafters that are not Outrider's own."""
        c = self.target.config
        rows = len(self.table.lengths)
        return DrafterContext(self.tokenizer, c.vocab, self.context, tuple(c.eos_ids), rows)


def make_drafters(parts: Seq[Part], bench: Bench) -> tuple[dict[str, Drafter], str]:
    """Every drafter a request may name, and the name of the one it gets if it names none."""
    drafters: dict[str, Drafter] = {"lookup": LookupDrafter()}
    names: list[str] = []
    for part in parts:
        name, drafter = ("lookup", drafters["lookup"]) if part.kind == "lookup" else _make(part, bench)
        if name in names:
            raise InvalidRequest(
                f"draft {'+'.join(one.text for one in parts)!r} names the same drafter twice: {name}", "draft"
            )
        drafters[name] = drafter
        names.append(name)
    if len(names) > 1:
        drafters["+".join(names)] = MergedDrafter([drafters[name] for name in names])
    return drafters, "+".join(names) or "none"


def _make(part: Part, bench: Bench) -> tuple[str, Drafter]:
    if part.kind == "early_exit":
        return part.kind, _early_exit(part.text.partition(":")[2], bench)
    if part.kind == "own":
        return make_custom(part, bench.described())
    path = bench.find(part.text)
    if is_eagle(path):
        if not isinstance(bench.target, Layered):
            raise UnsupportedModel(
                f"an EAGLE head needs hidden states, which {_family(bench)} does not offer"
            )
        head = load_eagle(path, bench.target, bench.context)
        c = head.config.layer
        slots = _slots(bench, 2 * c.kv_heads * c.head_dim * bench.target.dtype.itemsize)
        return "eagle", EagleDrafter(head, bench.store, bench.table, slots, bench.context)
    return "lm", _lm(path, bench)


def _early_exit(layers: str, bench: Bench) -> Drafter:
    if not isinstance(bench.target, Layered):
        raise UnsupportedModel(f"early_exit needs single layers, which {_family(bench)} does not offer")
    total = bench.target.config.layers
    if layers and not (layers.isdigit() and 0 < int(layers) < total):
        raise InvalidRequest(
            f"early_exit takes 1 to {total - 1} layers of this model, not {layers!r}", "draft"
        )
    chosen = int(layers) if layers else find_exit(bench.target, bench.samples())
    return EarlyExitDrafter(bench.target, bench.store, bench.table, chosen)


def _lm(path: Path, bench: Bench) -> Drafter:
    checkpoint = open_checkpoint(path)
    same_tokens(bench.tokenizer, checkpoint.tokenizer, path)
    model = bench.load(checkpoint)
    if hasattr(model, "to_host"):
        model.to_host = True  # trees are grown on the host
    mine, theirs = model.config.parameters, bench.target.config.parameters
    if mine > theirs:
        warnings.warn(
            f"the draft {path.name} has {mine / 1e6:.0f} million parameters, its target {theirs / 1e6:.0f} million: "
            "guessing will cost more than it can save",
            stacklevel=2,
        )
    return LmDrafter(
        model,
        _slots(bench, kv_bytes(model)),
        len(bench.table.lengths),
        bench.context,
        bench.target.config.vocab,
    )


def same_tokens(target: Tokenizer, draft: Tokenizer, path: Path) -> None:
    """Ids and strings of both tokenizers agree as far as both go; one may be padded further than the other."""
    ours, theirs = target.strings(), draft.strings()
    for token, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            raise BadCheckpoint(
                f"{path} cannot draft for this target: token {token} is {b!r} there and {a!r} here. "
                "A draft needs the target's own tokenizer"
            )


def is_eagle(path: Path) -> bool:
    try:
        raw = json.loads((path / "config.json").read_text()) if path.is_dir() else {}
    except (OSError, ValueError):
        return False
    kinds = " ".join(map(str, raw.get("architectures") or [])).lower()
    return "eagle" in kinds or "draft_vocab_size" in raw or "speculators_model_type" in raw


def _slots(bench: Bench, kv_bytes: int) -> int:
    """A quarter of what the target's cache may take, and never less than one whole text."""
    rows = len(bench.table.lengths)
    most = min(bench.cache_bytes // 4 // kv_bytes, bench.context * rows)
    return max(most, bench.context + 64)


def _family(bench: Bench) -> str:
    return f"a {bench.target.config.family} model run through transformers"
