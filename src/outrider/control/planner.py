"""The planner: which drafter, how deep and how wide, for every sequence of a step. No torch.

In order: guards settle what a request or a bound decides; candidates are the drafts that the runner could make
(candidates.py); their value is expected tokens per second over those of plain decoding, by acceptance rates
(acceptance.py) and measured costs (costs.py); the best one is chosen, or none; now and then a drafter that is not in
use is probed; each decision has its reason (reasons.py). The runner executes the plan as it is.

The persistent batch and host-packed sequences are planned by the same steps. They differ in their candidates alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.control import prefill
from outrider.control.acceptance import AcceptanceRates
from outrider.control.candidates import (
    Candidates,
    Estimates,
    Group,
    asked_plan,
    asked_tree,
    nothing_found,
    own_chains,
    shared_trees,
)
from outrider.control.costs import CostModel
from outrider.control.guards import MARGIN, PROBE_INTERVAL, PROBE_SHARE, Guards
from outrider.control.history import AnswerLengths, DraftReturn, Fairness, PlanCache, resident_of
from outrider.control.reasons import AUTO, BASELINE, NOTHING_FOUND, OFF, PREFILL
from outrider.types import (
    NO_DRAFT_PLAN,
    NO_TREE,
    CapturedShape,
    DraftPlan,
    Options,
    Outcome,
    Plan,
    Reason,
    Sequence,
    StepRecord,
    TreeShape,
    Work,
)

Choice = tuple[DraftPlan, Reason]
PROBE_TREE = TreeShape(2, 2)  # the smallest that shows both acceptance rates
# Few plans differ, and each step has one for every sequence.
_draft_plan = lru_cache(maxsize=1024)(DraftPlan)


@dataclass(slots=True)
class Current:
    """What the last plan of one kind (persistent batch, host-packed) decided."""

    lead: str = "none"
    drafts: bool = False
    speedup: float = 1.0  # expected
    # Plain steps' time since each drafter drafted.
    idle: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def stop(self) -> None:
        self.lead, self.drafts, self.speedup = "none", False, 1.0


class Worth(NamedTuple):
    """Of the chosen candidate: expected accepted tokens by sequence, and its time relative to the plain step."""

    gains: NDArray[np.float64]
    ratio: float


class Planner:
    def __init__(
        self,
        default: str = "none",
        depth: int | None = None,  # of every draft; None: measurement decides
        choices: tuple[str, ...] = (),  # drafters for requests that name none
        guards: Guards | None = None,
    ) -> None:
        self.default, self.depth, self.choices = default, depth, choices
        self.guards = guards or Guards()
        self.costs, self.rates, self.lengths = CostModel(), AcceptanceRates(), AnswerLengths()
        self.fairness, self.returns = Fairness(self.guards.max_slowdown), DraftReturn()
        self.cache = PlanCache()
        self.persistent, self.packed = Current(), Current()

    def kept(self, work: Seq[Work], members: Options) -> Plan | None:
        """The plan of an earlier step, if it holds for this work."""
        batch = len(work)
        return self.cache.get(work, members, lambda one: self._settled(one, batch, members)[1])

    def plan(self, work: Seq[Work], options: Options) -> Plan:
        return self.cache.put(work, self._plan(work, options), options)

    def _plan(self, work: Seq[Work], options: Options) -> Plan:
        self.rates.model_free = options.model_free
        found = [self._settled(one, len(work), options) for one in work]
        places = [i for i, one in enumerate(work) if one.emits and options.size and options.resident[i]]
        shared = self._plan_persistent(work, found, places, options) if places else Plan(())
        left = [i for i, (_, why) in enumerate(found) if why is AUTO]
        if left:
            self._plan_packed(work, found, left, options)
        if self.costs.baseline_due(options.size, len(work)) and all(why.kind != "asked" for _, why in found):
            found = [(NO_DRAFT_PLAN, BASELINE if plan.nodes else why) for plan, why in found]
            shared = Plan(())
        plans, reasons = zip(*found, strict=True)
        return replace(shared, draft_plans=plans, reasons=reasons, resident=resident_of(plans, options))

    # ------------------------------------------------------------------------------------------ guards

    def _settled(self, item: Work, batch: int, options: Options) -> Choice:
        """What the request or a guard settles; AUTO leaves the draft to measurement."""
        params, guards = item.sequence.request.params, self.guards
        asked, name = params.speculation, params.speculation.drafter or self.default
        if not (item.decodes or (item.emits and options.after_prompts)):
            return NO_DRAFT_PLAN, PREFILL
        if name == "none" or asked.off:
            return NO_DRAFT_PLAN, OFF
        if asked.tree or asked.depth or asked.nodes or self.depth:
            plan = asked_plan(name, item, self.depth)
            return plan, Reason("asked", plan.depth, (("drafter", name), ("nodes", plan.nodes)))
        if guards.max_batch is not None and batch > guards.max_batch:
            return NO_DRAFT_PLAN, Reason("batch", 0, (("batch", batch, guards.max_batch),))
        if params.temperature > guards.max_temperature:
            facts = (("temperature", params.temperature, guards.max_temperature),)
            return NO_DRAFT_PLAN, Reason("temperature", 0, facts)
        return _draft_plan(name), AUTO

    def _allowed(self, sequence: Sequence, plan: DraftPlan) -> tuple[str, ...]:
        named = sequence.request.params.speculation.drafter is not None or plan.drafter not in self.choices
        return (plan.drafter,) if named else self.choices

    # ------------------------------------------------------------------------------------------ candidates

    def _group(
        self,
        work: Seq[Work],
        found: Seq[Choice],
        places: list[int],
        delayed: int,
        plain: float,
        each: Seq[int] = (),
    ) -> Group:
        sequences = [work[i].sequence for i in places]
        allowed = [self._allowed(work[i].sequence, found[i][0]) for i in places]
        late = self.fairness.late_ones(one.sequence for one in work) if len(work) > 1 else set()
        left, at_bound = self.lengths.tokens_left(sequences), np.array([s in late for s in sequences])
        settled = sum(why is not PREFILL for _, why in found) - len(places)
        others = bool(late.difference(sequences))
        return Group(places, sequences, allowed, left, at_bound, delayed, settled, others, plain, each)

    def _plan_persistent(
        self, work: Seq[Work], found: list[Choice], places: list[int], options: Options
    ) -> Plan:
        """Settles what `found` leaves to measurement in the persistent batch: its tree and drafters."""
        if any(found[i][1].kind == "asked" for i in places):
            return self._plan_asked(work, found, places, options)
        free = [i for i in places if found[i][1] is AUTO]
        costs = self.costs.captured
        plain = costs.plain(options.size)
        if not free or plain is None:
            self._settle(found, free, Reason("unmeasured", 0, (("sequences", options.size),)))
            return Plan(())
        reading = sum(why is PREFILL for _, why in found)
        group = self._group(work, found, free, reading + options.waiting if reading else 0, plain)
        leads = dict.fromkeys(name for names in group.allowed for name in names)
        every, estimates = [], Estimates(self.rates, group, tuple(leads))
        begins = not self.persistent.drafts
        for lead in leads:
            trees = [t for t in options.trees.get(lead, ()) if t.depth <= self.guards.max_depth]
            if trees:
                every.append(shared_trees(lead, trees, group, self.rates, estimates, costs, options, begins))
        plans, reason, worth = self._choose(self.persistent, every, group, options)
        if not any(plan.nodes for plan in plans):
            self._settle(found, free, reason)
            return Plan(())
        tree = max((TreeShape(p.depth, p.nodes) for p in plans), key=lambda one: one.nodes)
        probed = next(plan.drafter for plan in plans if plan.nodes)
        lead = probed if reason.kind == "probe" else self.persistent.lead
        shared = self._shared_plan(found, dict(zip(free, plans, strict=True)), reason, lead, tree, options)
        if worth is not None and shared.tree != NO_TREE:
            drafts = [found[i][0].nodes > 0 for i in free]
            tokens = 1 + worth.gains[drafts].sum() / (len(free) + group.settled + group.delayed)
            if tokens <= worth.ratio:  # too few can draft yet: the others are prefilled first
                self._settle(found, free, reason)
                self.persistent.drafts = False
                return replace(shared, tree=NO_TREE)
        return shared

    def _plan_asked(self, work: Seq[Work], found: list[Choice], places: list[int], options: Options) -> Plan:
        """Requests fixed drafts in the persistent batch. One drafter with passes leads, the one most asked for; the
        tree is as deep as the deepest draft. Other sequences of the batch draft as well: its rows are there anyway.
        """
        asked = Counter(found[i][0].drafter for i in places if found[i][1].kind == "asked")
        leads = [name for name, _ in asked.most_common() if name not in options.model_free]
        lead = leads[0] if leads else asked.most_common(1)[0][0]
        tree = asked_tree([found[i][0] for i in places if found[i][1].kind == "asked"], lead, options)
        serving = (lead, *options.model_free) if tree.is_chain else (lead,)
        lag = options.lag.get(lead, ())
        plans: dict[int, DraftPlan] = {}
        for i in (i for i in places if found[i][1].kind in ("auto", "asked")):
            plan, why = found[i]
            allowed = self._allowed(work[i].sequence, plan) if why is AUTO else (plan.drafter,)
            name = next((one for one in serving if one in allowed), None)
            if why is AUTO and name == lead and lag and lag[i]:
                name = None  # its prefill is not worth a draft that was made for others
            whole = why is AUTO or not tree.is_chain
            depth = tree.depth if whole else min(plan.depth, tree.depth)
            nodes = depth if tree.is_chain else tree.nodes
            none = name is None or tree == NO_TREE
            plans[i] = NO_DRAFT_PLAN if none else _draft_plan(name or "", nodes, depth)
        reason = Reason("pays", tree.depth, (("drafter", lead),))
        return self._shared_plan(found, plans, reason, lead, tree, options)

    def _shared_plan(
        self,
        found: list[Choice],
        plans: dict[int, DraftPlan],
        reason: Reason,
        lead: str,
        tree: TreeShape,
        options: Options,
    ) -> Plan:
        """The tree with its drafters. The lead prefills sequences it lags behind with, as far as a step has rows for
        that; those whose tokens are still in flight draft from the next step on.
        """
        lag, blocked = options.lag.get(lead, ()), options.blocked.get(lead, ())
        prefills, left = list[int](), options.max_prefill
        for i, plan in plans.items():
            mine = plan.nodes and plan.drafter == lead
            if mine and lag and lag[i]:
                if prefills and lag[i] > left:
                    plan = NO_DRAFT_PLAN
                else:
                    prefills.append(i)
                    left -= lag[i]
            if mine and blocked and blocked[i]:
                plan = NO_DRAFT_PLAN
            why = found[i][1]
            found[i] = plan, why if why.kind == "asked" else reason
        names = (lead, *(n for n in options.model_free if n != lead)) if tree.is_chain else (lead,)
        tree = tree if any(found[i][0].nodes for i in plans) else NO_TREE
        return Plan((), tree=tree, drafters=names, prefills=tuple(prefills))

    def _plan_packed(self, work: Seq[Work], found: list[Choice], places: list[int], options: Options) -> None:
        """Settles what `found` leaves to measurement among host-packed sequences."""
        if nothing_found(options, places, [self._allowed(work[i].sequence, found[i][0]) for i in places]):
            self.packed.stop()
            self._settle(found, places, NOTHING_FOUND)
            return
        batch = sum(one.emits for one in work)
        costs, each = self.costs.eager, [one.known + f[0].nodes for one, f in zip(work, found, strict=True)]
        delayed = len(work) - batch + options.waiting
        plain = costs.plain(batch) * (1 + costs.prompts if sum(each) > batch else 1.0)
        group = self._group(work, found, places, delayed, plain, each)
        serving = {*options.model_free, *(names[0] for names in group.allowed if len(names) == 1)}
        further = {name for names in group.allowed for name in names} - serving
        every = [
            own_chains(lead, sorted(serving), group, self.rates, costs, options, self.guards.max_depth)
            for lead in ("none", *sorted(further))
        ]
        some = [one for one in every if one is not None]
        plans, reason, _ = self._choose(self.packed, some, group, options)
        for i, plan in zip(places, plans, strict=True):
            own = reason._replace(depth=plan.depth) if reason.kind in ("pays", "slowdown") else reason
            if reason.kind in ("pays", "probe") and not plan.nodes:
                own = Reason("below break-even", 0, reason.facts)
            found[i] = plan, own

    def _settle(self, found: list[Choice], places: Iterable[int], reason: Reason) -> None:
        for i in places:
            found[i] = NO_DRAFT_PLAN, reason

    # ------------------------------------------------------------------------------------------ value and choice

    def _choose(
        self, current: Current, every: Seq[Candidates], group: Group, options: Options
    ) -> tuple[list[DraftPlan], Reason, Worth | None]:
        """The candidate with the highest expected speed-up over plain decoding, or none; or a probe. A drafter that is
        in use is left only for a clear gain.
        """
        none = [NO_DRAFT_PLAN] * len(group.sequences)
        if not every:
            current.stop()
            probe = self._probe(current, every, group, options)
            return (*probe, None) if probe is not None else (none, NOTHING_FOUND, None)
        best, at, speedup, slowed, shown = None, 0, 1.0, 0.0, (0.0, 0.0, 0.0, every[0].lead)
        needed = 1.0 if current.drafts else 1 + MARGIN
        for one in every:
            values, ratios, too_slow = self._values(one, group)
            top = int(values.argmax())
            kept = values[top] * (1 + MARGIN if one.lead == current.lead and current.drafts else 1.0)
            gain = float(one.gains[top].sum() / len(group.sequences))
            shown = max(shown, (float(values[top]), gain, float(ratios[top]), one.lead))
            if too_slow.max(initial=0.0) > max(values[top], speedup):
                slowed = max(slowed, float(ratios[int(too_slow.argmax())]))
            held = speedup * (1 + MARGIN if best and best.lead == current.lead and current.drafts else 1.0)
            if values[top] > needed and kept > held and one.gains[top].any():
                best, at, speedup = one, top, float(values[top])
        current.speedup, current.drafts = speedup, best is not None
        current.lead = best.lead if best is not None else current.lead
        if not slowed and group.delayed <= len(group.sequences):
            probe = self._probe(current, every, group, options)
            if probe is not None:
                return *probe, None
        facts = self._facts(shown, group)
        if slowed:
            facts = (("slowdown", slowed, self.guards.max_slowdown), *facts)
        if best is None:
            return none, Reason("slowdown" if slowed else "below break-even", 0, facts), None
        plans, worth = best.chosen(at), Worth(best.gains[at], float(best.seconds[at] / group.plain))
        depth = max(plan.depth for plan in plans)
        return plans, Reason("slowdown" if slowed else "pays", depth, facts), worth

    def _facts(self, shown: tuple[float, float, float, str], group: Group) -> tuple[tuple[object, ...], ...]:
        """The best candidate's expected accepted tokens, and as many as pay for its step."""
        _, gain, ratio, lead = shown
        return (
            ("batch", len(group.sequences)),
            ("drafter", lead),
            ("expected", gain),
            ("needed", max(ratio - 1, 0.0) * (1 + (group.delayed + group.settled) / len(group.sequences))),
        )

    def _values(self, one: Candidates, group: Group) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """By candidate: speed-up over plain decoding (0 where it would slow down a request beyond its bound), the
        step's time relative to a plain one, and the speed-up of those that were ruled out.
        """
        count, ratios = len(group.sequences) + group.settled, one.seconds / group.plain
        if self.guards.objective == "throughput":
            gained = one.gains.sum(1) - one.caution
        else:  # mean time per token, as the number of tokens that would bring it
            gained = count * count / ((1 / (1 + one.gains)).sum(1) + group.settled) - count - one.caution
        values = (1 + gained / (count + group.delayed)) / ratios
        if not (group.settled_late or group.late.any()):
            return values, ratios, np.zeros(1)
        least = 0.0 if group.settled_late else one.gains[:, group.late].min(1)
        # Drafts brought a late sequence fewer tokens than expected, so its expected tokens do not extend the bound.
        late = ratios > np.maximum(1 + least, self.guards.max_slowdown)
        return np.where(late, 0.0, values), ratios, np.where(late, values, 0.0)

    # ------------------------------------------------------------------------------------------ probe

    def _probe(
        self, current: Current, every: Seq[Candidates], group: Group, options: Options
    ) -> tuple[list[DraftPlan], Reason] | None:
        """A drafter that is not in use is tried again when what the probe loses is a small share of the time since.
        Model-free drafters are scored in every step, so that they need a probe only before the first score, and none
        where there is nothing to draft.
        """
        for lead in dict.fromkeys(name for names in group.allowed for name in names):
            known = lead in self.rates.tried or current.drafts or not every
            scored = lead in options.model_free and known
            idle = current.idle[lead]
            if scored or (current.drafts and lead == current.lead) or idle < PROBE_INTERVAL:
                continue
            found = self._probe_plans(current, lead, group, options)
            if found is None:
                continue
            plans, ratio = found
            if idle >= (ratio - 1 / current.speedup) / PROBE_SHARE:
                current.idle[lead] = 0.0  # now: what comes of it is known a step later
                waited = ("after one that paid", "") if idle == inf else ("idle steps", round(idle))
                depth = max(plan.depth for plan in plans)
                return plans, Reason("probe", depth, (("drafter", lead), waited))
        return None

    def _probe_plans(
        self, current: Current, lead: str, group: Group, options: Options
    ) -> tuple[list[DraftPlan], float] | None:
        """A small draft by this drafter, and its step's time relative to a plain one, prefill included. Sequences
        without lag are tried; if all lag, the one that lags least.
        """
        free = [i for i, names in enumerate(group.allowed) if lead in names]
        lag = group.by_place(options.lag.get(lead))
        plans = [NO_DRAFT_PLAN] * len(group.sequences)
        if current is self.packed:
            at = max(free, key=lambda i: (-lag[i], self.rates.of(group.sequences[i], lead).idle))
            plans[at] = DraftPlan(lead, *PROBE_TREE)
            costs = self.costs.eager
            drafting = costs.drafting({lead: PROBE_TREE.depth}) + costs.prefill(lead, lag[at])
            added = costs.step_of(group.with_nodes(at, PROBE_TREE.nodes)) - costs.step_of(group.each)
            return plans, 1 + (added + drafting) / group.plain
        trees = options.trees.get(lead, ())
        if not trees:
            return None
        tree = PROBE_TREE if PROBE_TREE in trees else min(trees)
        ready = [i for i in free if not lag[i]] or [min(free, key=lambda i: lag[i])]
        for i in ready:
            plans[i] = DraftPlan(lead, tree.nodes, tree.depth)
        prefill = self.costs.captured.prefill(lead, float(sum(lag[i] for i in ready)))
        ratio = self.costs.captured.ratio(CapturedShape(lead, tree, options.size))
        return plans, ratio + prefill / group.plain

    # ------------------------------------------------------------------------------------------ learning

    def observe(self, record: StepRecord) -> None:
        self.costs.observe(record)
        record.plain_s = self.costs.plain_seconds(record)
        captured = record.captured
        lead = captured.drafter if captured else "none"
        for o in record.outcomes:
            shared = o.draft_plan.nodes > 0 and o.draft_plan.drafter == lead  # its rows ran, drafted or not
            if shared or o.drafted:
                # A captured tree is valued by the rate of first choices, a grown one by the depth it reached.
                accepted = o.top1_accepted if shared else o.accepted
                self.rates.observe(o.sequence, o.draft_plan.drafter, o.deepest, accepted)
            if not o.sequence.finish_reason:  # else already forgotten
                self.rates.note(o.sequence, o.draft_plan.drafter if o.drafted else "none")
        for o in record.shadow if captured is None else ():
            if o.drafted:
                self.scored(o)
        if record.sequences > 1 and record.drafted:
            self.fairness.observe(record, self._longer(record))
        if self.returns.held and record.decodes_only and record.plain_s > 0:
            self.returns.observe(record)
        self.cache.observe(record)
        self._count_idle(record)

    def scored(self, score: Outcome) -> None:
        """Learns what a model-free drafter would have got in a step in which it did not draft."""
        self.rates.observe(score.sequence, score.draft_plan.drafter, score.deepest, score.accepted)

    def _longer(self, record: StepRecord) -> float:
        """What drafts added to a step, in plain steps."""
        plain = self.costs.plain_now(record)
        if not plain:
            return 0.0
        decoding = max(record.decoding, 1)
        without = record.plain_s - record.accepted / decoding * plain  # the step with its prompt rows
        return (record.total_s - without) / plain

    def _count_idle(self, record: StepRecord) -> None:
        """Plain steps' time since each drafter drafted. A probe that paid is followed by another."""
        captured = record.captured
        current = self.packed if captured is None else self.persistent
        drafting = {o.draft_plan.drafter for o in record.outcomes if o.drafted}
        token = record.emitted / max(record.sequences, 1)
        plain = record.plain_s / token if token else 0.0
        ratio = record.total_s / plain if plain else float(record.passes)
        for name in {*current.idle, *self.choices, self.default}:
            current.idle[name] += ratio if captured is None else max(ratio, 1.0)
        for name in drafting:
            paid = token > ratio * current.speedup and not current.drafts
            current.idle[name] = inf if paid else 0.0

    def unmeasured(self, work: Seq[Work], options: Options) -> str:
        """A drafter whose captured steps of this size must be measured before a plan is made, or "none"."""
        lacking = {name for name in options.trees if (name, options.size) not in self.costs.captured.measured}
        for i, one in enumerate(work) if lacking else ():
            plan, why = self._settled(one, len(work), options)
            if options.resident[i] and why is AUTO:
                for name in self._allowed(one.sequence, plan):
                    if name in lacking:
                        return name
        return "none"

    def prompt_rows(self, decoding: int, waited: float, waiting: int = 1, pending: int = 0) -> int:
        """Prompt rows that a step with decoding sequences may have; see prefill.py."""
        return prefill.prompt_rows(self.costs, self.guards, decoding, waited, waiting, pending)

    def forget(self, sequence: Sequence) -> None:
        self.lengths.observe(sequence)
        for known in (self.rates, self.fairness, self.cache):
            known.forget(sequence)

    def forget_drafters(self, names: Seq[str]) -> None:
        """These drafters, a swapped one and merged ones with it, have other weights now: what they achieved says
        nothing any more.
        """
        self.rates.forget_drafters(names)
        self.cache.clear()
        for name in names:
            self.returns.forget(name)
            for current in (self.persistent, self.packed):
                if name in current.idle:
                    current.idle[name] = inf  # so that a drafter that did not pay is tried again

    def release(self, names: Seq[str]) -> None:
        """These drafters are gone. Requests that name none get what is left."""
        self.forget_drafters(names)
        self.choices = tuple(one for one in self.choices if one not in names)
        for name in names:
            self.returns.held.pop(name, None)
        self.default = next(iter(self.choices), "none") if self.default in names else self.default
