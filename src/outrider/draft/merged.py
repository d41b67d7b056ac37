"""Several drafters as one: their drafts share a tree, and where they agree they share nodes."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from outrider.cache.pool import CacheFull, Slots
from outrider.cache.table import SlotTable
from outrider.draft.drafter import Drafter
from outrider.types import MAX_NODES, NO_DRAFT, Draft, DraftPlan, Sequence, Verdict


class MergedDrafter(Drafter):
    """The first drafter's nodes come first; the others fill what is left of the plan. Each is started and stopped by
    itself.

    Draft probabilities are not kept: a node may come from two distributions. Under `rejection` its tokens
    count as given, which is exact, if less often accepted.
    """

    def __init__(self, drafters: Mapping[str, Drafter], table: SlotTable) -> None:
        self.names, self.drafters, self.table = tuple(drafters), tuple(drafters.values()), table
        self._given: dict[Sequence, list[tuple[Draft, dict[int, int]]]] = {}

    def propose(self, sequences: Seq[Sequence], draft_plans: Seq[DraftPlan]) -> list[Draft]:
        each, slots = self._ask(sequences, draft_plans)
        merged = []
        for i, sequence in enumerate(sequences):
            given = [drafts[i] for drafts in each]
            draft, numbers = merge_drafts(given, min(draft_plans[i].nodes, MAX_NODES))
            self._given[sequence] = list(zip(given, numbers, strict=True))
            try:
                self._attach(sequence, len(draft), numbers, [left[i] for left in slots])
            except CacheFull:
                draft = NO_DRAFT
            merged.append(draft)
        return merged

    def _ask(
        self, sequences: Seq[Sequence], draft_plans: Seq[DraftPlan]
    ) -> tuple[list[list[Draft]], list[list[Slots]]]:
        """What each drafter proposes for each sequence, and the slots that it leaves; the next one finds none."""
        known = [int(self.table.lengths[sequence.row]) for sequence in sequences]
        each: list[list[Draft]] = []
        slots: list[list[Slots]] = []
        try:
            for drafter in self.drafters:
                each.append(drafter.propose(sequences, draft_plans))
                slots.append([self.table.detach(s.row, n) for s, n in zip(sequences, known, strict=True)])
        except Exception:
            for one in (one for left in slots for one in left):
                self.table.pool.drop(one)
            raise
        return each, slots

    def _attach(
        self, sequence: Sequence, nodes: int, numbers: list[dict[int, int]], slots: list[Slots]
    ) -> None:
        """Every merged node gets the slot that the first of its drafters left for it, if one did."""
        firsts = np.cumsum([0, *map(len, slots)])
        order = [-1] * nodes
        for first, own, left in reversed(list(zip(firsts, numbers, slots, strict=False))):
            for merged, node in own.items():
                if node < len(left):
                    order[merged] = int(first) + node
        while order and order[-1] < 0:
            order.pop()
        self.table.attach(sequence.row, np.concatenate(slots), order)

    def accept(self, sequence: Sequence, draft: Draft, verdict: Verdict) -> None:
        """Each drafter learns what became of its own nodes, by its own numbers."""
        given = self._given.pop(sequence, [(draft, {})] * len(self.drafters))
        for drafter, (own, numbers) in zip(self.drafters, given, strict=True):
            path = []
            for node in verdict.accepted:
                if node not in numbers:
                    break
                path.append(numbers[node])
            drafter.accept(sequence, own, replace(verdict, accepted=path))

    def stop(self, sequence: Sequence) -> None:
        self._given.pop(sequence, None)


def merge_drafts(drafts: Seq[Draft], nodes: int) -> tuple[Draft, list[dict[int, int]]]:
    """One tree of several, and for each the numbers its nodes had: merged node -> own node."""
    tokens: list[int] = []
    parents: list[int] = []
    children: dict[tuple[int, int], int] = {}
    numbers: list[dict[int, int]] = []
    for draft in drafts:
        place: dict[int, int] = {-1: -1}
        for own, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            if parent not in place:
                continue
            key = (place[parent], token)
            if key not in children:
                if len(tokens) >= nodes:
                    continue
                children[key] = len(tokens)
                tokens.append(token)
                parents.append(place[parent])
            place[own] = children[key]
        numbers.append({merged: own for own, merged in place.items() if own >= 0})
    return Draft(tuple(tokens), tuple(parents)), numbers
