"""Rounds that stay on the device: draft, target pass, law, commit, with nothing for the host to wait for.

Sequence state (texts, lengths, slot tables, seeds) lives where the model does. A round is a fixed list of
tensor operations over it, so on a GPU it is captured once a shape as a graph and replayed. The host says who
takes part, gives each a few fresh slots, and reads what happened one round later, while the next one runs.

Only chains fly, and only for requests whose law needs nothing but a temperature; everything else takes the
packed path of runner.py. Both give the same bits: a chain's rows see exactly what plain rows would see.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.cache.store import KeyValueStore
from outrider.cache.table import SlotTable
from outrider.draft.chains import ChainDrafter, Pass, State, draw_at, rows_batch
from outrider.engine.scheduler import Pick
from outrider.model.decoder import Model
from outrider.types import NO_BET, NO_DRAFT, Bet, Draft, Sequence, Verdict

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)  # lengths that rounds are made for
DEEPEST = 8  # guesses a round may hold; longer chains are packed


@dataclass(slots=True)
class Flight:
    """A round on its way."""

    picks: list[Pick]
    bets: list[Bet]
    reasons: tuple[str, ...]
    nodes: int
    drafter: str
    result: Tensor  # [S, 2 + 2 n + 1] on the host, once `done`
    done: Any  # a CUDA event, or None
    rows: list[int]
    begun: float

    def holds(self, i: int) -> bool:
        """Whether a pick still is what it was: not ended, not preempted."""
        sequence = self.picks[i].sequence
        return sequence.finish_reason is None and sequence.row == self.rows[i]

    def land(self) -> tuple[list[Draft], list[Verdict]]:
        """What the target said; waits for the device."""
        if self.done is not None:
            self.done.synchronize()
        drafts, verdicts = [], []
        n = self.nodes
        for accepted, count, *rest in self.result[: len(self.picks)].tolist():
            drafts.append(Draft.chain(rest[n + 1 : n + 1 + count]) if count else NO_DRAFT)
            verdicts.append(Verdict(rest[: accepted + 1], list(range(accepted))))
        return drafts, verdicts


class Rounds:
    def __init__(
        self,
        model: Model,
        store: KeyValueStore,
        table: SlotTable,
        device: torch.device,
        run: Pass,
        lag: int = 1,
    ) -> None:
        """`run` is the target's pass over rows that lie on the device."""
        self.model, self.store, self.table, self.device, self.run = model, store, table, device, run
        rows, width = table.tensor.shape
        self.state = State(rows, width, device)
        self.drafters: dict[str, ChainDrafter] = {}
        self.lag, self.deepest = lag, DEEPEST
        # By row: who is there, and how many tokens are known.
        self.boarded: dict[int, tuple[Sequence, int]] = {}
        self.dummy = store.slots
        self.shapes: dict[tuple[int, int, str, int], Shape] = {}

    def takes(self, sequence: Sequence, default: str) -> bool:
        """Whether this request's law needs nothing but a temperature, and its guesses are chains made here."""
        request = sequence.request
        p, how = request.params, request.params.speculation
        plain = p.top_k == 0 and p.top_p == 1.0 and p.min_p == 0.0 and p.logprobs is None
        if not plain or request.edits_logits or how.mode != "coupled":
            return False
        if request.prediction_ids and not how.off:
            return False  # only the host's lookup follows a prediction
        chain = how.tree is None and how.nodes in (None, how.depth) and (how.depth or 0) <= self.deepest
        return how.off or (chain and (how.drafter or default) in ("none", *self.drafters))

    def fitted(self, bets: Seq[Bet]) -> list[Bet]:
        """The same bets as chains. A round has one drafter, the one most asked for; others are plain in it."""
        asked = Counter(bet.drafter for bet in bets if bet.nodes)
        ((chosen, _),) = asked.most_common(1) or [("none", 0)]
        depths = [min(bet.depth, self.deepest) if bet.nodes else 0 for bet in bets]
        return [
            replace(bet, nodes=depth, depth=depth) if bet.drafter == chosen else NO_BET
            for bet, depth in zip(bets, depths, strict=True)
        ]

    def lacking(self, sequences: list[Sequence], bets: list[Bet]) -> list[Sequence]:
        """Whose drafter must read on before it can guess."""
        return [
            s
            for s, bet in zip(sequences, bets, strict=True)
            if bet.nodes and self.drafters[bet.drafter].lacks(s)
        ]

    def catch_up(self, sequences: list[Sequence], drafter: str) -> None:
        """With nothing on its way: bring rows up to date and let the drafter read."""
        for sequence in sequences:
            self._board(sequence)
        self.drafters[drafter].catch_up(self.state, sequences)

    def launch(self, picks: list[Pick], bets: list[Bet], reasons: tuple[str, ...]) -> Flight:
        """Start a round. Each pick's row already ends with one slot and one more for every node of the round."""
        nodes = max((bet.nodes for bet in bets), default=0)
        names = {bet.drafter for bet in bets if bet.nodes}
        drafter = names.pop() if names else "none"
        shape = self._shape(_up(len(picks)), nodes, drafter, self._context(picks))
        rows = [pick.sequence.row for pick in picks]
        for pick in picks:
            self._board(pick.sequence)
        shape.fill(rows, self._fresh(rows, nodes), [bet.nodes for bet in bets], self.state.rows, self.dummy)
        result, done = shape.fly()
        return Flight(picks, bets, reasons, nodes, drafter, result, done, rows, time.perf_counter())

    def landed(self, sequence: Sequence, flight: Flight, verdict: Verdict) -> None:
        """The host now knows what the device knew already."""
        if flight.drafter in self.drafters:
            self.drafters[flight.drafter].landed(sequence, flight.nodes, len(verdict.accepted))
        if sequence.row in self.boarded:
            self.boarded[sequence.row] = (sequence, len(sequence.tokens))

    def _board(self, sequence: Sequence) -> None:
        known = self.boarded.get(sequence.row)
        if known is None or known[0] is not sequence or known[1] != len(sequence.tokens):
            self.state.board(sequence, self.table.entries[sequence.row])
            self.boarded[sequence.row] = (sequence, len(sequence.tokens))

    def _fresh(self, rows: list[int], nodes: int) -> np.ndarray:
        """The last slots of each row."""
        ends = self.table.lengths[rows]
        return self.table.entries[np.array(rows)[:, None], ends[:, None] - nodes - 1 + np.arange(nodes + 1)]

    def _context(self, picks: list[Pick]) -> int:
        """A length that no text of this round exceeds, in steps: what is on its way may have grown it."""
        longest = max(len(pick.sequence.tokens) for pick in picks) + (self.lag + 1) * (self.deepest + 1)
        return min(next((c for c in CONTEXTS if c >= longest), self.state.width), self.state.width)

    def _shape(self, size: int, nodes: int, drafter: str, context: int) -> Shape:
        key = (size, nodes, drafter, context)
        if key not in self.shapes:
            self.shapes[key] = Shape(self, size, nodes, self.drafters.get(drafter), context)
        return self.shapes[key]


class Shape:
    """Rounds of one shape: inputs that always lie in the same place, and on a GPU the graph over them."""

    def __init__(
        self, rounds: Rounds, size: int, nodes: int, drafter: ChainDrafter | None, context: int
    ) -> None:
        self.rounds, self.size, self.nodes, self.drafter = rounds, size, nodes, drafter
        self.context = context
        self.cuda = rounds.device.type == "cuda"
        width = 2 + nodes + 1  # row, how many guesses, fresh slots
        self.host = torch.zeros(2, size, width, dtype=torch.int32, pin_memory=self.cuda)
        self.inputs = torch.zeros(size, width, dtype=torch.int32, device=rounds.device)
        self.results = torch.zeros(2, size, 2 + 2 * nodes + 1, dtype=torch.int64, pin_memory=self.cuda)
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

    def fly(self) -> tuple[Tensor, Any]:
        if not self.cuda:
            self.results[self.turn].copy_(self._round())
            return self.results[self.turn], None
        if self.graph is None:
            self._capture()
        self.graph.replay()
        assert self.output is not None
        self.results[self.turn].copy_(self.output, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return self.results[self.turn], done

    def _capture(self) -> None:
        """Warm up on padding alone, which changes nobody's state, then record."""
        given = self.inputs.clone()
        self.inputs[:, 0], self.inputs[:, 1], self.inputs[:, 2:] = (
            self.rounds.state.rows,
            0,
            self.rounds.dummy,
        )
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._round()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.output = self._round()
        self.inputs.copy_(given)

    def _round(self) -> Tensor:
        """Draft, run, judge, commit. [S, accepted, guessed, tokens emitted (n + 1), guesses (n)]."""
        state, n = self.rounds.state, self.nodes
        rows, wanted, fresh = self.inputs[:, 0].long(), self.inputs[:, 1].long(), self.inputs[:, 2:]
        lengths = state.lengths[rows]
        step = torch.arange(n + 1, device=rows.device)
        at = lengths[:, None] + step  # [S, n + 1] positions of the rows
        ids = state.tokens[rows, lengths][:, None]
        state.table[rows[:, None], at] = fresh
        guesses, count = ids[:, :0], torch.zeros_like(wanted)
        if n and self.drafter is not None:
            guesses, count = self.drafter.chain(state, rows, lengths, n, self.context)
            count = torch.minimum(count, wanted)
            ids = torch.cat([ids, guesses], dim=1)
        meant = step <= count[:, None]
        chosen = self._law(ids, at, torch.where(meant, fresh, self.rounds.dummy), rows)
        held = (chosen[:, :n] == guesses) & meant[:, 1:]
        accepted = held.long().cumprod(1).sum(1)
        state.tokens[rows[:, None], at + 1] = chosen
        grown = lengths + accepted + 1
        state.lengths[rows] = torch.where(rows == state.rows, 0, grown)  # padding must not grow
        return torch.cat([accepted[:, None], count[:, None], chosen, guesses], dim=1)

    def _law(self, ids: Tensor, at: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
        """One pass of the target over all rows, and what the law says at each."""
        state = self.rounds.state
        batch = rows_batch(state, rows, ids, at, slots)
        logits = self.rounds.run(batch, self.nodes + 1, self.context)
        owners = rows.repeat_interleave(self.nodes + 1)
        return draw_at(self.rounds.model, state, owners, logits, at.flatten() + 1).view(at.shape)


def _up(count: int) -> int:
    return next((size for size in SIZES if size >= count), count)
