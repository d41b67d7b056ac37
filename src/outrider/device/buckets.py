"""Which shapes steps are captured for: few, as capturing one takes the time of many steps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence as Seq
from functools import cache

from outrider.load.config import ModelConfig
from outrider.model.staged import StagedShape, rows_together

# Resident sequences. Weights are read once for up to 64 rows; from there on a step grows with its rows, and what is
# padded is paid for.
SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
BEYOND = 256  # sizes after those are its multiples
RUNS = (1, 2, 4, 8)  # plain passes in one step
# Of one step, at most, with several passes: their tokens reach a stream all at once. Of many sequences the host is what
# holds the device up, and with one pass a step a small model would answer a third slower.
RUN_SECONDS, MANY, MANY_RUN_SECONDS = 0.006, 32, 0.02
# Share of the device's time that it may wait for the host before steps have more passes. A pass of a longer step takes
# the device 2 to 6 % longer (log/120).
IDLE = 0.05
# Weight of a step in the average of that share, and by how much it reduces the averages of shorter ones (log/120).
SMOOTHING, FADING = 1 / 32, 1 / 512
# Rows packed by the host: few, or a multiple of what matmuls are padded to; and the most that a step is captured for
# where it turns out to be needed.
STAGED, STAGED_MULTIPLE, MOST_CAPTURED = (16, 32), 64, 512
# Prompt rows that steps are captured with ahead, and the logits that are wanted of them. Fewer rows than the least cost
# no less, and 512 are read as fast, row by row, as thousands. The most (`chunk_sizes`) are for many prompts at
# once, and for those that have waited long: steps beside them read the keys and values of all who decode.
CHUNK_SIZES = ((64, 16), (128, 16), (256, 16), (512, 64))
MOST_TOGETHER = 2048  # rows that a library multiplies
DRAFTED_CHUNKS = CHUNK_SIZES[1:3]  # beside drafts
# Prompts without decoding sequences come as they are.
ALONE = tuple(
    (rows, 16 if rows <= 256 else 64) for rows in range(STAGED_MULTIPLE, MOST_CAPTURED + 1, STAGED_MULTIPLE)
)
# Longer ones: launched one by one, a pass of 32 layers takes the host as long as 2,048 rows take a GPU.
LONG_ALONE = (640, 768, 1024, 1280, 1536, MOST_TOGETHER)
# Decoding sequences beside prompt rows, which are many more than those.
BESIDE = (4, 16, 64, 128, 256, 512, 1024)
# Rows that a pass takes about as long for. Weights are read once for 64, but sequences are attended to and sampled each
# by itself: on an H200 64 take a 1.5B model 1.5 times as long as one, and an 8B model 1.3 times.
ALIKE = 8
MAX_BESIDE = 4  # nodes of drafts beside prompt rows: chains that are captured with them
FEW_LOGITS, MAX_LOGITS = 16, 64  # of staged rows: a few, or a multiple
MAX_ROWS = 512  # of a step whose drafts no request asked for: logits of many rows take much memory
TREE_SIZE = 4  # sequences up to which a step has rows to spare for trees that branch
# Launches of a shape with staged rows of any number: as many lose what it takes to capture one.
CAPTURE_AFTER = 48
# Plain steps' time that it takes to capture and measure those of a size; once steps are prepared, to capture one.
CAPTURE_COST, CAPTURE_ONE_COST = 200, 8
SAVED = 0.03  # of a step's time, by one of half its size


def bucket(count: int, buckets: tuple[int, ...]) -> int:
    """The smallest that has room; beyond them all, the count itself."""
    return next((size for size in buckets if size >= count), count)


def longest_run(size: int, seconds: float) -> int:
    """Plain passes that a step of this size may have, if one takes so long."""
    most = MANY_RUN_SECONDS if size >= MANY else RUN_SECONDS
    return max(run for run in RUNS if run == 1 or run * seconds <= most)


@cache
def size_of(count: int) -> int:
    """The bucket for `count` sequences."""
    return bucket(count, (*SIZES, -(-count // BEYOND) * BEYOND))


def sizes_up_to(count: int) -> list[int]:
    """Of steps for any number of sequences up to this one."""
    every = *SIZES, *range(SIZES[-1] + BEYOND, count + BEYOND, BEYOND)
    return [size for size in every if size <= size_of(count)]


def fitting_sizes(sizes: Seq[int], each: int) -> list[int]:
    """The sizes worth capturing with `each` rows a sequence: those that the next larger size cannot replace at the same
    cost, and 1.
    """
    larger = [*sizes[1:], ALIKE + 1]
    return [size for size, more in zip(sizes, larger, strict=True) if size == 1 or more * each > ALIKE]


@cache
def chunk_sizes(size: int) -> tuple[tuple[int, int], ...]:
    """Prompt rows and logits of steps beside `size` decoding sequences. The last has all rows that those leave."""
    left, (most, logits) = MOST_TOGETHER - -(-size // STAGED_MULTIPLE) * STAGED_MULTIPLE, CHUNK_SIZES[-1]
    return (*CHUNK_SIZES, (left, logits)) if left > most else CHUNK_SIZES


@cache
def size_beside(size: int, count: int) -> int:
    """Size of a step beside prompt rows with room for `size` decoding sequences, where there are at most `count`."""
    return min(bucket(size, BESIDE), sizes_up_to(count)[-1])


def sizes_beside(count: int) -> list[int]:
    """Of steps beside prompt rows for up to this many decoding sequences; a single sequence has none beside it."""
    return sorted({size_beside(size, count) for size in sizes_up_to(count)}) if count > 1 else []


def staged_bucket(chunks: Seq[int], drafts: Seq[int], logits: int) -> tuple[int, int, int]:
    """Room for staged rows, for the logits that are wanted of them, and for those rows that are of sequences with draft
    nodes. `chunks` are the rows of each sequence without, `drafts` of each with.
    """
    rows, branching = (_room(sum(some), len(some)) if some else 0 for some in (chunks, drafts))
    total = rows + branching
    few = bucket(logits, (FEW_LOGITS, -(-logits // MAX_LOGITS) * MAX_LOGITS))
    return total, min(total, few), branching


def _room(rows: int, sequences: int) -> int:
    """The smallest bucket for `rows` rows that has enough groups for `sequences` sequences."""
    room = bucket(rows, (*STAGED, -(-rows // STAGED_MULTIPLE) * STAGED_MULTIPLE))
    return room if room <= STAGED[0] or _partial_groups(room) > sequences else _room(room + 1, sequences)


def worth_capturing(staged: int, launches: int) -> bool:
    """Whether a step with `staged` rows was launched often enough: prompt chunks come in too many sizes."""
    return staged == 0 or (staged <= MOST_CAPTURED and launches >= CAPTURE_AFTER)


def staged_room(size: int, drafts: bool, rows: int, logits: int) -> tuple[int, int] | None:
    """The smallest prepared room for staged rows and their logits beside `size` decoding sequences; None: there is
    none.
    """
    longer = ((many, MAX_LOGITS) for many in LONG_ALONE)
    rooms = (*ALONE, *longer) if not size else DRAFTED_CHUNKS if drafts else chunk_sizes(size)
    return min((one for one in rooms if one[0] >= rows and one[1] >= logits), default=None)


def staged_shape(rows: int, logits: int, branching: int, config: ModelConfig) -> StagedShape:
    """How attention reads a bucket: in groups of rows of one sequence."""
    together = rows_together(config, 0 if branching else rows)
    plain, drafted = (
        min(some, some // together + _partial_groups(some)) for some in (rows - branching, branching)
    )
    return StagedShape(rows, logits, together, (plain, drafted), branching)


def _partial_groups(rows: int) -> int:
    """Groups that are not full: each sequence may end with one, and padding."""
    return rows // 8 + 16


class SizeChoice:
    """The size of the next step. Capturing a new one takes the time of many steps, so a larger one there is will do
    until what that cost comes to as much.
    """

    def __init__(self) -> None:
        self.made: set[int] = set()
        self.oversized: Counter[int] = Counter()  # by size: steps for which a larger one had to do
        self.on_demand = True  # whether all steps of a new one are made at once

    def choose(self, count: int) -> int:
        size = size_of(count)
        nearest = min((one for one in self.made if one > size), default=0)
        if size not in self.made and nearest:
            self.oversized[size] += 1
            lost = self.oversized[size] * SAVED * (nearest / size - 1)
            if lost < (CAPTURE_COST if self.on_demand else CAPTURE_ONE_COST):
                return nearest
        self.made.add(size)
        return size

    def room_for(self, count: int) -> int:
        """The smallest that is there; if there is none, a new one."""
        return min((size for size in self.made if size >= count), default=0) or self.choose(count)


class RunChoice:
    """Plain passes in one step, by size: more where the device waits for the host, else as few as can be."""

    def __init__(self) -> None:
        self.passes: dict[int, int] = {}
        # By size and passes: share of its time that the device waited, on average.
        self.idle: defaultdict[tuple[int, int], float] = defaultdict(float)

    def choose(self, size: int, most: int) -> int:
        """At most `most` passes: no sequence has more tokens left."""
        return max(run for run in RUNS if run <= min(self.passes.get(size, 1), max(most, 1)))

    def observe(self, size: int, passes: int, spent: float, device: float) -> None:
        """A step without drafts was settled `spent` seconds after the one before; the device took `device` of them.
        What shorter steps lost fades, so that they are tried again: the host may have less to do by then.
        """
        idle, longest = self.idle, longest_run(size, device / passes)
        found = min(max(spent / device - 1, 0.0), 1.0)
        idle[size, passes] += SMOOTHING * (found - idle[size, passes])
        for shorter in RUNS[: RUNS.index(passes)]:
            idle[size, shorter] *= 1 - FADING
        enough = (run for run in RUNS if idle[size, run] <= IDLE)
        self.passes[size] = min(next(enough, RUNS[-1]), longest)
