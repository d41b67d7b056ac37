"""Drafters that try to make the engine wrong. They cannot: identity holds for any draft.

The audit runs them all:

    random        tokens drawn at random, as a tree
    wrong         never the right token
    oracle        always the right tokens, once it knows the answer
    ends          end-of-text inside every draft
    duplicates    the same token many times over
"""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq

from outrider.types import Draft, DraftPlan, Sequence, Verdict

Propose = Callable[[Sequence, DraftPlan], Draft]


class Adversary:
    def __init__(self, propose: Propose) -> None:
        self._propose = propose

    def start(self, sequence: Sequence) -> None:
        pass

    def propose(self, sequences: Seq[Sequence], draft_plans: Seq[DraftPlan]) -> list[Draft]:
        return [self._propose(s, draft_plan) for s, draft_plan in zip(sequences, draft_plans, strict=True)]

    def accept(self, sequence: Sequence, draft: Draft, verdict: Verdict) -> None:
        pass

    def stop(self, sequence: Sequence) -> None:
        pass


def adversaries(
    vocab: int, ends: Seq[int], answers: dict[tuple[int, ...], list[int]]
) -> dict[str, Adversary]:
    """All of them by name. `answers`, prompt to right answer, is what the oracle and the wrong one know."""
    dice = random.Random(0)
    end = ends[0] if ends else 0

    def right(s: Sequence, n: int) -> list[int]:
        answer = answers.get(s.request.prompt_ids, [])
        done = len(s.output)
        known = answer[done : done + n]
        return known + [dice.randrange(vocab) for _ in range(n - len(known))]

    def at_random(_: Sequence, draft_plan: DraftPlan) -> Draft:
        parents = tuple(dice.randrange(-1, i) for i in range(draft_plan.nodes))
        return Draft(tuple(dice.randrange(vocab) for _ in parents), parents)

    def with_ends(s: Sequence, draft_plan: DraftPlan) -> Draft:
        tokens = right(s, draft_plan.depth)
        tokens[dice.randrange(len(tokens))] = end
        return Draft.chain(tokens)

    def doubled(s: Sequence, draft_plan: DraftPlan) -> Draft:
        token = right(s, 1)[0]
        return Draft(
            (token,) * draft_plan.nodes, tuple((i - 1) // 2 if i else -1 for i in range(draft_plan.nodes))
        )

    return {
        "random": Adversary(at_random),
        "wrong": Adversary(
            lambda s, draft_plan: Draft.chain([(t + 1) % vocab for t in right(s, draft_plan.depth)])
        ),
        "oracle": Adversary(lambda s, draft_plan: Draft.chain(right(s, draft_plan.depth))),
        "ends": Adversary(with_ends),
        "duplicates": Adversary(doubled),
    }
