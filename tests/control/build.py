"""Builders for tests of the planner: sequences at work, what a runner offers, step records, measured costs."""

from __future__ import annotations

from outrider.control.planner import Planner
from outrider.types import (
    NO_DRAFT_PLAN,
    NO_TREE,
    CapturedShape,
    DraftPlan,
    Options,
    Outcome,
    Plan,
    Sequence,
    StepRecord,
    TreeShape,
    Work,
)
from tests.tiny import sequence

CHAINS = tuple(TreeShape(depth, depth) for depth in (1, 2, 4, 8))
EVERY_DEPTH = tuple(TreeShape(n, n) for n in range(1, 9))
KINDS = "persistent", "packed"


def decoding(written: int = 1, **params) -> Sequence:
    """A sequence that decodes, after a prompt of one token."""
    made = sequence([1] * (1 + written), prompt=1, **{"max_tokens": 1000, **params})
    made.cached = len(made.tokens) - 1
    return made


def work_of(*sequences: Sequence) -> list[Work]:
    return [Work(one, 1) for one in sequences]


def prompt(known: int = 16, tokens: int = 64) -> Work:
    """A chunk of a prompt."""
    return Work(sequence([1] * tokens), known)


def packed(**more) -> Options:
    return Options(**more)


def persistent(work: list[Work], trees=CHAINS, leads=("lm",), size: int | None = None, **more) -> Options:
    """All that decode are in the persistent batch."""
    here = tuple(one.emits and one.known == 1 for one in work)
    by_lead = dict.fromkeys(leads, tuple(trees))
    given = {"trees": by_lead, "chains": by_lead, "after_prompts": False, **more}
    return Options(sum(here) if size is None else size, here, here, **given)


def options_of(kind: str, work: list[Work], **more) -> Options:
    return persistent(work, **more) if kind == "persistent" else packed(**more)


def planner_of(row: float = 0.02, level: float = 0.0, names=("lm",), sizes=range(1, 33), **more) -> Planner:
    """A draft row adds `row` of a plain step, and a level of `lm`'s drafts `level`, in steps of both kinds."""
    made = Planner(names[0], choices=tuple(names), **more)
    made.costs.eager.by_rows = {n: 1 + row * (n - 1) for n in range(1, 400)}
    made.costs.eager.per_level = {"lm": level}
    for name in names:
        own = level if name == "lm" else 0.0
        for size in sizes:
            trees = (*EVERY_DEPTH, TreeShape(2, 6), TreeShape(3, 15))
            known = [
                (name, tree, plain(size, row) + row * size * tree.nodes + own * tree.depth) for tree in trees
            ]
            made.costs.captured.learn(name, size, [("none", NO_TREE, plain(size, row)), *known])
    return made


def plain(size: int, row: float) -> float:
    return 1 + row * (size - 1)


def achieves(
    planner: Planner, one: Sequence, drafter: str, first: float, following: float | None = None
) -> None:
    """Long observed: these acceptance rates, and drafts of any depth."""
    rate = planner.rates.of(one, drafter)
    rate.first, rate.next = first, first if following is None else following
    rate.whole, rate.weight, rate.whole_weight = first, 12.0, 12.0
    rate.earned, rate.proven, rate.after = 60, True, None


def kinds(plan: Plan) -> list[str]:
    return [reason.kind for reason in plan.reasons]


def depths(plan: Plan) -> list[int]:
    return [one.depth for one in plan.draft_plans]


def outcome(
    one: Sequence, drafter: str = "lm", drafted: int = 0, accepted: int = 0, planned: int | None = None
) -> Outcome:
    """Of a chain. `planned`: its depth, where less was drafted."""
    depth = drafted if planned is None else planned
    plan = DraftPlan(drafter, depth, depth) if depth else NO_DRAFT_PLAN
    return Outcome(one, plan, drafted, drafted, accepted, accepted)


def record(
    *outcomes: Outcome, seconds: float = 1.0, tree: TreeShape | None = None, lead: str = "lm", **more
) -> StepRecord:
    """A decode step. `tree`: captured with it; `NO_TREE` is a captured plain step."""
    count = more.pop("sequences", max(len(outcomes), 1))
    drafted, accepted = sum(o.drafted for o in outcomes), sum(o.accepted for o in outcomes)
    given = dict(
        rows=count + drafted, sequences=count, known=count, drafted=drafted, accepted=accepted,
        emitted=count + accepted, plan_s=0.0, draft_s=0.0, verify_s=0.0, total_s=seconds, target_s=seconds,
        outcomes=list(outcomes), waited_s=seconds,
    )  # fmt: skip
    if tree is not None:
        given["captured"] = CapturedShape("none" if tree == NO_TREE else lead, tree, more.pop("size", count))
    return StepRecord(**{**given, **more})
