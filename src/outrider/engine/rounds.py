"""Rounds that stay on the device: draft, target pass, law, commit, with nothing for the host to wait for.

Sequence state (texts, lengths, slot tables, seeds) lives where the model does. A round is a fixed list of
tensor operations over it, so on a GPU it is captured once a shape as a graph and replayed. The host says who
takes part, gives each a few fresh slots, and reads what happened one round later, while the next one runs.

Only guesses of a few forms fly (control/trees.py), and only for requests whose law is a temperature and filters;
everything else takes the packed path of runner.py. Both give the same bits: a guess sees what a plain row would see.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.cache.store import KeyValueStore
from outrider.cache.table import SlotTable
from outrider.control.trees import CHAINS, NO_TREE, TREES, TreeShape, tree_nodes
from outrider.draft.chains import Branches, ChainDrafter, Pass, TreeDrafter, chain_levels, guess
from outrider.draft.state import Between, State
from outrider.model.decoder import Model
from outrider.model.kernels.gpu.recording import context_for, record
from outrider.types import NO_BET, NO_DRAFT, Bet, Draft, Sequence, Verdict, Work

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
# Guesses a round may hold for a sequence, so that there is room; longer chains are packed.
DEEPEST = CHAINS[-1][0]
RUNS = (1, 4, 8)  # plain passes in one round: few, as each is made once, which takes time
PLAIN = ("none", NO_TREE)
MOST_ROWS = 512  # of a round whose guesses nobody asked for: logits of many rows take much memory
TREE_SIZE = 4  # up to so many sequences a round has rows to spare for trees
MAKING = 200  # plain rounds' time that it takes to make and measure those of a size
SAVED = 0.03  # of a round's time, by one of half its size


@dataclass(slots=True)
class Flight:
    """A round on its way."""

    picks: list[Work]
    bets: list[Bet]
    reasons: tuple[str, ...]
    nodes: int  # guesses, or plain passes after the first
    form: TreeShape  # of the guesses
    drafter: str
    result: Tensor  # on the host, once landed: as `Shape._plain` or `Shape._guessed` tells
    timer: Timer
    rows: list[int]
    size: int  # of its shape: padding counts
    begun: float

    def holds(self, i: int) -> bool:
        """Whether a pick still is what it was: not ended, not preempted."""
        sequence = self.picks[i].sequence
        return sequence.finish_reason is None and sequence.row == self.rows[i]

    @property
    def kind(self) -> tuple[str, TreeShape, int]:
        """Whose guesses it has room for, in which form, and for how many sequences."""
        return self.drafter, self.form, self.size

    @property
    def seconds(self) -> float:
        """What it took the device; once landed."""
        return self.timer.seconds()

    @property
    def passes(self) -> int:
        return self.nodes + 1 if self.drafter == "none" else 1

    @property
    def rows_a_pass(self) -> int:
        return len(self.picks) * (self.nodes + 1) // self.passes

    def land(self) -> tuple[list[Draft], list[Verdict]]:
        """What the target said; waits for the device."""
        self.timer.wait()
        if self.drafter == "none":
            told = self.result[: len(self.picks)].tolist()
            return [NO_DRAFT] * len(told), [Verdict(tokens, []) for tokens in told]
        drafts, verdicts = [], []
        (depth, n), parents = self.form, tree_nodes(self.form).parents
        for accepted, count, *rest in self.result[: len(self.picks)].tolist():
            tokens, path, guesses = rest[: accepted + 1], rest[depth + 1 : depth + 1 + accepted], rest[-n:]
            drafts.append(Draft(tuple(guesses[:count]), parents[:count]) if count else NO_DRAFT)
            verdicts.append(Verdict(tokens, path))
        return drafts, verdicts


class Timer:
    """How long something takes where it runs, however late the host looks."""

    def __init__(self, cuda: bool) -> None:
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * cuda)]
        if self.events:
            self.events[0].record()
        self.begun, self.ended = time.perf_counter(), 0.0

    def stop(self) -> None:
        if self.events:
            self.events[1].record()
        self.ended = time.perf_counter()

    def wait(self) -> None:
        if self.events:
            self.events[1].synchronize()

    def seconds(self) -> float:
        if self.events:
            return self.events[0].elapsed_time(self.events[1]) / 1000
        return self.ended - self.begun


class Rounds:
    def __init__(
        self,
        model: Model,
        store: KeyValueStore,
        table: SlotTable,
        device: torch.device,
        run: Pass,
        lag: int = 1,
        between: Between | None = None,
    ) -> None:
        """`run` is the target's pass over rows that lie on the device, `between` what it has for the rest."""
        self.model, self.store, self.table, self.device, self.run = model, store, table, device, run
        rows, width = table.tensor.shape
        self.state = State(rows, width, device, between)
        self.drafters: dict[str, ChainDrafter] = {}
        self.lag, self.deepest = lag, DEEPEST
        # By row: who is there, and how many tokens are known.
        self.boarded: dict[int, tuple[Sequence, int]] = {}
        self.dummy = store.slots
        self.state.table[-1] = self.dummy  # padding's row, which a drafter also takes for who wants no guess
        # Of rounds that may be on their way: the drafter, the rows it guesses for, and the most tokens they bring.
        self.latest: deque[tuple[str, set[int], int]] = deque(maxlen=lag)
        self.shapes: dict[tuple[int, int, TreeShape, str, int, bool], Shape] = {}
        self.runs: dict[int, int] = {}  # by size: plain passes in one round
        self.made: set[int] = set()  # sizes that rounds are made for
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.oversized: Counter[int] = Counter()  # by size: rounds for which a larger one had to do

    def takes(self, sequence: Sequence, default: str) -> bool:
        """Whether this request's law is a temperature and filters alone, and its guesses are chains made here."""
        request = sequence.request
        how = request.params.speculation
        if request.params.logprobs is not None or request.edits_logits or how.mode != "coupled":
            return False
        if request.prediction_ids and not how.off:
            return False  # only the host's lookup follows a prediction
        name = how.drafter or default
        chain = (
            how.tree is None and how.nodes in (None, how.depth) and (how.depth or 0) <= self._deepest(name)
        )
        return how.off or (chain and name in ("none", *self.drafters))

    def fitted(self, bets: Seq[Bet]) -> list[Bet]:
        """The same bets in forms that fly. A round has one drafter, the one most asked for; others are plain in it."""
        asked = Counter(bet.drafter for bet in bets if bet.nodes)
        ((chosen, _),) = asked.most_common(1) or [("none", 0)]
        return [self._form(bet) if bet.nodes and bet.drafter == chosen else NO_BET for bet in bets]

    def _form(self, bet: Bet) -> Bet:
        """As it is if it is one of the trees and there is room for it, else a chain."""
        if bet.nodes <= self.deepest and (bet.depth, bet.nodes) in self.forms(bet.drafter, 1):
            return bet
        depth = min(bet.depth, self._deepest(bet.drafter))
        return replace(bet, nodes=depth, depth=depth)

    def _deepest(self, drafter: str) -> int:
        return min(self.deepest, self.drafters[drafter].deepest) if drafter in self.drafters else self.deepest

    def forms(self, drafter: str, size: int) -> tuple[TreeShape, ...]:
        """What a drafter's guesses may look like in rounds of this size."""
        one = self.drafters.get(drafter)
        if one is None:
            return ()
        branches = isinstance(one, TreeDrafter)
        trees = TREES if branches and size <= TREE_SIZE else ()
        deepest = TREES[-1][0] if branches else one.deepest  # what takes a pass a guess is rarely worth more
        chains = (form for form in CHAINS if form[0] <= deepest)
        return tuple(form for form in (*chains, *trees) if size * (form[1] + 1) <= MOST_ROWS)

    def size_for(self, count: int) -> int:
        """The size of the next round for so many sequences. Making rounds of a new size takes the time of many rounds,
        so a larger one that is there will do until what that cost comes to as much.
        """
        size = _up(count)
        nearest = min((one for one in self.made if one > size), default=0)
        if size not in self.made and nearest:
            self.oversized[size] += 1
            if self.oversized[size] * SAVED * (nearest / size - 1) < MAKING:
                return nearest
        self.made.add(size)
        return size

    def sizes_up_to(self, count: int) -> list[int]:
        """Of rounds for any number of sequences up to this one."""
        return [size for size in SIZES if size <= _up(count)]

    def run_length(self, size: int) -> int:
        """Plain passes of this size before the host looks: more where it cannot keep up otherwise."""
        return self.runs.get(size, 1)

    def pace(self, flight: Flight, waited: float, spent: float) -> None:
        """After a round: if the host hardly had to wait for it, the host is what holds the device up."""
        if flight.drafter != "none":
            return
        run, at = flight.passes, flight.size
        if waited < 0.1 * spent:
            self.runs[at] = next((longer for longer in RUNS if longer > run), RUNS[-1])
        elif waited > 0.6 * spent:
            self.runs[at] = next((shorter for shorter in reversed(RUNS) if shorter < run), RUNS[0])

    def unread(self, sequences: Seq[Sequence], drafter: str) -> dict[Sequence, int]:
        """Tokens this drafter must read before it can guess, by whose they are."""
        if drafter not in self.drafters:
            return {}
        counts = {s: self.drafters[drafter].unread(s, self._coming(s, drafter)) for s in sequences}
        return {s: count for s, count in counts.items() if count}

    def _coming(self, sequence: Sequence, drafter: str) -> int:
        """Tokens that rounds on their way may bring without this drafter reading along."""
        return sum(most for name, rows, most in self.latest if name != drafter or sequence.row not in rows)

    def catch_up(self, sequences: list[Sequence], drafter: str) -> float:
        """With nothing on its way: bring rows up to date and let the drafter read. Seconds it took."""
        for sequence in sequences:
            self._board(sequence)
        timer = Timer(self.device.type == "cuda")
        self.drafters[drafter].catch_up(self.state, sequences)
        timer.stop()
        timer.wait()
        return timer.seconds()

    def practise(self, drafter: str) -> tuple[int, float]:
        """With nothing on its way: tokens that a drafter can read in some seconds, if it has to read at all."""
        tokens, seconds = 0, 0.0
        for _ in range(2 if drafter in self.drafters else 0):  # the first time only warms up
            timer = Timer(self.device.type == "cuda")
            tokens = self.drafters[drafter].practise(self.state)
            timer.stop()
            timer.wait()
            seconds = timer.seconds()
        return tokens, seconds

    def measure(self, size: int, drafter: str) -> Iterator[tuple[str, TreeShape, float]]:
        """With nothing on its way: what rounds of this size take, plain and with guesses of each form, in seconds; over
        padding, which changes nobody's state. It also makes them, so that no answer waits for that later.
        """
        context = context_for(1, self.state.width)
        for form in (NO_TREE, *self.forms(drafter, size)):
            name, nodes = ("none", 0) if form == NO_TREE else (drafter, form[1])
            shape = self._shape(size, nodes, form, name, context, False)
            for _ in range(2):  # the first one only warms up
                shape.fill([], np.zeros((0, nodes + 1), np.int32), [], self.state.rows, self.dummy)
                _, timer = shape.fly()
                timer.wait()
            yield name, form, timer.seconds()

    def launch(
        self, picks: list[Work], bets: list[Bet], reasons: tuple[str, ...], fresh: np.ndarray, size: int
    ) -> Flight:
        """Start a round of a size that has room for all. `fresh` are the last slots of each row: one, and one more for
        every guess or further pass.
        """
        nodes = fresh.shape[1] - 1
        drafter, form = max(
            ((b.drafter, (b.depth, b.nodes)) for b in bets if b.nodes == nodes > 0), default=PLAIN
        )
        rows = [pick.sequence.row for pick in picks]
        for pick in picks:
            self._board(pick.sequence)
        filtered = bool(self.state.filters[rows].any())
        shape = self._shape(size, nodes, form, drafter, self._context(picks), filtered)
        shape.fill(rows, fresh, [bet.nodes for bet in bets], self.state.rows, self.dummy)
        result, timer = shape.fly()
        guessing = {row for row, bet in zip(rows, bets, strict=True) if bet.nodes}
        self.latest.append((drafter, guessing, 1 + (form[0] or nodes)))
        return Flight(
            picks, bets, reasons, nodes, form, drafter, result, timer, rows, size, time.perf_counter()
        )

    def landed(self, flight: Flight, i: int, verdict: Verdict) -> None:
        """The host now knows of a pick what the device knew already."""
        sequence = flight.picks[i].sequence
        if flight.bets[i].nodes:
            held, parents = verdict.accepted, tree_nodes(flight.form).parents
            leaf = bool(held) and held[-1] not in parents  # nobody had to read it to guess on
            self.drafters[flight.drafter].landed(sequence, len(held), len(held) - leaf)
        if sequence.row in self.boarded:
            self.boarded[sequence.row] = (sequence, len(sequence.tokens))

    def _board(self, sequence: Sequence) -> None:
        known = self.boarded.get(sequence.row)
        if known is None or known[0] is not sequence or known[1] != len(sequence.tokens):
            self.state.board(sequence, self.table.entries[sequence.row])
            self.boarded[sequence.row] = (sequence, len(sequence.tokens))

    def _context(self, picks: list[Work]) -> int:
        """A length that no text of this round exceeds, in steps: what is on its way may have grown it."""
        longest = max(len(pick.sequence.tokens) for pick in picks) + (self.lag + 1) * (self.deepest + 1)
        return context_for(longest, self.state.width)

    def _shape(
        self, size: int, nodes: int, form: TreeShape, drafter: str, context: int, filtered: bool
    ) -> Shape:
        key = (size, nodes, form, drafter, context, filtered)
        if key not in self.shapes:
            self.shapes[key] = Shape(self, size, nodes, form, self.drafters.get(drafter), context, filtered)
        return self.shapes[key]


class Shape:
    """Rounds of one shape: inputs that always lie in the same place, and on a GPU the graph over them."""

    def __init__(
        self,
        rounds: Rounds,
        size: int,
        nodes: int,
        form: TreeShape,
        drafter: ChainDrafter | None,
        context: int,
        filtered: bool,
    ) -> None:
        self.rounds, self.size, self.nodes, self.drafter = rounds, size, nodes, drafter
        self.form, self.tree = form, Branches(tree_nodes(form))
        self.context, self.filtered = context, filtered
        self.cuda = rounds.device.type == "cuda"
        width = 2 + nodes + 1  # row, how many guesses, fresh slots
        self.host = torch.zeros(2, size, width, dtype=torch.int32, pin_memory=self.cuda)
        self.inputs = torch.zeros(size, width, dtype=torch.int32, device=rounds.device)
        told = nodes + 1 if drafter is None else 2 + 2 * form[0] + 1 + nodes
        self.results = torch.zeros(2, size, told, dtype=torch.int64, pin_memory=self.cuda)
        self.graph: Any = None
        self.output: Tensor | None = None
        self.turn = 0  # two sets of host buffers: one is read while the other is written

    def fill(self, rows: list[int], fresh: np.ndarray, wanted: list[int], spare: int, dummy: int) -> None:
        self.turn = 1 - self.turn
        host = self.host[self.turn].numpy()
        n = len(rows)
        host[:n, 0], host[:n, 1], host[:n, 2:] = rows, wanted, fresh
        host[n:, 0], host[n:, 1], host[n:, 2:] = spare, 0, dummy
        self.inputs.copy_(self.host[self.turn], non_blocking=True)

    def fly(self) -> tuple[Tensor, Timer]:
        if self.cuda and self.graph is None:
            self._capture()
        timer = Timer(self.cuda)
        if self.cuda:
            self.graph.replay()
            assert self.output is not None
            self.results[self.turn].copy_(self.output, non_blocking=True)
        else:
            self.results[self.turn].copy_(self._round())
        timer.stop()
        return self.results[self.turn], timer

    def _capture(self) -> None:
        """Warm up on padding alone, which changes nobody's state, then record."""
        given = self.inputs.clone()
        padding = self.rounds.state.rows, 0, self.rounds.dummy
        self.inputs[:, 0], self.inputs[:, 1], self.inputs[:, 2:] = padding
        self.graph, self.output = record(self._round, self.rounds.pool)  # they never run at the same time
        self.inputs.copy_(given)

    def _round(self) -> Tensor:
        self.rounds.state.filtered = self.filtered
        return self._plain() if self.drafter is None else self._guessed(self.drafter)

    def _plain(self) -> Tensor:
        """Pass after pass, a token each. [S, tokens emitted (n + 1)]."""
        state, rounds, passes = self.rounds.state, self.rounds, self.nodes + 1
        off = state.between.take_off(state, self.inputs)
        law = rounds.run, rounds.model, state, off.rows, off.lengths
        told = guess(*law, chain_levels(passes), passes, self.context)
        state.between.keep(state, off, told)
        return told

    def _guessed(self, drafter: ChainDrafter) -> Tensor:
        """Draft, run, judge, commit; as `Between.commit` tells."""
        state, tree, between = self.rounds.state, self.tree, self.rounds.state.between
        off = between.take_off(state, self.inputs)
        guesses, counts = self._draft(drafter, off.guessing, off.known)
        batch = between.lay(state, off.rows, off.lengths, tree.layout, guesses)
        logits = self.rounds.run(batch, self.nodes + 1, self.context, tree.branches)
        chosen = state.guesses(self.size, self.nodes + 1)
        between.draw(self.rounds.model, state, batch, logits, tree.columns, chosen)
        return between.commit(state, off, tree.shape.parents, tree.depth, guesses, counts, chosen)

    def _draft(self, drafter: ChainDrafter, rows: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor | None]:
        state = self.rounds.state
        if not self.tree.branches:
            return drafter.chain(state, rows, lengths, self.nodes, self.context)
        assert isinstance(drafter, TreeDrafter)
        return drafter.tree(state, rows, lengths, self.tree, self.context)


def _up(count: int) -> int:
    return next((size for size in SIZES if size >= count), count)
