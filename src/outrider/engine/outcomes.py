"""What became of a draft, from the verdict on it."""

from __future__ import annotations

from outrider.types import Draft, DraftPlan, Origin, Outcome, Sequence, Verdict


def deepest(draft: Draft) -> int:
    return max(draft.depths) if draft else 0


def outcome_of(sequence: Sequence, draft_plan: DraftPlan, draft: Draft, verdict: Verdict) -> Outcome:
    accepted, top1_accepted = verdict.accepted, 0
    while top1_accepted < len(accepted) and draft.rank(accepted[top1_accepted]) == 0:
        top1_accepted += 1
    return Outcome(sequence, draft_plan, len(draft), deepest(draft), len(accepted), top1_accepted)


def origins_of(draft: Draft, verdict: Verdict) -> list[Origin]:
    """Where each token came from: an accepted draft token, one recovered from the target, or its bonus at the end."""
    if not draft.tokens:
        return ["plain"] * len(verdict.tokens)
    last = verdict.accepted[-1] if verdict.accepted else -1
    ending: Origin = "recovered" if last in draft.parents else "bonus"
    accepted: list[Origin] = ["accepted"] * len(verdict.accepted)
    return [*accepted, ending]
