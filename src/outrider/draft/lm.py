"""`lm`: a smaller model of the target's family guesses.

It has a cache of its own and a valid length of its own: how much of a sequence's text its keys and values
cover. While it is not asked, that length stands still; when it is asked again it first reads what it
missed, in one pass, so its guesses after a pause are the guesses it would have made without one.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.cache.pool import CacheFull
from outrider.draft.feed import Fed, feed_nodes, text_batch
from outrider.draft.own import OwnCache, State
from outrider.draft.tree import Growth, Place, grow
from outrider.model.decoder import Model, make_store
from outrider.types import MAX_NODES, NO_DRAFT, Batch, Bet, Draft, Sequence, Verdict


class LmDrafter:
    def __init__(
        self, model: Model, slots: int, sequences: int, context: int, vocab: int, step_rows: int = 256
    ) -> None:
        c = model.config
        self.model, self.context, self.step_rows = model, min(context, c.context), step_rows
        self.vocab = vocab  # the target's; ours may be padded differently
        self.store = make_store(model, slots)
        self.own = OwnCache(slots, sequences, self.context + MAX_NODES)
        self.table, self.states = self.own.table, self.own.states

    def start(self, sequence: Sequence) -> None:
        pass

    def propose(self, sequences: Seq[Sequence], bets: Seq[Bet]) -> list[Draft]:
        drafts = [NO_DRAFT] * len(sequences)
        fitting = [i for i, s in enumerate(sequences) if self._can_read(s, bets[i])]
        if not fitting:
            return drafts
        try:
            some = [sequences[i] for i in fitting]
            states = self.own.ask(some)
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
        self.own.stop(sequence)

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

    def _catch_up(self, sequences: Seq[Sequence], states: Seq[State]) -> Tensor:
        """Read what each text has gained since last time; the logits after its last token."""
        for s, state in zip(sequences, states, strict=True):
            # The last token is always read: its logits are wanted.
            state.valid = min(state.valid, len(s.tokens) - 1)
            self.table.commit(state.row, state.valid)  # an earlier guess may not have been judged
        logits: list[Tensor | None] = [None] * len(states)
        while waiting := [i for i, s in enumerate(sequences) if states[i].valid < len(s.tokens)]:
            budget, taken = self.step_rows, []
            for i in waiting:
                size = min(len(sequences[i].tokens) - states[i].valid, budget)
                if size:
                    self.own.extend(states[i].row, size, sequences)
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

    def _expand(
        self, sequences: Seq[Sequence], states: Seq[State], growths: list[Growth], places: list[Place]
    ) -> Tensor:
        feds = [state.fed for state in states if state.fed is not None]
        return self._logits(
            feed_nodes(self.table, lambda row: self.own.extend(row, 1, sequences), feds, growths, places)
        )


def _renumbered(fed: Fed, kept: list[int]) -> Fed:
    """The same entries under the numbers the draft's nodes have; nodes that were dropped are nobody's."""
    number = {node: i for i, node in enumerate(kept)}
    order = [number.get(node, -1 - node) for node in fed.order]
    return Fed(fed.row, fed.known, order, {number[n]: mask for n, mask in fed.masks.items() if n in number})
