"""The table of drafters: from parts of what the user wrote (names.py) to objects with four verbs.

The only place that knows them all.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from outrider.cache.store import KeyValueStore
from outrider.cache.table import SlotTable
from outrider.device.ops import Pass
from outrider.draft.drafter import Drafter, DrafterContext
from outrider.draft.eagle import EagleDrafter
from outrider.draft.eagle_head import EagleHead, ReadHead, load_eagle
from outrider.draft.early_exit import SAMPLES, EarlyExitDrafter, find_exit
from outrider.draft.lm import LmDrafter
from outrider.draft.lookup import LookupDrafter
from outrider.draft.merged import MergedDrafter
from outrider.draft.names import Part, label, make_custom, read_rates
from outrider.draft.synthetic import SyntheticDrafter
from outrider.draft.weights import Weights, first_difference, weights_of
from outrider.errors import BadCheckpoint, InvalidRequest, OutriderError, UnsupportedModel
from outrider.load.checkpoint import Checkpoint, check_shapes, expected_shapes, open_checkpoint
from outrider.load.heads import is_eagle, read_head
from outrider.load.tokenizer import Tokenizer
from outrider.model.decoder import Decoder, Layered, Model


@dataclass(slots=True)
class DrafterSources:
    """What drafters are made from: the target, its KV cache, and functions that find and load other models."""

    target: Model
    tokenizer: Tokenizer
    store: KeyValueStore
    table: SlotTable
    context: int
    find: Callable[[str], Path]
    load: Callable[[Checkpoint], Model]
    read_head: ReadHead = read_head

    def drafter_context(self) -> DrafterContext:
        """What a user's own drafter is given."""
        c = self.target.config
        rows = len(self.table.lengths)
        return DrafterContext(self.tokenizer, c.vocab, self.context, tuple(c.eos_ids), rows)


def make_drafters(parts: Seq[Part], sources: DrafterSources) -> tuple[dict[str, Drafter], tuple[str, ...]]:
    """Every drafter that a request may name, and the names of those that draft, together, if it names none."""
    drafters: dict[str, Drafter] = {"lookup": _lookup(sources)}
    names: list[str] = []
    for part in parts:
        name, drafter = _make(part, sources, drafters["lookup"])
        if name in names:
            raise InvalidRequest(
                f"draft {label(one.text for one in parts)!r} names the same drafter twice: {name}", "draft"
            )
        drafters[name] = drafter
        names.append(name)
    if len(names) > 1:
        drafters[label(names)] = MergedDrafter({name: drafters[name] for name in names}, sources.table)
    return drafters, tuple(names)


def _make(part: Part, sources: DrafterSources, lookup: Drafter) -> tuple[str, Drafter]:
    if part.kind in ("auto", "lookup"):  # auto: the target has no paired draft
        return "lookup", lookup
    if not part.paired:
        return _make_other(part, sources)
    try:
        return _make_other(part, sources)
    except OutriderError as problem:
        warnings.warn(
            f"the draft paired with this model cannot be used, lookup drafts instead: {part.text}: {problem}",
            stacklevel=2,
        )
        return "lookup", lookup


def _make_other(part: Part, sources: DrafterSources) -> tuple[str, Drafter]:
    if part.kind == "early_exit":
        return part.kind, _early_exit(part.text.partition(":")[2], sources)
    if part.kind == "synthetic":
        rates = read_rates(part.text.partition(":")[2], "draft")
        return part.kind, SyntheticDrafter(rates, sources.target.config.vocab)
    if part.kind == "own":
        return make_custom(part, sources.drafter_context())
    path = sources.find(part.text)
    if is_eagle(path):
        if not isinstance(sources.target, Layered):
            raise UnsupportedModel(
                f"an EAGLE head needs hidden states, which {_family(sources)} does not offer"
            )
        network = _head_network(sources.target)
        head = load_eagle(path, sources.target, sources.context, network, sources.read_head)
        return "eagle", EagleDrafter(head, sources.store, sources.table, graphed=_graphed(sources.target))
    return "lm", _lm(path, sources)


def prepare_weights(drafter: Drafter, path: Path, sources: DrafterSources) -> Callable[[], Weights]:
    """Reads and checks the weights in `path`, which are to replace this drafter's. The function it returns packs them;
    call that on the engine's thread.
    """
    if isinstance(drafter, EagleDrafter):
        if not is_eagle(path):
            raise BadCheckpoint(f"{path} is no EAGLE head, and only one can take the place of an EAGLE head")
        served = drafter.network
        head, tensors = sources.read_head(path, served.target.config)
        check_finite(path, tensors.items())
        read = lambda name: tensors[name].float()  # noqa: E731
        pack = lambda: weights_of(type(served)(head, read, served.target, sources.context))  # noqa: E731
        return _same_shape(path, served.config, head, pack)
    if isinstance(drafter, LmDrafter):
        if is_eagle(path):
            raise BadCheckpoint(f"{path} is an EAGLE head, and the draft in use is a model of its own")
        checkpoint = open_checkpoint(path)
        same_tokens(sources.tokenizer, checkpoint.tokenizer, path)
        config = drafter.network.config
        if checkpoint.config is None:
            raise BadCheckpoint(f"{path} is of another family than the draft in use")
        check_shapes(checkpoint)
        names = (name for name, _ in expected_shapes(checkpoint.config))
        check_finite(path, ((name, checkpoint.tensor(name)) for name in names))
        return _same_shape(path, config, checkpoint.config, lambda: weights_of(sources.load(checkpoint)))
    raise UnsupportedModel(f"{type(drafter).__name__} has no weights that others could take the place of")


def check_finite(path: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Refuses weights with infinities or NaNs, as a training run that diverged leaves them."""
    for name, tensor in tensors:
        if not bool(tensor.isfinite().all()):
            raise BadCheckpoint(f"{path}: {name} holds numbers that are not finite")


def _same_shape(
    path: Path, served: object, other: object, weights: Callable[[], Weights]
) -> Callable[[], Weights]:
    if said := first_difference(other, served):
        raise BadCheckpoint(
            f"{path} has another shape than the draft in use, whose steps are measured and captured: {said}. "
            "Start the server with it instead"
        )
    return weights


def _lookup(sources: DrafterSources) -> Drafter:
    if sources.target.device.type != "cuda":
        return LookupDrafter()
    from outrider.model.kernels.gpu.copies import find_copies  # Triton comes with it

    return LookupDrafter(find=find_copies)


def _head_network(target: Model) -> type[EagleHead]:
    if isinstance(target, Decoder):
        return EagleHead
    from outrider.draft.eagle_head_gpu import GpuEagleHead  # Triton comes with it

    return GpuEagleHead


def _early_exit(layers: str, sources: DrafterSources) -> Drafter:
    if not isinstance(sources.target, Layered):
        raise UnsupportedModel(f"early_exit needs single layers, which {_family(sources)} does not offer")
    total = sources.target.config.layers
    if layers and not (layers.isdigit() and 0 < int(layers) < total):
        raise InvalidRequest(
            f"early_exit takes 1 to {total - 1} layers of this model, not {layers!r}", "draft"
        )
    if layers:
        chosen = int(layers)
    else:
        samples = [sources.tokenizer.encode(text)[: sources.context] for text in SAMPLES]
        chosen = find_exit(sources.target, samples)
    return EarlyExitDrafter(sources.target, sources.store, sources.table, chosen)


def _lm(path: Path, sources: DrafterSources) -> Drafter:
    checkpoint = open_checkpoint(path)
    same_tokens(sources.tokenizer, checkpoint.tokenizer, path)
    model = sources.load(checkpoint)
    mine, theirs = model.config.parameters, sources.target.config.parameters
    if mine > theirs:
        warnings.warn(
            f"the draft {path.name} has {mine / 1e6:.0f} million parameters, its target {theirs / 1e6:.0f} million: "
            "drafting will cost more than it can save",
            stacklevel=2,
        )
    vocab = sources.target.config.vocab
    return LmDrafter(model, sources.table, vocab, sources.context, _graphed(model))


def _graphed(model: Model) -> Callable[[Pass], Pass] | None:
    """What replays a pass from CUDA graphs; None on a CPU."""
    if model.device.type != "cuda":
        return None
    from outrider.model.device import GraphedPass  # Triton comes with it

    return partial(GraphedPass, group=model.group)


def same_tokens(target: Tokenizer, draft: Tokenizer, path: Path) -> None:
    """Raises unless ids and strings of both tokenizers agree up to the shorter one's end; one may be padded further."""
    ours, theirs = target.strings(), draft.strings()
    for token, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            raise BadCheckpoint(
                f"{path} cannot draft for this target: token {token} is {b!r} there and {a!r} here. "
                "A draft needs the target's own tokenizer"
            )


def _family(sources: DrafterSources) -> str:
    return f"a {sources.target.config.family} model run through transformers"
