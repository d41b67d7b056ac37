"""`lm`: a smaller model of the target's family guesses.

It has a cache of its own and a valid length of its own: how much of a sequence's text its keys and values
cover. While it is not asked, that length stands still; when it is asked again it first reads what it
missed, in one pass, so its guesses after a pause are the guesses it would have made without one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.cache.pool import CacheFull
from outrider.cache.store import KeyValueStore
from outrider.cache.table import SlotTable
from outrider.draft.feed import Fed, node_batch, text_batch
from outrider.draft.tree import Growth, Place, grow
from outrider.model.decoder import Model
from outrider.types import MAX_NODES, NO_DRAFT, Batch, Bet, Draft, Sequence, Verdict


@dataclass(slots=True)
class State:
    row: int
    valid: int = 0  # tokens of the sequence this model has read
    fed: Fed | None = None  # the last guess, until it is judged


class LmDrafter:
    name = "lm"

    def __init__(
        self, model: Model, slots: int, sequences: int, context: int, vocab: int, step_rows: int = 256
    ) -> None:
        c = model.config
        self.model, self.context, self.step_rows = model, min(context, c.context), step_rows
        self.vocab = vocab  # the target's; ours may be padded differently
        self.store = KeyValueStore(c.layers, slots, c.kv_heads, c.head_dim)
        self.table = SlotTable(slots, sequences, self.context + MAX_NODES, reuse=False)
        self.states: OrderedDict[Sequence, State] = OrderedDict()  # least recently asked first

    def start(self, sequence: Sequence) -> None:
        pass

    def propose(self, sequences: Seq[Sequence], bets: Seq[Bet]) -> list[Draft]:
        drafts = [NO_DRAFT] * len(sequences)
        fitting = [i for i, s in enumerate(sequences) if self._can_read(s, bets[i])]
        if not fitting:
            return drafts
        try:
            some = [sequences[i] for i in fitting]
            states = self._states(some)
            roots = self._catch_up(some, states)
            growths = grow(
                some,
                [bets[i] for i in fitting],
                roots,
                lambda g, places: self._expand(some, states, g, places),
            )
        except CacheFull:  # too many long texts for this model's cache: no guess is better than a wrong one
            return drafts
        for i, state, growth in zip(fitting, states, growths, strict=True):
            drafts[i], kept = growth.harvest()
            assert state.fed is not None
            state.fed = _renumbered(state.fed, kept)
        return drafts

    def accept(self, sequence: Sequence, draft: Draft, verdict: Verdict) -> None:
        state = self.states.get(sequence)
        if state is None or state.fed is None:
            return
        kept = state.fed.kept(verdict.accepted) if draft else []
        self.table.commit(state.row, state.valid, kept)
        state.valid += len(kept)
        state.fed = None

    def stop(self, sequence: Sequence) -> None:
        if state := self.states.pop(sequence, None):
            self.table.release(state.row)

    def _can_read(self, sequence: Sequence, bet: Bet) -> bool:
        """Short enough, and free of tokens beyond this model's vocabulary."""
        read = self.states[sequence].valid if sequence in self.states else 0
        fits = len(sequence.tokens) + bet.depth < self.context
        return fits and max(sequence.tokens[read:], default=0) < self.model.config.vocab

    def _logits(self, batch: Batch) -> Tensor:
        """The model's logits over the target's vocabulary."""
        logits = self.model.forward(batch, self.store)[:, : self.vocab]
        missing = self.vocab - logits.shape[1]
        return F.pad(logits, (0, missing), value=float("-inf")) if missing else logits.contiguous()

    def _states(self, sequences: Seq[Sequence]) -> list[State]:
        """A row for each, taking those of the longest unasked if there are too few."""
        for sequence in sequences:
            if sequence in self.states:
                self.states.move_to_end(sequence)
                continue
            if not self.table.rows_left:
                self.stop(next(iter(self.states)))
            self.states[sequence] = State(self.table.open([])[0])
        return [self.states[s] for s in sequences]

    def _catch_up(self, sequences: Seq[Sequence], states: Seq[State]) -> Tensor:
        """Read what each text has gained since last time; the logits after its last token."""
        for s, state in zip(sequences, states, strict=True):
            state.valid = min(
                state.valid, len(s.tokens) - 1
            )  # the last token is always read: its logits are wanted
            self.table.commit(state.row, state.valid)  # an earlier guess may not have been judged
        logits: list[Tensor | None] = [None] * len(states)
        while waiting := [i for i, s in enumerate(sequences) if states[i].valid < len(s.tokens)]:
            budget, taken = self.step_rows, []
            for i in waiting:
                size = min(len(sequences[i].tokens) - states[i].valid, budget)
                if size:
                    self._extend(states[i].row, size, sequences)
                    taken.append((i, size))
                    budget -= size
            texts = [sequences[i].tokens[states[i].valid : states[i].valid + size] for i, size in taken]
            starts = [states[i].valid for i, _ in taken]
            out = self._logits(text_batch(self.table, [states[i].row for i, _ in taken], texts, starts))
            for (i, size), row in zip(taken, out, strict=True):
                states[i].valid += size
                logits[i] = row
        for state in states:
            state.fed = Fed(state.row, state.valid)
        return torch.stack([row for row in logits if row is not None])

    def _extend(self, row: int, n: int, asked: Seq[Sequence]) -> None:
        """Room at the end of a row, taken from sequences that are not being asked if need be."""
        while not self.table.make_room(n):
            idle = next((s for s in self.states if s not in asked), None)
            if idle is None:
                raise CacheFull("the draft model's cache is full")
            self.stop(idle)
        self.table.extend(row, n)

    def _expand(
        self, sequences: Seq[Sequence], states: Seq[State], growths: list[Growth], places: list[Place]
    ) -> Tensor:
        feds = []
        for i, node in places:
            fed = states[i].fed
            assert fed is not None
            self._extend(fed.row, 1, sequences)
            fed.add(node, growths[i].parents[node])
            feds.append(fed)
        tokens = [growths[i].tokens[node] for i, node in places]
        depths = [growths[i].depths[node] for i, node in places]
        batch = node_batch(self.table, feds, tokens, [node for _, node in places], depths)
        return self._logits(batch)


def _renumbered(fed: Fed, kept: list[int]) -> Fed:
    """The same entries under the numbers the draft's nodes have; nodes that were dropped are nobody's."""
    number = {node: i for i, node in enumerate(kept)}
    order = [number.get(node, -1 - node) for node in fed.order]
    return Fed(fed.row, fed.known, order, {number[n]: mask for n, mask in fed.masks.items() if n in number})
