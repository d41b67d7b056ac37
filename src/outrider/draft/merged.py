"""Several drafters as one: their guesses share a tree, and where they agree they share nodes."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

from outrider.draft.drafter import Drafter
from outrider.types import MAX_NODES, Bet, Draft, Sequence, Verdict


class MergedDrafter:
    """The first drafter's nodes come first; the others fill what the bet has left.

    Draft probabilities are not kept: a node may come from two distributions. Under `rejection` its guesses
    count as given, which is exact, if less often accepted.
    """

    def __init__(self, drafters: Seq[Drafter]) -> None:
        self.drafters = drafters
        self._given: dict[Sequence, list[tuple[Draft, dict[int, int]]]] = {}

    def start(self, sequence: Sequence) -> None:
        pass  # each of them is started and stopped on its own

    def propose(self, sequences: Seq[Sequence], bets: Seq[Bet]) -> list[Draft]:
        each = [drafter.propose(sequences, bets) for drafter in self.drafters]
        merged = []
        for i, sequence in enumerate(sequences):
            draft, numbers = merge_drafts([drafts[i] for drafts in each], min(bets[i].nodes, MAX_NODES))
            self._given[sequence] = list(zip([drafts[i] for drafts in each], numbers, strict=True))
            merged.append(draft)
        return merged

    def accept(self, sequence: Sequence, draft: Draft, verdict: Verdict) -> None:
        """Tell each drafter what became of its own nodes, by its own numbers."""
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
