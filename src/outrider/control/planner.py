"""The planner: which drafter, how deep and how wide, for every sequence of a step. No torch.

It takes the drafts with the most expected tokens per second: tokens by acceptance rates (acceptance.py), seconds by the
cost model (costs.py), within bounds (guards.py). No draft at all is one of the choices; a probe now and then keeps it
from being for ever (probes.py). A request that names no drafter gets any of the engine's. Those that take no pass are
scored on what was verified, asked or not, so they need no probes; of the others one serves a step. Staged rows have a
draft each (staged.py), resident rows share a tree (resident.py). What a request fixes itself (drafter, depth, nodes,
tree) is done as asked. Every decision has its reason (reasons.py).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from math import inf, prod

from outrider.control.acceptance import AcceptanceRate, AcceptanceRates
from outrider.control.costs import CostModel
from outrider.control.fairness import Fairness
from outrider.control.guards import Guards, is_flat
from outrider.control.known import Known
from outrider.control.lengths import AnswerLengths
from outrider.control.payoff import Payoff
from outrider.control.reasons import AUTO, BASELINE, OFF, PREFILL
from outrider.control.resident import Choice, ResidentPlans
from outrider.control.rest import Rest
from outrider.control.staged import StagedPlans, StepRows
from outrider.types import (
    MAX_NODES,
    NO_DRAFT_PLAN,
    DraftPlan,
    Options,
    Plan,
    Reason,
    Sequence,
    StepRecord,
    Work,
)

MAX_PROMPT_ROWS = 1 << 20  # more than any step has
# Prompt rows of a step that others decode in, unless a prompt has waited so many times as long as it should: more save
# reading what those have cached, and are felt by everybody.
USUAL_PROMPT_ROWS, LATE = 512, 40
ASKED_DEPTH = 4  # of a draft whose nodes alone a request fixed


class Planner:
    def __init__(
        self,
        default: str = "none",
        depth: int | None = None,
        nodes: int | None = None,
        choices: tuple[str, ...] = (),  # drafters that sequences may get whose requests name none
        guards: Guards | None = None,
    ) -> None:
        self.default, self.depth, self.nodes, self.choices = default, depth, nodes, choices
        self.guards = guards or Guards()
        self.costs, self.rates = CostModel(self.guards.baseline_interval), AcceptanceRates()
        self.fairness, self.payoff = Fairness(self.guards), Payoff()
        self.lengths = AnswerLengths(self.guards)
        known = Known(self.guards, self.costs, self.rates, self.fairness, self.lengths)
        self.staged, self.resident = StagedPlans(known), ResidentPlans(known)
        self.rest = Rest()
        self.crowded = Reason("batch", 0, (("batch", 0),))  # one for all sequences of a step
        self.learn, self.learn_reading = self.costs.learn, self.costs.learn_reading
        self.learn_prompt_rows = self.costs.learn_prompt_rows

    def plan(self, work: Seq[Work], options: Options) -> Plan:
        """One draft plan and one reason for each item of work."""
        again = self.rest.plan_again(
            work, options, lambda one: self._settled(one, len(work), options)[1] is AUTO
        )
        return again if again is not None else self.rest.note(work, self._plan(work, options), options)

    def _plan(self, work: Seq[Work], options: Options) -> Plan:
        sequences, batch, self.rates.scored = [item.sequence for item in work], len(work), options.model_free
        found = [self._settled(item, batch, options) for item in work]
        allowed = {
            i: self._allowed(sequences[i], draft_plan)
            for i, (draft_plan, why) in enumerate(found)
            if why is AUTO
        }
        here = [i for i, item in enumerate(work) if item.emits and options.is_resident(i)]
        if here:
            mine = [sequences[i] for i in here], [found[i] for i in here], [allowed.get(i, ()) for i in here]
            reading = sum(why is PREFILL for _, why in found)
            held_up = reading + options.waiting if reading else 0
            for i, choice in zip(here, self.resident.plan(*mine, options, held_up), strict=True):
                found[i] = choice
        left = {i: (sequences[i], allowed[i]) for i, one in enumerate(found) if one[1] is AUTO}
        if left:
            emitting = sum(item.emits for item in work)
            asked, rows = sum(draft_plan.nodes for draft_plan, _ in found), sum(item.known for item in work)
            step = StepRows(emitting, asked, rows - emitting, batch - emitting + options.waiting)
            for i, drafter, depth, reason in self.staged.plan(left, step, options):
                found[i] = self._shaped(found[i][0], drafter, depth, reason, batch), reason
        if self.costs.baseline_due(options.size, batch) and all(why.kind != "asked" for _, why in found):
            found = [(NO_DRAFT_PLAN, BASELINE if draft_plan.nodes else why) for draft_plan, why in found]
        return Plan(tuple(draft_plan for draft_plan, _ in found), tuple(reason for _, reason in found))

    def unmeasured(self, work: Seq[Work], options: Options) -> str:
        """A drafter whose captured steps of this size must be measured before a plan is made, or "none"."""
        if all((name, options.size) in self.costs.measured for name in options.trees):
            return "none"
        for i, item in enumerate(work):
            draft_plan, why = self._settled(item, len(work), options)
            if options.is_resident(i) and why is AUTO:
                for name in self._allowed(item.sequence, draft_plan):
                    if name in options.trees and (name, options.size) not in self.costs.measured:
                        return name
        return "none"

    def prompt_rows(self, decoding: int, waited: float, waiting: int = 1, pending: int = 0) -> int:
        """Prompt rows that a step may have beside so many decoding sequences: more the longer a prompt has waited, and
        the more of them do. `pending` are all rows that wait.
        """
        guards = self.guards
        if guards.prefill_stretch == inf:
            return MAX_PROMPT_ROWS
        share = guards.prefill_stretch * max(1.0, waited / guards.prefill_wait)
        most = MAX_PROMPT_ROWS if waited > LATE * guards.prefill_wait else USUAL_PROMPT_ROWS
        rows = self.costs.prompt_rows(decoding, share, most, waiting)
        at_once = self.costs.read_at_once(decoding, waiting, pending, guards.prefill_at_once)
        return max(rows, at_once, guards.min_prompt_rows)

    def forget(self, sequence: Sequence) -> None:
        self.lengths.observe(sequence)
        self.rates.forget(sequence)
        self.fairness.forget(sequence)
        self.rest.forget(sequence)

    def forget_drafter(self, name: str) -> None:
        """It drafts with other weights now, alone or merged with others: what it achieved says nothing any more."""
        self.rates.forget_drafter(name)
        self.payoff.forget(name)
        self.rest = Rest()  # no plan with it may hold
        for known in self.resident.idle_time:
            if name in known.split("+"):
                self.resident.idle_time[known] = inf  # so that one that did not pay is tried again

    def release(self, name: str) -> None:
        """A drafter is there no longer: whoever named none gets what is left."""
        self.forget_drafter(name)
        self.payoff.held.pop(name, None)
        self.choices = tuple(one for one in self.choices if one != name)
        self.default = next(iter(self.choices), "none") if self.default == name else self.default

    def observe(self, record: StepRecord) -> None:
        if record.catch_up is not None:
            if record.captured:
                self.learn_reading(*record.catch_up)
            else:
                self.costs.learn_eager_reading(record)
        self.costs.observe(record)
        record.plain_s = self.costs.plain_seconds(record)
        drafter = record.captured[0] if record.captured else "none"
        alive: list[AcceptanceRate] = []
        for o in record.outcomes:
            resident = (
                o.draft_plan.nodes > 0 and o.draft_plan.drafter == drafter
            )  # its rows ran, drafted or not
            if resident or o.drafted:
                # A captured tree is valued by the rate of first choices, a grown one by the depth it reached.
                accepted = o.top1_accepted if resident else o.accepted
                self.rates.observe(o.sequence, o.draft_plan.drafter, o.deepest, accepted)
            if not o.sequence.finish_reason:  # else already forgotten
                alive += [self.rates.of(o.sequence, drafter)] if resident else []
                self.rates.note(o.sequence, o.draft_plan.drafter if o.drafted else "none")
        for o in record.scored:
            if o.drafted or record.captured is not None:  # a captured step has rows for it, drafted or not
                self.rates.observe(o.sequence, o.draft_plan.drafter, o.deepest, o.accepted)
        decoded = record.decodes_only and record.plain_s > 0
        if record.sequences > 1 and record.drafted and decoded:  # alone, nobody waits for others' drafts
            self.fairness.observe(record, record.total_s * record.emitted / record.sequences / record.plain_s)
        if self.payoff.held and decoded:
            self.payoff.observe(record)
        self.rest.observe(record)
        if record.captured is not None:
            self.resident.observe(record, self.choices, alive)

    def _settled(self, item: Work, batch: int, options: Options) -> Choice:
        """What the request or a guard settles at once; AUTO leaves depth and tree to measurement."""
        params, guards = item.sequence.request.params, self.guards
        asked, temperature = params.speculation, params.temperature
        name = asked.drafter or self.default
        if not item.emits or (item.known > 1 and not options.after_prompts):
            return NO_DRAFT_PLAN, PREFILL
        if name == "none" or asked.off:
            return NO_DRAFT_PLAN, OFF
        if asked.tree or asked.depth or asked.nodes or self.depth or self.nodes:
            draft_plan = self._asked(name, item)
            return draft_plan, Reason(
                "asked", draft_plan.depth, (("drafter", name), ("nodes", draft_plan.nodes))
            )
        if guards.max_batch is not None and batch > guards.max_batch:
            if self.crowded.facts[0][1] != batch:
                self.crowded = Reason("batch", 0, (("batch", batch, guards.max_batch),))
            return NO_DRAFT_PLAN, self.crowded
        if temperature > guards.max_temperature:
            return NO_DRAFT_PLAN, Reason(
                "temperature", 0, (("temperature", temperature, guards.max_temperature),)
            )
        if temperature > guards.flat_temperature and is_flat(params):
            return NO_DRAFT_PLAN, Reason("flat", 0, (("temperature", temperature, guards.flat_temperature),))
        return DraftPlan(name, mode=asked.mode), AUTO

    def _asked(self, name: str, item: Work) -> DraftPlan:
        """As the request fixed it, or whoever made this planner."""
        asked = item.sequence.request.params.speculation
        if asked.tree is not None:
            nodes = sum(prod(asked.tree[: k + 1]) for k in range(len(asked.tree)))
            return DraftPlan(name, nodes, len(asked.tree), asked.tree, asked.mode)
        depth, nodes = asked.depth or self.depth, asked.nodes or self.nodes or 0
        depth = min(depth or ASKED_DEPTH, nodes or MAX_NODES)
        free = asked.mode != "rejection"  # the ratio test must not choose nodes by looking at them
        return DraftPlan(name, (nodes or depth) if free else depth, depth, None, asked.mode)

    def _allowed(self, sequence: Sequence, draft_plan: DraftPlan) -> tuple[str, ...]:
        """Drafters that a sequence may get."""
        named = (
            sequence.request.params.speculation.drafter is not None or draft_plan.drafter not in self.choices
        )
        return (draft_plan.drafter,) if named else self.choices

    def _shaped(
        self, draft_plan: DraftPlan, drafter: str, depth: int, reason: Reason, batch: int
    ) -> DraftPlan:
        """A chain, or a tree where its rows cost little."""
        if not depth:
            return NO_DRAFT_PLAN
        guards, step, nodes = self.guards, self.costs.step, min(2 * depth, MAX_NODES)
        tree = reason.kind == "pays" and batch <= guards.tree_batch and draft_plan.mode != "rejection"
        cheap = tree and step(batch + nodes) <= guards.tree_cost * step(batch + depth)
        return replace(draft_plan, drafter=drafter, nodes=nodes if cheap else depth, depth=depth)
