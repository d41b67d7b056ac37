"""The cost model: seconds of steps, learned from those measured and those taken.

Eager steps are known by their rows, captured steps by drafter, draft tree and size, drafting by its levels, and a
drafter that has to catch up by the tokens it reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from math import inf

from outrider.control.trees import NO_TREE, TreeShape
from outrider.types import StepRecord

KEEP = 0.9  # weight of what was known against the newest measurement
KNOWN_AFTER = 8  # steps of so many rows: before, chance may have made their time
KEEP_SHARE = 0.7  # the same of what is measured once in a hundred steps
UNMEASURED_ROW = 0.05  # share of a step that a row is taken to cost; low, so that it gets measured
FIRST_BASELINE = 8  # drafting steps of a size after which a plain one is due, where there was none yet
# Times its time on the device, that a captured step counts for: no plan changes what holds up the host.
MAX_STALL = 1.5
# The same of a plain one: several passes at once keep the device busy where the host is late.
PLAIN_STALL = 1.15
FEW_DECODING = 16  # sequences whose prompts come one at a time as a rule
CROWDED = 0.5  # prompts that wait for each decoding sequence: where there are more, it may wait longer, too
MIN_READ = 256  # tokens: fewer take a drafter as long to read
# Plain steps' time to read MIN_READ tokens, at most: beyond, a graph was captured on the way.
SLOWEST_READ = 4


# What a drafting step's time depends on: drafter, draft tree and size of a captured one, rows of a eager one.
Shape = tuple[str, TreeShape, int] | int


class CostModel:
    def __init__(self, baseline_interval: int = 100) -> None:
        """`baseline_interval`: drafting steps after which a plain one is due."""
        self.baseline_interval = baseline_interval
        self.by_rows: dict[int, float] = {}  # eager steps
        self.curve: dict[int, float] = {}  # passes by rows, measured before anybody asked
        self._drawn: tuple[dict[int, float], int] = ({}, 0)  # points of it, and how many it had then
        self.believed: dict[int, float] = {}  # of `by_rows`, those taken often enough
        self.times: Counter[int] = Counter()  # eager steps that were taken, by rows
        self.by_batch: dict[int, float] = {}  # plain eager steps, by their sequences
        self.captured: dict[tuple[str, TreeShape, int], float] = {}  # plain: "none", NO_TREE
        self.per_level: dict[str, float] = {}  # of a draft in eager steps, by drafter
        self.per_token: dict[str, float] = {}  # of catching up, by drafter
        self.per_eager_token: dict[str, float] = {}  # the same, beside eager steps
        # What prompt rows add to a step of decoding sequences, by the power of two that has room for them: a row of so
        # many.
        self.per_prompt_row: dict[int, float] = {}
        # Captured plain steps with room for prompt rows, by size and that room.
        self.beside: dict[tuple[int, int], float] = {}
        self.measured: set[tuple[str, int]] = set()  # drafters and sizes of captured steps
        self.served: set[int] = set()  # sizes of plain captured steps that answered somebody
        # Drafting steps since the last plain one: by size of captured steps, by minus the batch of eager ones.
        self.since_plain: dict[int, int] = {}
        # A plain step's time over that of the drafting steps before it, by size as above and shape: both grow with the
        # context, so that what a plain step would take now follows from the drafting ones.
        self.plain_share: dict[tuple[int, Shape], float] = {}
        self.used: dict[int, set[Shape]] = {}
        # Whether the last step read a prompt. A plain step right after one is no baseline: a device waits for the host
        # before it, and a CPU for weights that left its cache.
        self.after_prompt = False

    def observe(self, record: StepRecord) -> None:
        after_prompt, self.after_prompt = self.after_prompt, record.prompt_rows > 0
        if not record.decodes_only or record.catch_up is not None:
            self._observe_prompt(record)
            return  # prompt rows made its time, or a drafter's: not what the same plan costs again
        plain = self._note_plain(record)
        if record.captured is not None:
            # A plain step among drafting ones waits for a host that plans drafts: it counts for its time on the device.
            # Where there are no others, the host plans less and takes several passes at once. Nor is it a step's cost
            # what the host has to do for answers that ended before it.
            among = plain and bool(self.used.get(record.captured[2]))
            apart = among or record.after_end
            stall = PLAIN_STALL if plain else MAX_STALL
            seconds = (record.target_s if apart else _captured_seconds(record, stall)) / record.passes
            if plain and record.captured[2] not in self.served:  # measured over padding so far, if at all
                self.served.add(record.captured[2])
                self.captured[record.captured] = seconds
            _learn(self.captured, record.captured, seconds)
            if not (plain and after_prompt):
                self._relate(record.captured[2], record.captured, seconds if plain else None)
            return
        _learn(self.by_rows, record.rows, record.total_s - record.draft_s)
        self.times[record.rows] += 1
        if self.times[record.rows] >= KNOWN_AFTER:
            self.believed[record.rows] = self.by_rows[record.rows]
        if plain:
            _learn(self.by_batch, record.sequences, record.total_s)
        if not (plain and after_prompt):
            self._relate(-record.sequences, record.rows, record.total_s if plain else None)
        if levels := _levels(record):
            # Of several, the costliest, as far as is known, is charged with what the others do not take.
            name = max(levels, key=lambda one: self.per_level.get(one, inf))
            depth = levels.pop(name)
            _learn(self.per_level, name, max(0.0, record.draft_s - self.drafting(levels)) / depth)

    def _note_plain(self, record: StepRecord) -> bool:
        """Whether nothing was drafted; how long ago that was is counted."""
        plain = record.captured[1] == NO_TREE if record.captured else not record.drafted
        size = record.captured[2] if record.captured else -record.sequences
        known = self.plain(size) if size > 0 else self.by_batch.get(-size)
        start = 0 if known else self.baseline_interval - FIRST_BASELINE
        self.since_plain[size] = 0 if plain else self.since_plain.get(size, start) + 1
        return plain

    def _relate(self, size: int, shape: Shape, plain: float | None) -> None:
        """A drafting step of this shape; or a plain one that took so long, to hold those since the last against."""
        used = self.used.setdefault(size, set())
        if plain is None:
            used.add(shape)
            return
        for one in used:
            _learn(self.plain_share, (size, one), plain / self._taken(one), KEEP_SHARE)
        used.clear()

    def _taken(self, shape: Shape) -> float:
        return self.by_rows[shape] if isinstance(shape, int) else self.captured[shape]

    def baseline_due(self, size: int, batch: int) -> bool:
        """Whether a plain step is to be measured: captured ones of this size, or eager ones of this batch (size 0)."""
        return self.since_plain.get(size or -batch, 0) >= self.baseline_interval

    def _observe_prompt(self, record: StepRecord) -> None:
        drafter, _, size = record.captured or ("", NO_TREE, 0)
        if drafter == "none" and (rooms := self._rooms(size)) and record.prompt_rows <= max(rooms):
            room = min(rows for rows in rooms if rows >= record.prompt_rows)
            _learn(self.beside, (size, room), _captured_seconds(record))
            return
        added = self._added_by_prompt(record)
        if added is not None and record.catch_up is None:
            _learn(self.per_prompt_row, _bucket(record.prompt_rows), added / record.prompt_rows)

    def _added_by_prompt(self, record: StepRecord) -> float | None:
        """Seconds that prompt rows added to a step; None: it has none, or nobody knows what it takes without."""
        without = self._seconds(record, record.rows - record.prompt_rows)
        if not record.prompt_rows or not without:
            return None
        # A eager step has it in its drafting.
        caught_up = record.catch_up[2] if record.catch_up and record.captured else 0.0
        return max(record.total_s - record.draft_s - caught_up - without, 0.0)

    def _seconds(self, record: StepRecord, rows: int) -> float | None:
        """Of a step like this one with so many rows, if it is known."""
        if record.captured is not None:
            return self.captured.get(record.captured)
        return self.step(rows) if rows and self.by_rows else None

    def prompt_rows(self, decoding: int, share: float, most: int, waiting: int = 0) -> int:
        """Prompt rows that add such a share to the time of a step of so many decoding sequences. While nobody knows
        what they add, as many as may be. Captured steps have room for certain numbers of them: one of those.

        A captured step takes hardly longer for many sequences, among which more prompts come, each of them missing from
        every step until it is read: there the share is of as many steps of one as `FEW_DECODING` go into them. It is
        larger, too, the more prompts wait for each that decodes: few are held up then, and many helped.
        """
        size = self._size(decoding)
        plain = self.plain(size) if size else self.step(decoding) if self.by_rows else None
        few = (self.plain(1) or 0.0) * decoding / FEW_DECODING
        added = share * max(plain or 0.0, few)
        if plain and (rooms := self._rooms(size)):
            added *= max(1.0, waiting / decoding / CROWDED)
            within = [rows for rows, seconds in rooms.items() if seconds <= plain + added]
            return min(max(within, default=min(rooms)), most)
        if not plain or not self.per_prompt_row:
            return most
        room = _bucket(most)
        while room > 1:
            near = min(self.per_prompt_row, key=lambda known: abs(known.bit_length() - room.bit_length()))
            rows = min(int(added / max(self.per_prompt_row[near], 1e-9)), room, most)
            if rows > room // 2:
                return rows
            room //= 2
        return 1

    def read_at_once(self, decoding: int, waiting: int, pending: int, steps: int) -> int:
        """Prompt rows of a captured step where several prompts wait, half as many as decode or more, and so many of the
        longest steps can read all their rows; else 0.
        """
        if waiting < max(2, CROWDED * decoding):
            return 0
        rooms = self._rooms(self._size(decoding))
        if pending > steps * max(rooms, default=0):
            return 0
        return max((rows for rows in rooms if rows <= 2 * pending), default=0)  # half of it filled, at least

    def _rooms(self, size: int) -> dict[int, float]:
        """Room for prompt rows that captured steps of this size have, and their seconds."""
        return {rows: seconds for (known, rows), seconds in self.beside.items() if known == size}

    def learn_prompt_rows(self, size: int, rows: int, seconds: float) -> None:
        """A captured plain step of this size, with room for so many prompt rows, was measured."""
        _learn(self.beside, (size, rows), seconds)

    def learn(self, drafter: str, size: int, costs: Iterable[tuple[str, TreeShape, float]]) -> None:
        """Captured steps of this size were measured, plain and with a drafter."""
        self.measured.add((drafter, size))
        for name, tree, seconds in costs:
            _learn(self.captured, (name, tree, size), seconds)

    def learn_pass(self, rows: int, seconds: float) -> None:
        """A eager pass was measured before anybody asked. One of fewer rows that took longer was held up."""
        self.curve[rows] = seconds
        for fewer in [known for known in self.curve if known < rows]:
            self.curve[fewer] = min(self.curve[fewer], seconds)

    def learn_reading(self, drafter: str, tokens: int, seconds: float) -> None:
        """A drafter caught up. The least counts, as a graph may have been captured on the way."""
        self.per_token[drafter] = min(self._per_token(drafter), seconds / max(tokens, MIN_READ))

    def reading(self, drafter: str, tokens: int) -> float:
        """Seconds for a drafter to read so many tokens."""
        return self._per_token(drafter) * max(tokens, MIN_READ) if tokens else 0.0

    def learn_eager_reading(self, record: StepRecord) -> None:
        """A drafter caught up before it drafted for a eager step: what drafting took longer than it takes else."""
        assert record.catch_up is not None
        name, tokens, seconds = record.catch_up
        _learn(self.per_eager_token, name, max(0.0, seconds - self.drafting(_levels(record))) / tokens)

    def eager_reading(self, drafter: str, tokens: int) -> float:
        """Seconds for a drafter to read so many tokens before a eager step; nothing until it has read once."""
        return self.per_eager_token.get(drafter, 0.0) * tokens

    def _per_token(self, drafter: str) -> float:
        """While it is not measured, as long as it may take."""
        if drafter in self.per_token:
            return self.per_token[drafter]
        plain = [seconds for (_, tree, _), seconds in self.captured.items() if tree == NO_TREE]
        return SLOWEST_READ * min(plain or self.by_rows.values(), default=0.0) / MIN_READ

    def step(self, rows: int) -> float:
        """Seconds of a eager step: as taken, else by the curve from the nearest that was, else from the nearest. Where
        there is a curve, it is believed more than steps that were taken a few times, while others were busy or not.
        """
        return self._step(rows, (self.curve and self.believed) or self.by_rows)

    def _step(self, rows: int, taken: Mapping[int, float]) -> float:
        if rows in taken or not self.curve:
            return _interpolated(taken, rows)
        near = min(taken or self.curve, key=lambda known: abs(known - rows))
        whole = self._on_curve(near)
        return taken.get(near, whole) * self._on_curve(rows) / whole

    def _size(self, decoding: int) -> int:
        """Of captured plain steps for so many sequences; 0: there are none."""
        return min((s for name, _, s in self.captured if name == "none" and s >= decoding), default=0)

    def _on_curve(self, rows: int) -> float:
        """It is measured once and asked many times a step."""
        if len(self.curve) != self._drawn[1]:
            self._drawn = {}, len(self.curve)
        points = self._drawn[0]
        if rows not in points:
            points[rows] = _interpolated(self.curve, rows)
        return points[rows]

    @property
    def steps(self) -> int:
        """Eager ones that were learned from."""
        return self.times.total()

    def known_curve(self) -> dict[int, float]:
        """Eager steps by rows as they are known by now, for whoever starts next: as measured, and those that were
        taken by how much longer they took than a plain one. Without plain ones nobody knows at what pace they went.
        """
        known, plain = dict(self.curve), self.believed.get(1)
        if plain is not None:
            pace = known.get(1, plain) / plain
            known |= {rows: pace * seconds for rows, seconds in self.believed.items()}
        return dict(sorted(known.items()))

    def ragged_plain(self, batch: int) -> float:
        """Seconds of a plain eager step."""
        known = self.by_batch.get(batch)
        return self.step(batch) if known is None else known

    def drafting(self, levels: Mapping[str, int]) -> float:
        """Seconds of drafting so many levels, by drafter, in a eager step."""
        return sum(self.per_level.get(name, 0.0) * depth for name, depth in levels.items())

    def plain(self, size: int) -> float | None:
        """Seconds of a plain captured step."""
        return self.captured.get(("none", NO_TREE, size))

    def ratio(self, drafter: str, tree: TreeShape, size: int) -> float:
        """A captured step's cost against a plain one's. Where it is not measured: from the tree with the nearest number
        of rows.
        """
        plain = self.plain(size)
        if tree == NO_TREE:
            return 1.0
        if plain and (drafter, tree, size) in self.captured:
            return self.captured[drafter, tree, size] / plain
        known = [t for name, t, s in self.captured if (name, s) == (drafter, size)]
        if not plain or not known:
            return 1 + UNMEASURED_ROW * tree[1]
        near = min(known, key=lambda one: (abs(one[1] - tree[1]), one))
        return 1 + (self.captured[drafter, near, size] / plain - 1) * tree[1] / near[1]

    def plain_seconds(self, record: StepRecord) -> float:
        """What plain steps over the same sequences would have taken for the tokens of this one, prompt rows read as in
        this one; 0: nobody knows, or nobody waited for a token.
        """
        if not record.answering or not (record.emitted or record.prompt_rows):
            return 0.0
        if not (record.captured[1] != NO_TREE if record.captured else record.drafted):
            return record.total_s
        rows = record.rows - record.prompt_rows
        size, shape = (record.captured[2], record.captured) if record.captured else (-record.decoding, rows)
        share = self.plain_share.get((size, shape))
        if share is not None:
            plain: float | None = share * self._taken(shape)
        else:
            plain = self.plain(size) if size > 0 else self.ragged_plain(-size)
        decoding = max(record.decoding, 1)  # all that drafted may have gone meanwhile
        if not plain or not record.prompt_rows:
            return record.emitted / decoding * (plain or 0.0)
        return (1 + record.accepted / decoding) * plain + (self._added_by_prompt(record) or 0.0)


def _captured_seconds(record: StepRecord, stall: float = MAX_STALL) -> float:
    """Of a captured step, without what held up the host."""
    return min(max(record.total_s, record.target_s), stall * record.target_s)


def _interpolated(known: Mapping[int, float], rows: int) -> float:
    """Seconds by rows, between the nearest numbers of rows that are known, and beyond them."""
    if rows in known:
        return known[rows]
    a = max((r for r in known if r < rows), default=0)
    b = min((r for r in known if r > rows), default=0)
    if a and b:
        share = (rows - a) / (b - a)
        return known[a] * (1 - share) + known[b] * share
    near, least = a or b, min(known, default=0)
    assumed = known.get(near, 1.0) * (1 + UNMEASURED_ROW * rows) / (1 + UNMEASURED_ROW * near)
    if least < a:  # what rows cost up to there, they cost beyond
        slope = (known[a] - known[least]) / (a - least)
        return max(assumed, known[a] + slope * (rows - a))
    return assumed


def _bucket(rows: int) -> int:
    """The power of two that has room."""
    return 1 << (rows - 1).bit_length()


def _levels(record: StepRecord) -> dict[str, int]:
    """How deep each drafter drafted in a eager step."""
    found: dict[str, int] = {}
    for o in record.outcomes:
        if o.drafted:
            found[o.draft_plan.drafter] = max(found.get(o.draft_plan.drafter, 0), o.deepest)
    return found


def _learn(known: dict, key: object, value: float, keep: float = KEEP) -> None:
    known[key] = keep * known[key] + (1 - keep) * value if key in known else value
