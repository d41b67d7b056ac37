"""Candidates: the drafts that a group of sequences could have in a step, with their expected tokens and seconds.

The persistent batch shares one draft tree, so its candidates are the captured trees (`shared_trees`). Host-packed
sequences have a depth each, so theirs are the draft nodes by descending survival, one more at a time (`own_chains`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from copy import copy
from dataclasses import dataclass
from itertools import chain
from math import prod
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.control.acceptance import AcceptanceRate, AcceptanceRates, caution
from outrider.control.costs import CapturedCosts, EagerCosts
from outrider.control.guards import MARGIN, SECOND
from outrider.types import (
    MAX_NODES,
    NO_DRAFT_PLAN,
    NO_TREE,
    CapturedShape,
    DraftPlan,
    Options,
    Sequence,
    TreeShape,
    Work,
)

Floats = NDArray[np.float64]
ASKED_DEPTH = 4  # of a draft for which a request fixed the number of nodes alone
NOT_ALLOWED = AcceptanceRate(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences that are planned together. Others wait for the step and gain nothing: `delayed` prompts, and `settled`
    sequences that decode without these drafts.
    """

    places: list[int]  # in the work of the step
    sequences: list[Sequence]
    allowed: list[tuple[str, ...]]  # drafters that each may get
    tokens_left: Seq[float]  # expected of each answer
    late: NDArray[np.bool_]  # its time per token is at its bound
    delayed: int
    settled: int
    settled_late: bool  # one of those is at its bound
    # Seconds of the step that accepted tokens save a part of: a plain step. For host-packed sequences beside prompt
    # rows it is the average of recent steps, because later steps may read prompts, too.
    plain: float
    each: Seq[int] = ()  # rows of each piece of work of a host-packed step without these drafts

    def with_nodes(self, item: int, nodes: int) -> list[int]:
        """`each`, with a draft of this many nodes for one of its sequences."""
        place = self.places[item]
        return [rows + nodes * (i == place) for i, rows in enumerate(self.each)]

    def by_place(self, values: Seq[int] | None) -> Floats:
        return np.array([values[i] for i in self.places] if values else [0] * len(self.places), np.float64)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Arrays are by candidate; `gains` [candidates, sequences] are expected accepted tokens."""

    lead: str
    gains: Floats
    seconds: Floats
    caution: Floats  # tokens of a sequence to subtract: sequences differ
    trees: Seq[TreeShape] = ()  # of a shared tree, by candidate
    names: Seq[str] = ()  # of its drafters
    assigned: NDArray[np.int64] | None = None  # [sequences, candidates]: which of those drafts; -1: none
    nodes: Seq[tuple[int, int]] = ()  # of own chains: sequence and level, by candidate
    drafters: Seq[str] = ()  # of own chains, by sequence

    def chosen(self, at: int) -> list[DraftPlan]:
        """A draft plan for each sequence of the group."""
        if self.assigned is not None:
            tree = self.trees[at]
            plans = [*(DraftPlan(name, tree.nodes, tree.depth) for name in self.names), NO_DRAFT_PLAN]
            return [plans[drafter] for drafter in self.assigned[:, at].tolist()]
        depth, count = [0] * len(self.drafters), [0] * len(self.drafters)
        for item, level in self.nodes[:at]:
            depth[item], count[item] = max(depth[item], level), count[item] + 1
        return [
            DraftPlan(name, n, d) if n else NO_DRAFT_PLAN
            for name, n, d in zip(self.drafters, count, depth, strict=True)
        ]


class Estimates:
    """Acceptance of each sequence (first axis) with each drafter (second axis)."""

    def __init__(self, rates: AcceptanceRates, group: Group, names: Seq[str]) -> None:
        self.names = names
        each = [
            (one, rates.by_sequence.get(one, {}), some)
            for one, some in zip(group.sequences, group.allowed, strict=True)
        ]
        self.rates = [
            [(own.get(name) or rates.of(one, name)) if name in some else NOT_ALLOWED for name in names]
            for one, own, some in each
        ]
        numbers = [(r.first, r.next, r.whole, r.whole_weight, r.idle) for own in self.rates for r in own]
        table = np.fromiter(chain.from_iterable(numbers), np.float64).reshape(-1, len(names), 5)
        self.first, self.next, self.whole, self.weight, idle = np.moveaxis(table, 2, 0)
        self.allowed = np.array([[name in some for name in names] for _, _, some in each])
        # A sequence keeps its drafter unless another one is clearly better.
        self.preference = np.where(idle == 0, 1 + MARGIN, 1.0)

    def of_chains(self, depths: Floats) -> Floats:
        """Expected accepted tokens of chains; `depths` has one more axis than `first`, or broadcasts to that."""
        first, following = self.first[:, :, None], np.minimum(self.next, 1 - 1e-9)[:, :, None]
        return first * (1 - following**depths) / (1 - following)

    def only(self, names: Seq[str]) -> Estimates:
        """Of these drafters alone."""
        if tuple(names) == tuple(self.names):
            return self
        some = copy(self)
        at = [self.names.index(name) for name in names]
        some.names, some.rates = names, [[own[i] for i in at] for own in self.rates]
        for part in ("first", "next", "whole", "weight", "allowed", "preference"):
            setattr(some, part, getattr(self, part)[:, at])
        return some


def shared_trees(
    lead: str,
    trees: Seq[TreeShape],
    group: Group,
    rates: AcceptanceRates,
    every: Estimates,
    costs: CapturedCosts,
    options: Options,
    begins: bool = False,
) -> Candidates:
    """One tree for all. In a chain model-free drafters may draft for some sequences; a wider tree is the lead's.

    If drafting `begins` with this step, prefill counts twice: half of the answers is written before all are prefilled.
    """
    others = [name for name in options.model_free if name != lead and name in every.names]
    estimates = every.only((lead, *others))
    accepted = estimates.of_chains(np.array([tree.depth for tree in trees], np.float64))
    usable = np.broadcast_to(estimates.allowed[:, :, None], accepted.shape).copy()
    for column, tree in enumerate(trees):
        if not tree.is_chain:
            accepted[:, 0, column] = [own[0].accepted(tree) for own in estimates.rates]
            usable[:, 1:, column] = False
    lag = group.by_place(options.lag.get(lead))
    prefill = costs.prefill(lead, 1) * lag[:, None] * (2 if begins else 1)
    steps, earned = _earns_prefill(group, rates, lead, accepted[:, 0], prefill)
    usable[:, 0] &= earned
    worth = np.where(usable, accepted * estimates.preference[:, :, None], -1.0)
    chosen = worth.argmax(1)  # [sequences, trees]
    rows, columns = np.arange(len(group.sequences))[:, None], np.arange(len(trees))
    served = usable[rows, chosen, columns]
    gains = np.where(served, accepted[rows, chosen, columns], 0.0)
    first, whole, weight = (one[rows, chosen] for one in (estimates.first, estimates.whole, estimates.weight))
    spread = caution(gains, first, whole, weight, served) * served.sum(0)
    shapes = [CapturedShape(lead, tree, options.size) for tree in trees]
    seconds = group.plain * np.array([costs.ratio(shape) for shape in shapes])
    seconds += np.where(served & (chosen == 0), prefill / np.maximum(steps, 1.0), 0.0).sum(0)
    assigned = np.where(served, chosen, -1)
    return Candidates(lead, gains.T, seconds, spread, trees, estimates.names, assigned)


def nothing_found(options: Options, places: Seq[int], allowed: Seq[tuple[str, ...]]) -> bool:
    """Whether host-packed sequences may have drafts of model-free drafters alone, and none of these has anything."""
    free = set(options.model_free)
    return all(map(free.issuperset, allowed)) and not any(
        some[i] for some in options.available.values() for i in places
    )


class OwnDraft(NamedTuple):
    """The draft that a host-packed sequence could have."""

    drafter: str
    rate: AcceptanceRate
    depth: int  # at most
    delay: float  # seconds of its drafter's prefill, spread over the steps that are left
    branches: bool


def own_chains(
    lead: str,
    others: Seq[str],
    group: Group,
    rates: AcceptanceRates,
    costs: EagerCosts,
    options: Options,
    max_depth: int,
) -> Candidates | None:
    """A draft for each, of `lead` or of `others`; None where there is nothing to draft. Nodes are added by descending
    survival: the next level of a chain, or the second choice beside it. Numbers, not arrays: most steps of a CPU have
    a few sequences, and an array costs as much as a hundred of its elements.
    """
    names = tuple(dict.fromkeys((lead, *others) if lead != "none" else others))
    count = len(group.sequences)
    drafts = [_own_draft(i, names, group, rates, costs, options, max_depth) for i in range(count)]
    if not any(drafts):
        return None
    nodes = _nodes(drafts)
    gains = np.zeros((len(nodes) + 1, count))
    gains[range(1, len(nodes) + 1), [item for _, item, _ in nodes]] = [survival for survival, _, _ in nodes]
    each, seconds, drafting = list(group.each), [group.plain], 0.0
    rows, without, deepest, begun = sum(each), costs.step_of(each), dict[str, int](), set[int]()
    for _, item, level in nodes:
        draft = drafts[item]
        assert draft is not None
        if level > (before := deepest.get(draft.drafter, 0)):
            drafting += costs.per_level.get(draft.drafter, 0.0)
            if not before:
                drafting += costs.per_draft.get(draft.drafter, 0.0)
            deepest[draft.drafter] = level
        if item not in begun:
            begun.add(item)
            drafting += draft.delay
        rows += 1
        target = costs.curve_at(rows)
        if costs.experts is not None:
            each[group.places[item]] += 1
            target *= costs.shared(each)
        longer = target - without
        seconds.append(group.plain + drafting + (longer if longer > 0 else 0.0))
    return Candidates(
        lead,
        gains.cumsum(0),
        np.array(seconds),
        np.zeros(len(seconds)),
        nodes=[(item, level) for _, item, level in nodes],
        drafters=[draft.drafter if draft else "none" for draft in drafts],
    )


def _own_draft(
    item: int,
    names: Seq[str],
    group: Group,
    rates: AcceptanceRates,
    costs: EagerCosts,
    options: Options,
    max_depth: int,
) -> OwnDraft | None:
    """The draft of the drafter from which most accepted tokens are expected. A drafter that must prefill the sequence
    first counts only if the sequence's own accepted tokens save the seconds that this takes.
    """
    sequence, place, best, most = group.sequences[item], group.places[item], None, -1.0
    coupled = sequence.request.params.speculation.mode != "rejection"
    for name in names:
        if name not in group.allowed[item]:
            continue
        rate = rates.of(sequence, name)
        depth = min(_limit(rate, options.available.get(name), place), max_depth, sequence.remaining)
        if depth < 1:
            continue
        accepted, delay = rate.accepted(TreeShape(depth, depth)), 0.0
        if prefill := costs.prefill(name, options.lag[name][place]) if name in options.lag else 0.0:
            [share] = rates.left_to([sequence], name)
            steps = group.tokens_left[item] / (1 + accepted) * share
            if accepted * steps * group.plain / len(group.sequences) <= prefill:
                continue
            delay = prefill / max(steps, 1.0)
        # A sequence keeps its drafter unless another one is clearly better.
        worth = accepted if rate.idle else accepted * (1 + MARGIN)
        if worth > most:
            # The ratio test of `rejection` must not choose nodes by looking at them.
            branches = coupled and name in options.branching
            best, most = OwnDraft(name, rate, depth, delay, branches), worth
    return best


def _limit(rate: AcceptanceRate, available: Seq[int] | None, place: int) -> int:
    """The deepest draft. A drafter with passes tries a text at one level first: every accepted token allows one more, a
    rejected draft halves them. A model-free one, which every step scores, has what it found once a token of it was
    right.
    """
    if available is None:
        return 1 + rate.earned
    return available[place] if rate.proven else min(available[place], 1)


def _nodes(drafts: Seq[OwnDraft | None]) -> list[tuple[float, int, int]]:
    """Survival, sequence and level of draft nodes, the likeliest first: each chain's levels and, where drafts may
    branch, the second choice at each level.
    """
    found = []
    for item, draft in enumerate(drafts):
        if draft is None:
            continue
        survival, above, second = draft.rate.first, 1.0, []
        for level in range(1, draft.depth + 1):
            found.append((survival, item, level))
            if draft.branches:
                second.append(((above - survival) * SECOND, item, level))
            above, survival = survival, survival * draft.rate.next
        found += second
    found.sort(key=itemgetter(0), reverse=True)
    return [node for node in found[:MAX_NODES] if node[0] > 0]


def _earns_prefill(
    group: Group, rates: AcceptanceRates, lead: str, accepted: Floats, prefill: Floats
) -> tuple[Floats, NDArray[np.bool_]]:
    """The steps left to draft in, and whether a sequence's own accepted tokens save the seconds that this drafter
    needs to prefill it first.
    """
    steps = np.array(group.tokens_left)[:, None] / (1 + accepted)
    if prefill.any():
        steps = steps * np.fromiter(rates.left_to(group.sequences, lead), np.float64)[:, None]
    per_token = group.plain / len(group.sequences)
    return steps, (prefill == 0) | (accepted * steps * per_token > prefill)


# ------------------------------------------------------------------------------------------ drafts that requests fix


def asked_plan(name: str, item: Work, depth: int | None) -> DraftPlan:
    """As the request fixed it, or for all requests by `depth`."""
    asked = item.sequence.request.params.speculation
    if asked.tree is not None:
        nodes = sum(prod(asked.tree[: k + 1]) for k in range(len(asked.tree)))
        return DraftPlan(name, nodes, len(asked.tree), asked.tree)
    depth, nodes = asked.depth or depth, asked.nodes or 0
    depth = min(depth or ASKED_DEPTH, nodes or MAX_NODES)
    free = asked.mode != "rejection"  # the ratio test must not choose nodes by looking at them
    return DraftPlan(name, (nodes or depth) if free else depth, depth)


def asked_tree(plans: Seq[DraftPlan], lead: str, options: Options) -> TreeShape:
    """The smallest tree of the persistent batch that holds these drafts, or the largest there is."""
    shapes = [TreeShape(plan.depth, plan.nodes) for plan in plans if plan.drafter == lead]
    widest = max(shapes, key=lambda shape: shape.nodes, default=NO_TREE)
    if not widest.is_chain and widest in options.trees.get(lead, ()):
        return widest
    serving = {lead, *options.model_free}
    depth = max((plan.depth for plan in plans if plan.drafter in serving), default=0)
    chains = options.chains.get(lead, ())
    return next((one for one in chains if one.depth >= depth), chains[-1] if chains else NO_TREE)
