"""`synthetic`: drafts that are right with given probabilities by depth, to try costs and settings without a model.

It copies the answer that the same request got before, which identity makes the true one, and spoils each token with
the chance that is left at its depth. A request that was never answered gets no draft: answer it plainly first.
Under `rejection` and `lossy` tokens are judged by their probability, so these rates do not hold there.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import replace

from outrider.draft.drafter import Drafter
from outrider.types import NO_DRAFT, Draft, DraftPlan, Sequence, Speculation

MAX_ANSWERS = 4096  # remembered, the oldest forgotten first

Question = tuple[tuple[int, ...], int, str]


class SyntheticDrafter(Drafter):
    def __init__(self, rates: Seq[float], vocab: int) -> None:
        """`rates` are the chances that a token is right if those before it are; deeper ones have the last."""
        self.rates, self.vocab = tuple(rates), vocab
        self.answers: OrderedDict[Question, list[int]] = OrderedDict()
        self.asked: dict[Sequence, Question] = {}

    def start(self, sequence: Sequence) -> None:
        self.asked[sequence] = _question(sequence)

    def propose(self, sequences: Seq[Sequence], draft_plans: Seq[DraftPlan]) -> list[Draft]:
        return [
            self._draft(sequence, draft_plan)
            for sequence, draft_plan in zip(sequences, draft_plans, strict=True)
        ]

    def stop(self, sequence: Sequence) -> None:
        question, answer = self.asked.pop(sequence), sequence.output
        if len(answer) > len(self.answers.get(question, ())):
            self.answers[question] = answer
            if len(self.answers) > MAX_ANSWERS:
                self.answers.popitem(last=False)

    def _draft(self, sequence: Sequence, draft_plan: DraftPlan) -> Draft:
        answer = self.answers.get(self.asked[sequence])
        if answer is None:
            return NO_DRAFT
        written = len(sequence.output)
        chance = random.Random(f"{sequence.seed} {written}")
        tokens = []
        for depth, token in enumerate(answer[written : written + min(draft_plan.depth, draft_plan.nodes)]):
            right = chance.random() < self.rates[min(depth, len(self.rates) - 1)]
            tokens.append(token if right else (token + chance.randrange(1, self.vocab)) % self.vocab)
        return Draft.chain(tokens)


def _question(sequence: Sequence) -> Question:
    """All that an answer depends on, apart from its length."""
    request = sequence.request
    asked = replace(request.params, speculation=Speculation(), max_tokens=1, min_tokens=0)
    return request.prompt_ids, sequence.seed, f"{asked} {sorted(request.stop_ids)}"
