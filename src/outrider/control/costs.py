"""The cost model: seconds of steps, measured ahead of requests and refined by every step record.

`EagerCosts` knows host-packed steps by their rows, `CapturedCosts` knows captured steps by lead drafter, draft tree and
size. Both say what a plain step takes (`plain`), what a drafter's prefill takes (`prefill`) and when a plain step is
due to be measured (`baselines`). Of a mixture of experts they hold the times of steps whose rows choose their experts
independently; experts.py says how much fewer experts a step reads, and what that saves.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from math import inf
from typing import Any, NamedTuple

from outrider.control.experts import ExpertCosts
from outrider.control.guards import BASELINE_INTERVAL, KEEP, KNOWN_AFTER, SEQUENCE_MEMORY, UNMEASURED_ROW
from outrider.types import NO_TREE, CapturedShape, StepRecord, TreeShape


class Baselines:
    """Estimates what a plain step would take now, while steps draft. Both kinds take longer as contexts grow, so the
    time of a drafting step is multiplied by the ratio of the two at the last measured plain step. `group`: the batch
    of a step.
    """

    def __init__(self) -> None:
        self.since: dict[int, int] = {}  # drafting steps since the last plain one, by group
        self.shapes: defaultdict[int, set[Hashable]] = defaultdict(set)  # of those
        self.shares: defaultdict[tuple[int, Hashable], deque[float]] = defaultdict(partial(deque, maxlen=3))

    def due(self, group: int) -> bool:
        return self.since.get(group, 0) >= BASELINE_INTERVAL

    def drafted(self, group: int, shape: Hashable, known: bool) -> None:
        """Counts a drafting step. If no plain step of this group is `known`, one is due soon."""
        self.since[group] = self.since.get(group, 0 if known else BASELINE_INTERVAL - KNOWN_AFTER) + 1
        self.shapes[group].add(shape)

    def plain(self, group: int, seconds: float, taken: Callable[[Any], float], reliable: bool) -> None:
        """Takes a plain step as baseline. The first one after prompt rows is not `reliable`: a GPU waited for the host
        in it, and a CPU's cache had lost the weights.
        """
        self.since[group] = 0
        if reliable:
            for shape in self.shapes[group]:
                self.shares[group, shape].append(seconds / taken(shape))
            self.shapes[group].clear()

    def share(self, group: int, shape: Hashable) -> float | None:
        """A plain step's time relative to one of this shape."""
        shares = self.shares.get((group, shape))
        return statistics.median(shares) if shares else None


class EagerCosts:
    def __init__(self) -> None:
        self.curve: dict[int, float] = {}  # passes by rows, measured ahead
        self.by_rows: dict[int, float] = {}  # steps that were taken
        self.times: Counter[int] = Counter()  # how often, by rows
        self.by_batch: dict[int, float] = {}  # plain steps, by sequences
        self.per_draft: dict[str, float] = {}  # of drafting, by drafter: whatever the depth,
        self.per_level: dict[str, float] = {}  # and for each level
        self.per_token: dict[str, float] = {}  # of a drafter's prefill
        self.per_prompt_row: dict[int, float] = {}  # by prompt rows, rounded up to a power of two
        self.per_lone_row: dict[int, float] = {}  # the same of steps with prompt rows alone
        self.prompts = 0.0  # what they add to an average step of decoding sequences, in plain steps
        self.baselines = Baselines()
        self.experts: ExpertCosts | None = None  # of a mixture of experts
        self._drafts: dict[str, dict[int, float]] = {}  # drafting, by drafter and depth,
        self._drafted: dict[str, Counter[int]] = {}  # and how often, as far as that counts
        # Of the curve: rows and seconds, and what was read off it. None: something was learned since.
        self._points: tuple[list[int], list[float], dict[int, float]] | None = None

    def plain(self, batch: int) -> float:
        known = self.by_batch.get(batch)
        return self.step(batch) if known is None else known

    def step(self, rows: int, sequences: int | None = None) -> float:
        """Seconds of a step with this many rows, spread evenly over `sequences`; None: one row each."""
        seconds, experts = self._step(rows), self.experts
        if experts is None:
            return seconds
        return seconds * experts.ratio(rows, experts.expected(rows, rows if sequences is None else sequences))

    def step_of(self, each: Seq[int]) -> float:
        """Seconds of a step in which each sequence has this many rows."""
        return self._step(sum(each)) * self.shared(each)

    def shared(self, each: Seq[int]) -> float:
        """Time of a pass in which each sequence has this many rows, relative to a pass of independent rows."""
        if (experts := self.experts) is None:
            return 1.0
        return experts.ratio(sum(each), experts.distinct(experts.independent(each)))

    def _step(self, rows: int) -> float:
        known = self.by_rows.get(rows)
        if known is not None and (not self.curve or self.times[rows] >= KNOWN_AFTER):
            return known
        return self.curve_at(rows)

    def curve_at(self, rows: int) -> float:
        """Seconds of a step by rows: interpolated between the known ones, and continued beyond them."""
        xs, ys, read = self._points or self._known_points()
        if (known := read.get(rows)) is None:
            known = read[rows] = self._interpolated(xs, ys, rows)
        return known

    def _interpolated(self, xs: list[int], ys: list[float], rows: int) -> float:
        if not xs:
            return 1.0 + UNMEASURED_ROW * rows
        at = bisect_left(xs, rows)
        if at < len(xs) and xs[at] == rows:
            return ys[at]
        if at == 0 or at == len(xs):
            end = 0 if at == 0 else -1
            seconds = ys[end] * (1 + UNMEASURED_ROW * rows) / (1 + UNMEASURED_ROW * xs[end])
            if at == 0 or at == 1:
                return seconds
            return max(seconds, ys[-1] + (ys[-1] - ys[0]) / (xs[-1] - xs[0]) * (rows - xs[-1]))
        return _between(xs, ys, at, rows)

    def _known_points(self) -> tuple[list[int], list[float], dict[int, float]]:
        """Steps that were taken often, and the curve measured ahead, scaled by the nearest of those steps."""
        known = dict(self.by_rows)
        if self.curve:
            known = {rows: s for rows, s in known.items() if self.times[rows] >= KNOWN_AFTER}
            scaled = dict(sorted(self.curve.items()))
            if known:
                xs, ys = list(scaled), list(scaled.values())
                paces = [(rows, seconds / _inside(xs, ys, rows)) for rows, seconds in known.items()]
                for rows in scaled:
                    scaled[rows] *= min(paces, key=lambda one: abs(one[0] - rows))[1]
            known = scaled | known
        xs = sorted(known)
        self._points = xs, [known[rows] for rows in xs], {}
        return self._points

    def drafting(self, levels: Mapping[str, int]) -> float:
        """Seconds of drafting to these depths, by drafter."""
        return sum(
            self.per_draft.get(name, 0.0) + self.per_level.get(name, 0.0) * depth
            for name, depth in levels.items()
        )

    def prefill(self, drafter: str, tokens: float) -> float:
        """Seconds of a drafter's prefill; 0 until one was measured, so that one is."""
        return self.per_token.get(drafter, 0.0) * tokens

    def learn_pass(self, rows: int, seconds: float) -> None:
        """Takes a pass measured ahead. A pass of fewer rows cannot take longer: if it did, other load disturbed it."""
        self.curve[rows] = seconds
        for fewer in [known for known in self.curve if known < rows]:
            self.curve[fewer] = min(self.curve[fewer], seconds)
        self._points = None

    def observe(self, record: StepRecord, after_prompt: bool) -> None:
        rows, batch, experts = record.rows, record.sequences, self.experts
        seconds = record.total_s - record.draft_s
        if experts is not None and record.experts:
            experts.observe(record)
            seconds /= experts.ratio(rows, record.experts)
        _learn(self.by_rows, rows, seconds)
        self.times[rows] += 1
        self._points = None
        if record.drafted:
            self.baselines.drafted(batch, rows, batch in self.by_batch)
        else:
            _learn(self.by_batch, batch, record.total_s)
            self.baselines.plain(batch, record.total_s, self.by_rows.__getitem__, not after_prompt)
        if levels := _levels(record):
            # The costliest drafter is charged with what the others do not take.
            name = max(levels, key=lambda one: self.per_level.get(one, inf))
            depth = levels.pop(name)
            self._learn_drafting(name, depth, max(0.0, record.draft_s - self.drafting(levels)))

    def _learn_drafting(self, name: str, depth: int, seconds: float) -> None:
        """Fits a line through the drafts of each depth: the first level reads known tokens, too."""
        if name not in self._drafts:  # what is known from an earlier start counts as two drafts
            known = (1, 2) if name in self.per_level else ()
            self._drafts[name] = {d: self.drafting({name: d}) for d in known}
            self._drafted[name] = Counter(known)
        drafts, times = self._drafts[name], self._drafted[name]
        _learn(drafts, depth, seconds)
        times[depth] = min(times[depth] + 1, round(1 / (1 - KEEP)))
        count, mean = times.total(), sum(d * n for d, n in times.items()) / times.total()
        height = sum(drafts[d] * n for d, n in times.items()) / count
        spread = sum((d - mean) ** 2 * n for d, n in times.items())
        slope = sum((d - mean) * drafts[d] * n for d, n in times.items()) / spread if spread else inf
        self.per_level[name] = min(max(slope, 0.0), height / mean)
        self.per_draft[name] = height - mean * self.per_level[name]

    def observe_prompts(self, added: float, decoding: int) -> None:
        """A step of decoding sequences, to which prompt rows added so many seconds."""
        self.prompts += (added / self.plain(decoding) - self.prompts) / SEQUENCE_MEMORY

    def observe_prefill(self, record: StepRecord) -> None:
        """Learns a drafter's prefill: what drafting took beyond its usual time."""
        assert record.drafter_prefill is not None
        name, tokens, seconds = record.drafter_prefill
        _learn(self.per_token, name, max(0.0, seconds - self.drafting(_levels(record))) / tokens)

    @property
    def learned(self) -> int:
        """Steps that were learned from."""
        return self.times.total()

    def known_curve(self) -> dict[int, float]:
        """Passes by rows for the next start: as measured, and as taken relative to a plain step of one row."""
        known, alone = dict(self.curve), self.by_rows.get(1)
        if alone is not None and self.times[1] >= KNOWN_AFTER:
            pace = known.get(1, alone) / alone
            known |= {n: pace * s for n, s in self.by_rows.items() if self.times[n] >= KNOWN_AFTER}
        return dict(sorted(known.items()))


class CapturedCosts:
    """A step takes the device's time for its shape, and the host's time that the device cannot hide."""

    def __init__(self) -> None:
        self.ahead: dict[CapturedShape, float] = {}  # measured over padding
        self.device: dict[CapturedShape, float] = {}  # steps that were taken, a pass
        # Host time of a drafting step, by size. Plain steps have none: several passes at a time hide it.
        self.exposed: dict[int, float] = {}
        self.with_prompts: dict[tuple[int, int], float] = {}  # plain steps by size and rows for prompts
        self.per_token: dict[str, float] = {}  # of a drafter's prefill
        self.measured: set[tuple[str, int]] = set()  # drafters and sizes
        self.baselines = Baselines()
        self.experts: ExpertCosts | None = None  # of a mixture of experts

    def plain(self, size: int) -> float | None:
        return self.seconds(CapturedShape("none", NO_TREE, size))

    def seconds(self, shape: CapturedShape) -> float | None:
        """None: neither measured nor taken."""
        device = self._device(shape)
        exposed = self.exposed.get(shape.size, 0.0) if shape.tree != NO_TREE else 0.0
        return None if device is None else device + exposed - self._saved(shape)

    def _saved(self, shape: CapturedShape, read: float | None = None) -> float:
        """Seconds that a step is shorter than one of independent rows, because it reads only `read` experts: by default
        the expected number.
        """
        if self.experts is None:
            return 0.0
        rows = shape.size * (shape.tree.nodes + 1)
        read = self.experts.expected(rows, shape.size) if read is None else read
        return self._per_expert(self.experts) * (self.experts.distinct(rows) - read)

    def _per_expert(self, experts: ExpertCosts) -> float:
        """What the largest plain step takes more than the smallest, for each expert that it reads more. At most what
        its bytes are of the smallest: part of a step's time is that of launches and attention, not of bytes.
        """
        sizes = self.sizes("none")
        if not sizes:
            return 0.0
        shapes = (CapturedShape("none", NO_TREE, size) for size in (sizes[0], sizes[-1]))
        # Measured ahead where possible: then both are at the same context.
        few, many = (self.ahead.get(shape) or self.device.get(shape, 0.0) for shape in shapes)
        by_bytes = few / (experts.dense + experts.distinct(sizes[0]))
        more = experts.distinct(sizes[-1]) - experts.distinct(sizes[0])
        return min(max(many - few, 0.0) / more, by_bytes) if more > 0 else by_bytes

    def _device(self, shape: CapturedShape) -> float | None:
        if shape in self.device:
            return self.device[shape]
        plain = CapturedShape("none", NO_TREE, shape.size)
        if shape in self.ahead and plain in self.device and plain in self.ahead:
            return self.ahead[shape] * self.device[plain] / self.ahead[plain]  # at the pace of now
        return self.ahead.get(shape)

    def ratio(self, shape: CapturedShape) -> float:
        """Relative to a plain step. A shape that was not measured is judged by the one with the nearest rows."""
        plain, own = self.plain(shape.size), self.seconds(shape)
        if shape.tree == NO_TREE or not plain:
            return 1 + UNMEASURED_ROW * shape.tree.nodes
        if own is not None:
            return own / plain
        known = [one.tree for one in {**self.ahead, **self.device} if self._alike(one, shape)]
        if not known:
            return 1 + UNMEASURED_ROW * shape.tree.nodes
        near = min(known, key=lambda tree: (abs(tree.nodes - shape.tree.nodes), tree))
        return 1 + (self.ratio(shape._replace(tree=near)) - 1) * shape.tree.nodes / near.nodes

    def _alike(self, one: CapturedShape, shape: CapturedShape) -> bool:
        return one.tree != NO_TREE and (one.drafter, one.size) == (shape.drafter, shape.size)

    def depths(self, drafter: str, size: int) -> list[int]:
        """Of chains that were measured."""
        mine = [one.tree for one in self.ahead if (one.drafter, one.size) == (drafter, size)]
        return sorted(tree.depth for tree in mine if tree.is_chain and tree.nodes)

    def sizes(self, drafter: str) -> list[int]:
        return sorted({one.size for one in {**self.ahead, **self.device} if one.drafter == drafter})

    def prefill(self, drafter: str, tokens: float) -> float:
        return self.per_token.get(drafter, 0.0) * tokens

    def learn(self, drafter: str, size: int, costs: Iterable[tuple[str, TreeShape, float]]) -> None:
        """Steps of this size were measured ahead, plain and with a drafter."""
        self.measured.add((drafter, size))
        for name, tree, seconds in costs:
            self.ahead[CapturedShape(name, tree, size)] = seconds

    def learn_prefill(self, drafter: str, tokens: int, seconds: float) -> None:
        """Keeps the shortest time, because a graph may have been captured during the others."""
        self.per_token[drafter] = min(self.per_token.get(drafter, inf), seconds / tokens)

    def observe_host(self, record: StepRecord) -> None:
        """Learns the host time that the device does not hide, from every drafting step, also beside prompts. At most
        the device's own time counts: anything longer is a stall, which no plan changes.
        """
        if record.captured is not None and record.captured.tree != NO_TREE:
            exposed = min(max(record.total_s - record.target_s, 0.0), record.target_s)
            _learn(self.exposed, record.captured.size, exposed, 0.0)

    def observe(self, record: StepRecord, after_prompt: bool) -> None:
        assert record.captured is not None
        shape, group = record.captured, record.captured.size
        drafting, device = shape.tree != NO_TREE, record.target_s / record.passes
        if self.experts is not None and record.experts:
            self.experts.observe(record)
            device += self._saved(shape, record.experts)
        _learn(self.device, shape, device)
        if drafting:
            self.baselines.drafted(group, shape, CapturedShape("none", NO_TREE, group) in self.device)
        else:
            self.baselines.plain(group, device, self.device.__getitem__, not after_prompt)


class _Seconds(NamedTuple):
    """Of captured steps: the whole step, and by token of a sequence the time of the step and of the device."""

    step: float
    token: float
    device: float


class PromptPause:
    """Whether new prompts wait for one step, so that they are read together with those that arrive meanwhile.

    At many sequences the host takes longer for a step with prompt rows than the device does. Where prompts arrive all
    the time, every step would have some, and every token would wait for the host.
    """

    def __init__(self) -> None:
        self.known: dict[bool, _Seconds] = {}  # by whether the steps had prompt rows

    def observe(self, record: StepRecord) -> None:
        tokens = record.emitted / max(record.decoding, 1)
        if record.captured is None or tokens <= 0:
            return
        taken = _Seconds(record.total_s, record.total_s / tokens, record.target_s / tokens)
        before = self.known.get(record.prompt_rows > 0, taken)
        mixed = (KEEP * old + (1 - KEEP) * new for old, new in zip(before, taken, strict=True))
        self.known[record.prompt_rows > 0] = _Seconds(*mixed)

    def pays(self, decoding: int, waiting: float) -> bool:
        """After a step with prompt rows: whether `waiting` prompts, beside `decoding` sequences, wait for one without.

        Decoding sequences gain the difference between the two, less what twice the prompt rows take the device
        beyond the host's time. Each waiting prompt loses a step.
        """
        if len(self.known) < 2:
            return False
        prompts, plain = self.known[True], self.known[False]
        longer = max(2 * prompts.device - plain.device - prompts.step, 0.0)
        return (prompts.step - plain.token - longer) * decoding > waiting * plain.step


class CostModel:
    def __init__(self) -> None:
        self.eager, self.captured, self.pause = EagerCosts(), CapturedCosts(), PromptPause()
        self.after_prompt = False  # whether the last step had prompt rows

    def know_experts(self, experts: ExpertCosts) -> None:
        """The model is a mixture of experts."""
        self.eager.experts = self.captured.experts = experts

    def observe(self, record: StepRecord) -> None:
        after_prompt, self.after_prompt = self.after_prompt, record.prompt_rows > 0
        costs = self.eager if record.captured is None else self.captured
        if record.uncaptured:
            return
        self.captured.observe_host(record)
        self.pause.observe(record)
        if record.drafter_prefill is not None:
            if record.captured is None:
                self.eager.observe_prefill(record)
            else:
                self.captured.learn_prefill(*record.drafter_prefill)
        added = self._added_by_prompt(record) if record.prompt_rows else None
        if record.captured is None and record.decoding and self.eager.by_rows:
            self.eager.observe_prompts(added or 0.0, record.decoding)
        if record.decodes_only and record.drafter_prefill is None:
            costs.observe(record, after_prompt)
        elif record.prompt_rows:
            self._observe_prompt(record, added)

    def baseline_due(self, size: int, batch: int) -> bool:
        """Whether a plain step of the persistent batch of this size, or of this eager batch, is to be measured."""
        return self.captured.baselines.due(size) if size else self.eager.baselines.due(batch)

    def _observe_prompt(self, record: StepRecord, added: float | None) -> None:
        captured = record.captured
        if captured is not None and captured.drafter == "none":
            fitting = [rows for rows in self.prompt_sizes(captured.size) if rows >= record.prompt_rows]
            if fitting:
                key = captured.size, min(fitting)
                _learn(self.captured.with_prompts, key, max(record.total_s, record.target_s))
                return
        if captured is None and record.rows == record.prompt_rows:
            _learn(self.eager.per_lone_row, round_up(record.rows), record.total_s / record.rows)
        if added is not None and record.drafter_prefill is None:
            _learn(self.eager.per_prompt_row, round_up(record.prompt_rows), added / record.prompt_rows)

    def prompt_sizes(self, size: int) -> dict[int, float]:
        """Prompt rows that captured plain steps of this size have, and their seconds."""
        return {rows: s for (known, rows), s in self.captured.with_prompts.items() if known == size}

    def _added_by_prompt(self, record: StepRecord) -> float | None:
        """Seconds that prompt rows added to a step; None: unknown."""
        if record.captured is not None:
            without = self.captured.seconds(record.captured)
            prefilled = record.drafter_prefill.seconds if record.drafter_prefill else 0.0
        else:
            rows, prefilled = record.rows - record.prompt_rows, record.draft_s
            without = self.eager.step(rows, record.decoding) if rows and self.eager.by_rows else None
        if not record.prompt_rows or not without:
            return None
        return max(record.total_s - prefilled - without, 0.0)

    def plain_seconds(self, record: StepRecord) -> float:
        """What plain steps of the same sequences would have taken for the tokens of this step, prompt rows included;
        0: unknown, or no sequence waited for a token.
        """
        if not record.answering or not (record.emitted or record.prompt_rows):
            return 0.0
        captured = record.captured
        if not (record.drafted if captured is None else captured.tree != NO_TREE):
            return record.total_s
        plain = self.plain_now(record)
        decoding = max(record.decoding, 1)  # all that drafted may have ended meanwhile
        if not plain or not record.prompt_rows:
            return record.emitted / decoding * (plain or 0.0)
        return (1 + record.accepted / decoding) * plain + (self._added_by_prompt(record) or 0.0)

    def plain_now(self, record: StepRecord) -> float | None:
        """A plain step in place of this one: by the last baselines, as contexts grow."""
        captured = record.captured
        if captured is None:
            rows, batch = record.rows - record.prompt_rows, record.decoding
            share = self.eager.baselines.share(batch, rows)
            return self.eager.plain(batch) if share is None else share * self.eager.by_rows[rows]
        share = self.captured.baselines.share(captured.size, captured)
        if share is None:
            return self.captured.plain(captured.size)
        return share * self.captured.device[captured]


def _between(xs: list[int], ys: list[float], at: int, x: int) -> float:
    """Interpolates between the points before and at `at`."""
    part = (x - xs[at - 1]) / (xs[at] - xs[at - 1])
    return ys[at - 1] + part * (ys[at] - ys[at - 1])


def _inside(xs: list[int], ys: list[float], x: int) -> float:
    """Interpolates between the points, and takes the nearest beyond them."""
    at = bisect_left(xs, x)
    return ys[min(at, len(xs) - 1)] if at in (0, len(xs)) else _between(xs, ys, at, x)


def round_up(rows: int) -> int:
    """To a power of two."""
    return 1 << (rows - 1).bit_length()


def _levels(record: StepRecord) -> dict[str, int]:
    """How deep each drafter drafted in an eager step."""
    found: dict[str, int] = {}
    for o in record.outcomes:
        if o.drafted:
            found[o.draft_plan.drafter] = max(found.get(o.draft_plan.drafter, 0), o.deepest)
    return found


def _learn(known: dict, key: object, value: float, start: float | None = None) -> None:
    before = known.get(key, start)
    known[key] = value if before is None else KEEP * before + (1 - KEEP) * value
