"""What became of a draft, from the verdict on it."""

from __future__ import annotations

from outrider.types import Bet, Draft, Origin, Outcome, Sequence, Verdict


def deepest(draft: Draft) -> int:
    return max(draft.depths) if draft else 0


def outcome_of(sequence: Sequence, bet: Bet, draft: Draft, verdict: Verdict) -> Outcome:
    accepted, straight = verdict.accepted, 0
    while straight < len(accepted) and draft.rank(accepted[straight]) == 0:
        straight += 1
    return Outcome(sequence, bet, len(draft), deepest(draft), len(accepted), straight)


def origins_of(draft: Draft, verdict: Verdict) -> list[Origin]:
    """Where each token came from: an accepted draft token, one recovered from the target, or its bonus at the end."""
    if not draft.tokens:
        return ["plain"] * len(verdict.tokens)
    last = verdict.accepted[-1] if verdict.accepted else -1
    ending: Origin = "recovered" if last in draft.parents else "bonus"
    accepted: list[Origin] = ["accepted"] * len(verdict.accepted)
    return [*accepted, ending]
