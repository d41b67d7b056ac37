"""What drafters that take no pass would have got, had they been asked: they are scored on what was verified.

The text is gone through as drafts would have: each proposal begins behind the one before it, as far as that was right,
and behind the token that the target adds. One that may still turn out right further on waits for more tokens.
"""

from __future__ import annotations

from outrider.draft.drafters import Drafters
from outrider.types import DraftPlan, Outcome, Sequence

DEPTH = 4  # tokens of a proposal: for more, it stays open longer whether any was right


class Scores:
    def __init__(self, drafters: Drafters) -> None:
        self.drafters = drafters
        self.due: dict[Sequence, dict[str, int]] = {}  # by drafter: tokens before its next proposal

    def score(self, name: str, sequence: Sequence) -> Outcome | None:
        """The outcome of the drafter's next proposal; None while it is open. After a pause, that is a proposal whose
        tokens are all known.
        """
        tokens, known, due = sequence.tokens, len(sequence.tokens), self.due.setdefault(sequence, {})
        at = max(due.get(name, 0), known - DEPTH, sequence.prompt_len)
        if at >= known:
            return None
        proposed, right = self.drafters.shadow_propose(name, sequence, at, DEPTH), 0
        while right < min(len(proposed), known - at) and proposed[right] == tokens[at + right]:
            right += 1
        if right < len(proposed) and at + right == known:
            due[name] = at
            return None
        due[name] = at + right + 1
        return Outcome(sequence, DraftPlan(name), len(proposed), len(proposed), right, right)

    def stop(self, sequence: Sequence) -> None:
        self.due.pop(sequence, None)
