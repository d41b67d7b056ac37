"""Builds a complete engine: settings, a checkpoint and drafts in; model, KV cache, drafters, runner and planner out."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path

import torch
from torch import Tensor

from outrider.cache.formats import FORMATS
from outrider.control.experts import ExpertCosts
from outrider.control.guards import Guards
from outrider.control.planner import Planner
from outrider.draft.drafters import Drafters
from outrider.draft.names import Part, label, settle_auto
from outrider.draft.reading import NetworkDrafter
from outrider.draft.table import DrafterSources, make_drafters
from outrider.engine.eager_runner import EagerRunner, measure_pass
from outrider.engine.engine import Engine
from outrider.engine.graph_runner import make_graph_runner
from outrider.engine.kept_costs import KeptCosts
from outrider.engine.kv_cache import KvCache, make_kv_cache
from outrider.engine.live_draft import LiveDraft
from outrider.engine.memory import (
    DraftRoom,
    GpuMeter,
    check_room,
    draft_cache_tokens,
    draft_room,
    gpu_memory,
    runs_on_gpu,
    working_memory,
)
from outrider.engine.placement import DRAFT_TOKENS, PREFILL_WAIT, Memory, place, share_of_all
from outrider.engine.ranks import OtherRanks, check_ranks
from outrider.engine.runner import Runner
from outrider.engine.text import TokenText
from outrider.errors import InvalidRequest, OutOfMemory, OutriderError, UnsupportedModel, invalid, naming
from outrider.load.checkpoint import Checkpoint, check_shapes, open_checkpoint
from outrider.load.config import ModelConfig
from outrider.load.find import find
from outrider.load.heads import HeadConfig, read_head
from outrider.load.pairs import Pair, find_pair
from outrider.load.quants import Blocks
from outrider.load.tokenizer import Tokenizer
from outrider.model.decoder import Decoder, Layered, Model, kv_bytes, make_kernels
from outrider.model.parallel import ALONE, Group
from outrider.model.weights import BYTES, kept_as, kept_formats, kind_of
from outrider.settings import WEIGHT_BYTES, Settings, cache_folder, free_memory, shown_size
from outrider.types import MAX_NODES

# Parameters. Decoding with a smaller model is bound by kernel launches on a GPU, so its prefill steps are larger.
LAUNCH_BOUND = 10**9


def _as_stored(checkpoint: Checkpoint) -> Checkpoint:
    return checkpoint


@dataclass(frozen=True, slots=True)
class Reshape:
    """Changes checkpoints and heads before they are loaded. The default loads them as they are stored."""

    target: Callable[[Checkpoint], Checkpoint] = _as_stored
    draft: Callable[[Checkpoint], Checkpoint] = _as_stored
    head: Callable[[Path, ModelConfig, int], tuple[HeadConfig, dict[str, Tensor]]] = read_head


@dataclass(frozen=True, slots=True)
class Built:
    """A complete engine, and what it was built from."""

    engine: Engine
    model: Model
    settings: Settings  # complete: everything that was left to the device is decided
    draft: tuple[str, ...]  # the drafters of a request that names none; several draft together
    live_draft: LiveDraft
    memory: Memory | None  # None on a CPU
    pair: Pair | None  # the paired draft in use
    ranks: OtherRanks | None  # the processes that share the model with this one

    @property
    def drafter(self) -> str:
        return label(self.draft)


def build_engine(
    checkpoint: Checkpoint,
    parts: Seq[Part],
    pair: Pair | None,
    asked: Settings,
    reshape: Reshape,
    watch: Watch | None = None,
) -> Built:
    """Loads the model and the drafts. Call it on the thread that will run the engine."""
    if asked.tensor_parallel == 1:
        return _build(checkpoint, parts, pair, asked, reshape, watch, None)
    if reshape.target is not _as_stored:
        raise invalid(
            "tensor_parallel", "cannot share a model in another shape (--as-if); leave out one of them"
        )
    check_ranks(checkpoint, asked)
    ranks = OtherRanks(checkpoint.path, asked)
    try:
        return _build(checkpoint, parts, pair, asked, reshape, watch, ranks)
    except BaseException:
        ranks.close()
        raise


def _build(
    checkpoint: Checkpoint,
    parts: Seq[Part],
    pair: Pair | None,
    asked: Settings,
    reshape: Reshape,
    watch: Watch | None,
    ranks: OtherRanks | None,
) -> Built:
    torch.set_num_threads(asked.threads)
    if runs_on_gpu(asked):
        asked = share_of_all(asked, *gpu_memory())
    parts, room = _fitting(checkpoint, parts, pair, asked, reshape)
    model = load_model(checkpoint, asked, watch=watch, group=ALONE if ranks is None else ranks.group)
    if ranks is not None:
        ranks.meet(model.device)
    settings = _placed(model, asked, room)
    cache = make_kv_cache(model, settings)
    on_gpu = model.device.type == "cuda"
    held = GpuMeter.held() if on_gpu else 0
    sources = DrafterSources(
        target=model,
        tokenizer=checkpoint.tokenizer,
        store=cache.store,
        table=cache.table,
        context=cache.context,
        find=lambda name: find(name, cache_folder()),
        load=lambda draft: load_model(reshape.draft(draft), settings, settings.draft_weights),
        read_head=lambda folder, target: reshape.head(folder, target, DRAFT_TOKENS[settings.device]),
    )
    by_name, names = make_drafters(parts, sources)
    drafter = label(names)
    pair = pair if {"eagle", "lm"} & by_name.keys() else None
    if asked.draft_weights != "auto" and "lm" not in by_name:
        raise InvalidRequest(
            f"draft_weights is for a model that drafts, and there is none (draft: {drafter})", "draft_weights"
        )
    if isinstance(model, Decoder) and model.kernels.name == "c":
        # The C kernels have their own threads. Torch's would spin beside them after every large operation.
        torch.set_num_threads(1)
    drafters = Drafters(by_name, model.config.vocab)
    live_draft = LiveDraft(parts, drafters, sources)
    runner: Runner = (
        make_graph_runner(model, cache, drafters, drafter) if on_gpu else EagerRunner(model, cache, drafters)
    )
    # Lookup costs next to nothing, so the planner may choose it where a request names no drafter.
    choices = dict.fromkeys((drafter, "lookup") if names else ())
    planner = Planner(drafter, choices=tuple(choices), guards=guards_of(settings))
    inform(planner, model, pair)
    memory = _measured(model, cache, held) if on_gpu else None
    watch_draft(planner, drafters, cache, model, memory)
    costs = None
    if isinstance(model, Decoder) and names:  # steps on a GPU are measured when they are captured
        costs = KeptCosts.of(model, settings, parts, planner.costs.eager)
        costs.recall(partial(measure_pass, model, cache, planner.costs.eager.experts))
    text = partial(_token_text, checkpoint.tokenizer)
    engine = Engine(model, cache, drafters, planner, runner, settings, text, costs)
    return Built(engine, model, settings, names, live_draft, memory, pair, ranks)


def _token_text(tokenizer: Tokenizer, marked: bool) -> TokenText:
    return tokenizer.marked_stream() if marked else tokenizer.text_stream()


def settle_pair(parts: Seq[Part], checkpoint: Checkpoint) -> tuple[tuple[Part, ...], Pair | None]:
    """The drafts with `auto` decided, and the pair that was found for it."""
    is_auto = any(part.kind == "auto" for part in parts)
    pair = find_pair(checkpoint, cache_folder()) if is_auto else None
    return settle_auto(parts, None if pair is None else pair.folder), pair


def load_model(
    checkpoint: Checkpoint,
    settings: Settings,
    weights: str | None = None,
    watch: Watch | None = None,
    group: Group = ALONE,
) -> Model:
    """The decoder for the families it knows, transformers for any other causal model. A rank loads its part.

    `weights` is the format of a draft; the settings have the model's, and that of its KV cache. A CPU calls `watch` as
    it reads.
    """
    config, kind = checkpoint.config, weights or settings.weights
    if config is None:
        if settings.device == "cuda":
            raise UnsupportedModel("a model run through transformers runs on the CPU; use --device cpu")
        from outrider.model.hf import load_hf  # transformers is an extra and slow to import

        if kind == "bfloat16" and weights is None:
            raise UnsupportedModel("a model run through transformers is held as float32; leave --weights out")
        ours = load_hf(checkpoint, settings.threads, cache_folder() / "kernels", settings.kernels)
        _choose_cache(ours, settings, weights)
        return ours
    check_shapes(checkpoint)
    positions = (settings.context or config.context) + MAX_NODES + 1
    if runs_on_gpu(settings):
        from outrider.model.device import load_on_device  # Triton comes with it

        kind = "bfloat16" if kind == "auto" else kind
        model = load_on_device(config, checkpoint.for_gpu, positions, kind, group)
        _choose_cache(model, settings, weights)
        if weights is None:
            model.use_library()
        return model
    folder = cache_folder() / "kernels"
    with naming(checkpoint.path):
        threads = max(1, settings.threads // group.size)
        kernels = make_kernels(config, positions, threads, folder, settings.kernels, group)
        reading = Reading(checkpoint, "stored" if kind == "auto" else kind, weights is not None, watch, group)
        decoder = Decoder(config, reading, kernels)
        _choose_cache(decoder, settings, weights)
    checkpoint.release()
    return decoder


def _choose_cache(model: Model, settings: Settings, draft_weights: str | None) -> None:
    """Sets the number format of the model's KV cache; a draft's stays that of its hidden states."""
    if draft_weights is None and settings.kv_cache_dtype != "auto":
        model.kept = FORMATS[settings.kv_cache_dtype]


def _fitting(
    checkpoint: Checkpoint, parts: Seq[Part], pair: Pair | None, settings: Settings, reshape: Reshape
) -> tuple[Seq[Part], DraftRoom]:
    """The drafts to load and the memory they need. A paired draft that does not fit is left out with a warning,
    because the user did not name it.
    """
    room = room_of(parts, settings, reshape)
    try:
        _check_room(checkpoint, settings, room)
    except OutOfMemory as full:
        if pair is None:
            raise
        parts = tuple(Part("lookup", "auto") if part.paired else part for part in parts)
        room = room_of(parts, settings, reshape)
        _check_room(checkpoint, settings, room)
        warnings.warn(f"the draft {pair.folder} is left out, lookup drafts instead: {full}", stacklevel=2)
    return parts, room


def room_of(parts: Seq[Part], settings: Settings, reshape: Reshape) -> DraftRoom:
    """Of the models that draft. One that cannot be opened counts nothing here: loading it raises the error."""
    found = []
    for part in parts:
        if part.kind == "model":
            with contextlib.suppress(OutriderError):
                found.append(reshape.draft(open_checkpoint(find(part.text, cache_folder()))))
    return draft_room(found, "stored" if settings.draft_weights == "auto" else settings.draft_weights)


def _check_room(checkpoint: Checkpoint, settings: Settings, draft: DraftRoom) -> None:
    """Raises if the settings or the memory do not allow this model, before anything is loaded."""
    if runs_on_gpu(settings):
        free, total = gpu_memory()
        place(settings, free, total=total)
        return
    placed, left, config = place(settings, None), free_memory(), checkpoint.config
    if left is None or config is None:
        return
    weights = sum(kept_formats(checkpoint, placed.weights).values())
    if doubt := check_room(config, settings, left, weights, draft):
        warnings.warn(doubt, stacklevel=2)


def _placed(model: Model, settings: Settings, draft: DraftRoom) -> Settings:
    """Complete settings. On a GPU the cache gets the free memory, less what the draft and steps will need."""
    if model.device.type != "cuda":
        return place(settings, None)
    free, total = gpu_memory()
    placed, own = place(settings, free, total=total), model.config
    if not settings.step_rows and own.parameters <= LAUNCH_BOUND:
        placed = replace(placed, step_rows=4 * placed.step_rows)
    weights = int(draft.weights * WEIGHT_BYTES[placed.draft_weights])
    beside = draft.cached * model.dtype.itemsize / kv_bytes(model)
    working = 0 if settings.cache_bytes else working_memory(model, placed, GpuMeter())
    free, _ = gpu_memory()  # less than before: the kernels that the measurement loaded stay
    own_cache = place(settings, free, weights, beside, total, working).cache_bytes
    shared_by = 1 if settings.cache_bytes else model.group.size  # what is given counts all ranks
    return replace(placed, cache_bytes=own_cache * shared_by)


def _measured(model: Model, cache: KvCache, held: int) -> Memory:
    """The GPU's memory with everything loaded; `held` are the bytes of this process's tensors before the drafts."""
    slots, (left, _) = cache.table.pool.total, gpu_memory()
    return Memory(model.weight_bytes(), GpuMeter.held() - held, slots * kv_bytes(model), slots, left)


def guards_of(settings: Settings) -> Guards:
    """The planner's bounds from the user's settings, the same on every device."""
    return Guards(
        max_batch=settings.draft_max_batch,
        max_depth=settings.draft_max_depth,
        max_temperature=settings.draft_max_temperature,
        objective=settings.objective,
        prefill_slowdown=settings.prefill_slowdown or inf,
        prefill_wait=PREFILL_WAIT.get(settings.device, PREFILL_WAIT["cpu"]),
    )


def watch_draft(
    planner: Planner, drafters: Drafters, cache: KvCache, model: Model, memory: Memory | None
) -> None:
    """Has the planner watch drafts with weights of their own, and report one that never pays together with the tokens
    of KV cache that its memory would hold. The memory is measured on a GPU, on a CPU it follows from the shapes.
    """
    for name in planner.choices:
        if isinstance(drafters[name], NetworkDrafter):
            planner.returns.watch(name, draft_cache_tokens(drafters, cache, model, memory))


def expert_costs(config: ModelConfig) -> ExpertCosts | None:
    """Of a mixture of experts. Layers that have more or fewer of them count by their mean."""
    mixtures = [spec.experts for spec in config.specs if spec.experts is not None]
    if not mixtures:
        return None
    total = round(sum(experts.count for experts in mixtures) / len(mixtures))
    chosen = round(sum(experts.per_token for experts in mixtures) / len(mixtures))
    # Numbers of an expert in all layers, by hidden size.
    each = sum(3 * experts.width for experts in mixtures)
    active = config.vocab + sum(spec.active for spec in config.specs)
    return ExpertCosts(total, chosen, active / each - chosen)


def inform(planner: Planner, model: Model, pair: Pair | None) -> None:
    """What is known before the first step: the experts of a model whose passes count them, and the score of a paired
    draft, by temperature, from which the estimate of its acceptance starts.
    """
    if isinstance(model, Layered) and (experts := expert_costs(model.config)) is not None:
        planner.costs.know_experts(experts)
    score = None if pair is None else pair.card.score
    if score is None:
        return
    for temperature in {one.temperature for one in score.tasks}:
        chain = score.chain(temperature)
        reached, accepted = sum(chain.reached[1:]), sum(chain.accepted[1:])
        if reached:
            planner.rates.expect(
                planner.default, temperature, chain.accepted[0] / chain.reached[0], accepted / reached
            )


log = logging.getLogger(__name__)

RELEASED = 1 << 26  # bytes after which what was read of the file is given back

Update = Callable[[int], None]  # takes the bytes so far
# Is called before weights are read, with what they will take in words and in bytes.
Watch = Callable[[str, int], Update]


class Reading:
    """Reads weights by name. `kind` is one of settings.WEIGHTS."""

    def __init__(
        self, checkpoint: Checkpoint, kind: str, draft: bool, watch: Watch | None, group: Group = ALONE
    ) -> None:
        """A rank of several reads its own outputs."""
        self.checkpoint, self.kind, self.draft, self.group = checkpoint, kind, draft, group
        self.done = self.released = 0
        formats = kept_formats(checkpoint, kind, draft)
        size = sum(formats.values()) // group.size
        text = f"weights take {shown_size(size)} in memory ({format_list(formats)})"
        log.info("%s: %s", checkpoint.path.name, text)
        if kind == "stored":
            warn_of_unpacked(checkpoint)
        self.update: Update = (lambda done: None) if watch is None else watch(text, size)

    def __call__(self, name: str) -> Tensor | Blocks:
        stored = self.checkpoint.stored(name)
        if self.checkpoint.config is not None:
            stored = self.group.part(name, stored, self.checkpoint.config)
        weight = kept_as(stored, kind_of(name, self.kind), self.draft)
        self.done += weight.raw.nbytes if isinstance(weight, Blocks) else weight.nbytes
        self.update(self.done)
        if self.done - self.released > RELEASED:
            self.checkpoint.release()
            self.released = self.done
        return weight


def format_list(formats: Counter[str]) -> str:
    """The formats of matrices, the largest first."""
    return ", ".join(name for name, size in formats.most_common() if size > 0.01 * sum(formats.values()))


def warn_of_unpacked(checkpoint: Checkpoint) -> None:
    stored = {checkpoint.stored_format(name) for name in checkpoint.names()}
    if without := sorted(stored - BYTES.keys()):
        warnings.warn(
            f"matrices of {checkpoint.path.name} in {', '.join(without)} are unpacked to float32: there are no kernels "
            "for them; --weights int8 or int4 takes less memory",
            stacklevel=2,
        )
