"""A slot table and sequences in it, moved as a runner moves them: for drafters without an engine."""

from __future__ import annotations

from outrider.cache.table import SlotTable
from outrider.types import MAX_NODES, Draft, Sequence, Verdict
from tests.tiny import sequence


class Rows:
    def __init__(self, slots: int = 4000, rows: int = 32, context: int = 256) -> None:
        self.table = SlotTable(slots, rows, context + MAX_NODES, reuse=False)

    def add(self, tokens, **options) -> Sequence:
        """A sequence of which all but the last token is cached, and that token has its slot."""
        one = sequence(list(tokens), **options)
        self.resume(one)
        return one

    def resume(self, one: Sequence) -> None:
        one.row, _ = self.table.open([])
        one.cached = len(one.tokens) - 1
        self.table.extend(one.row, len(one.tokens))

    def preempt(self, one: Sequence) -> None:
        self.table.release(one.row)
        one.row, one.released, one.cached = -1, one.released + 1, 0

    def branch(self, one: Sequence, shared: int) -> Sequence:
        """Another sequence over its first tokens, and one of its own after them."""
        twin = sequence(one.tokens[: shared + 1])
        twin.row, twin.cached = self.table.branch(one.row), shared
        self.table.commit(twin.row, shared)
        self.table.extend(twin.row, 1)
        return twin

    def propose(self, drafter, sequences, draft_plans) -> list[Draft]:
        """Drafts, with slots for all their nodes; those that the drafter left stay where they are."""
        drafts = drafter.propose(sequences, draft_plans)
        for one, draft in zip(sequences, drafts, strict=True):
            left = int(self.table.lengths[one.row]) - len(one.tokens)
            assert 0 <= left <= len(draft)
            self.table.extend(one.row, len(draft) - left)
        self.table.check()
        return drafts

    def settle(self, drafter, one: Sequence, draft: Draft, accepted: list[int], after: int) -> None:
        """What an engine does with a verdict."""
        tokens = [*(draft.tokens[n] for n in accepted), after]
        self.table.commit(one.row, len(one.tokens), accepted)
        one.tokens += tokens
        one.cached = len(one.tokens) - 1
        if drafter is not None:
            drafter.accept(one, draft, Verdict(tokens, accepted))
        self.table.extend(one.row, 1)
        self.table.check()
