"""Plans of resident rows. They are captured together and share one draft tree; beside a chain's drafter those that take
no pass may serve. Sequences share the plan's reason, too: it is made for all of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence as Seq
from math import inf
from typing import NamedTuple

import numpy as np

from outrider.control.acceptance import AcceptanceRate, risk
from outrider.control.known import Known
from outrider.control.probes import probe_due
from outrider.control.serving import Mine, Serving
from outrider.control.trees import NO_TREE, TreeShape
from outrider.types import NO_DRAFT_PLAN, DraftPlan, Options, Reason, Sequence, StepRecord

Choice = tuple[DraftPlan, Reason]


class Candidate(NamedTuple):
    speedup: float  # over plain decoding
    drafter: str
    tree: TreeShape
    delay: float  # plain steps' time until the drafter has caught up
    promised: tuple[float, float]  # accepted tokens of a sequence by the best tree, and as many as pay for it
    stretched: float = 0.0  # in times of a plain step: a better tree, left for whom it would hold up
    serving: Serving | None = None  # who drafts for whom in its trees


NONE = Candidate(1.0, "none", NO_TREE, 0.0, (0.0, 0.0))


class ResidentPlans:
    def __init__(self, known: Known) -> None:
        self.guards, self.costs, self.rates, self.fairness, self.lengths = known
        # Plain steps' time since the last probe.
        self.idle_time: defaultdict[str, float] = defaultdict(float)
        self.joined = "none"  # the drafter that takes passes, of the last plan
        self.speedup = 1.0  # expected of the last plan: what a probe must beat

    def plan(
        self,
        sequences: Seq[Sequence],
        settled: Seq[Choice],
        allowed: Seq[Seq[str]],
        options: Options,
        held_up: int,
    ) -> list[Choice]:
        """What is settled, and for the others the best drafter and tree. A longer step is one for those as well whose
        prompts are read in it or wait, and they gain nothing: so many are `held_up`.
        """
        names = list(dict.fromkeys(name for some in allowed for name in some))
        asked = Counter(draft_plan.drafter for draft_plan, why in settled if why.kind == "asked")
        if asked and names:  # one drafter for all: the one most asked for, named or not
            asked += Counter(draft_plan.drafter for draft_plan, why in settled if why.kind == "auto")
            names = [asked.most_common(1)[0][0]]
        depths = (
            draft_plan.depth
            for draft_plan, why in settled
            if why.kind == "asked" and draft_plan.drafter in names
        )
        fixed = min(max(depths, default=0), options.max_depth)
        best, reason = NONE, Reason("unmeasured", 0, (("sequences", options.size),))
        mine = list(zip(sequences, allowed, strict=True))
        if names and (fixed or self.costs.plain(options.size) is not None):
            candidates = [self._candidate(name, mine, fixed, options, held_up) for name in names]
            switch = {self.joined: self.guards.switch}
            best = max(candidates, key=lambda one: one.speedup * switch.get(one.drafter, 1.0))
            if not fixed and self.joined == "none" and best.speedup < self.guards.break_even:
                best = best._replace(speedup=1.0, tree=NO_TREE)
            self.speedup, self.joined = best.speedup, best.drafter if best.tree[1] else "none"
            reason = self._reason(best, mine, fixed)
            # A probe would hold others up as well.
            late = any(one.stretched for one in candidates) or held_up > len(mine)
            if not fixed and not late and (probe := self._probe(best, candidates, mine, options)):
                best, idle = probe
                waited = ("after one that paid", "") if idle == inf else ("idle steps", round(idle))
                reason = Reason("probe", best.tree[0], (("drafter", best.drafter), waited))
        return self._bets(best, reason, mine, settled, options)

    def _bets(
        self, best: Candidate, reason: Reason, mine: Mine, settled: Seq[Choice], options: Options
    ) -> list[Choice]:
        (depth, nodes), found, probe = best.tree, list(settled), reason.kind == "probe"
        if not nodes:
            return [(NO_DRAFT_PLAN, reason) if one[1].kind == "auto" else one for one in settled]
        serving = best.serving
        if serving is None or best.tree not in serving.trees:
            serving = self._serving(best.drafter, mine, options, [best.tree])
        servers = serving.servers(best.tree)
        for i, (draft_plan, why) in enumerate(settled):
            if why.kind == "auto":
                drafter = best.drafter if best.drafter in mine[i][1] and probe else servers[i]
                found[i] = (
                    DraftPlan(drafter, nodes, depth, None, draft_plan.mode)
                    if nodes and drafter
                    else NO_DRAFT_PLAN,
                    reason,
                )
        return found

    def _reason(self, best: Candidate, mine: Mine, fixed: int) -> Reason:
        depth, (tokens, needed) = best.tree[0], best.promised
        facts: tuple[tuple[object, ...], ...] = (
            ("batch", len(mine)),
            ("drafter", best.drafter),
            ("expected tokens", 1 + tokens),
            ("break-even", needed),
        )
        if best.delay and not depth:
            facts = (*facts, ("catch-up steps", best.delay))
        if len(mine) == 1:
            facts = (("temperature", mine[0][0].request.params.temperature), *facts)
        if best.stretched:
            bound = round(self.guards.stretch(len(mine)), 2)
            return Reason("stretch", depth, (("stretch", best.stretched, bound), *facts))
        if depth or fixed:
            return Reason("pays", depth or fixed, facts)
        return Reason("low gain" if self._spared(best.drafter, mine) else "below break-even", 0, facts)

    def _spared(self, drafter: str, mine: Mine) -> bool:
        """Whether a request that is alone has shown for a while that this drafter does not pay."""
        return len(mine) == 1 and self.rates.of(mine[0][0], drafter).drafts >= self.guards.patience

    def _serving(self, drafter: str, mine: Mine, options: Options, trees: Seq[TreeShape]) -> Serving:
        return Serving(self.rates, mine, drafter, options.model_free, self.guards.switch, trees)

    def _candidate(self, name: str, mine: Mine, fixed: int, options: Options, held_up: int) -> Candidate:
        """The best tree for these, in a step that is `fixed` levels deep for others."""
        guards, sequences = self.guards, [sequence for sequence, allowed in mine if name in allowed]
        trees = [tree for tree in options.trees.get(name, ()) if tree[0] <= guards.max_depth or fixed]
        if fixed:
            trees = [tree for tree in trees if tree[0] == tree[1] <= fixed]
        elif len(mine) > guards.tree_batch:
            trees = [tree for tree in trees if tree[0] == tree[1]]
        late = self.fairness.stretched(set(sequences)) if len(mine) > 1 and not fixed else set()
        beside = self.costs.ratio(name, (fixed, fixed), options.size)
        speedups, promised, stretched = {NO_TREE: 1 / beside}, {NO_TREE: (0.0, beside)}, 0.0
        serving = self._serving(name, mine, options, trees)
        gains = serving.gains(guards.objective == "latency")
        if not fixed and len(mine) > 1 and self._is_known(name):
            gains = gains - serving.counts * serving.risks()
        least = serving.least(late).tolist() if late else [inf] * len(trees)
        for tree, gain, lowest in zip(trees, gains.tolist(), least, strict=True):
            ratio = self.costs.ratio(name, max(tree, (fixed, fixed)), options.size)
            tokens = 1 + gain / (len(mine) + held_up)
            if ratio > guards.stretch(len(mine)) * (1 + lowest):
                if tokens / ratio > max(speedups.values()):
                    stretched = ratio
                continue
            speedups[tree], promised[tree] = tokens / ratio, (tokens - 1, ratio)
        found = self._worthwhile(name, sequences, speedups, promised, stretched, fixed, options)
        return found._replace(serving=serving)

    def _worthwhile(
        self,
        name: str,
        sequences: Seq[Sequence],
        speedups: dict[TreeShape, float],
        promised: dict[TreeShape, tuple[float, float]],
        stretched: float,
        fixed: int,
        options: Options,
    ) -> Candidate:
        """The best tree, if it earns what its drafter has to read first; where none pays, the best says by how much."""
        best = max(speedups, key=speedups.__getitem__)
        shown = best if best != NO_TREE else max(speedups, key=lambda tree: (tree != NO_TREE, speedups[tree]))
        delay = 0.0
        if not fixed and name not in options.model_free:  # who takes no pass reads nothing
            behind = sum(options.behind(name, sequence) for sequence in sequences)
            delay = self.costs.reading(name, behind) / (self.costs.plain(options.size) or 1.0)
            if delay and best != NO_TREE:
                steps = self.lengths.steps_left(sequences, speedups[best])
                best = best if (1 - speedups[NO_TREE] / speedups[best]) * steps > delay else NO_TREE
        return Candidate(speedups[best], name, best, delay, promised[shown], stretched)

    def _is_known(self, drafter: str) -> bool:
        """Whether it was tried enough to tell how sequences differ, and so what the mean of them risks."""
        return self.rates.trials[drafter] >= self.guards.min_trials

    def _probe(
        self, best: Candidate, candidates: Seq[Candidate], mine: Mine, options: Options
    ) -> tuple[Candidate, float] | None:
        """A drafter that is not in use and may be tried again, and how long it was not. None of its draft is expected
        to be accepted.
        """
        guards, size = self.guards, options.size
        for one in candidates:
            trees = options.trees.get(one.drafter, ())
            # Who takes no pass is scored anyway, drafted or not, and serves beside the one that is in use.
            scored, pays = one.drafter in options.model_free, best.tree != NO_TREE
            if not trees or (scored and self._is_known(one.drafter)):
                continue
            if pays and (scored or one.drafter == best.drafter):
                continue
            idle = self.idle_time[one.drafter]
            if idle < guards.probe_interval:
                continue
            tree = guards.probe_depth, guards.probe_depth
            if tree not in trees or self.costs.ratio(one.drafter, tree, size) > guards.costly_probe:
                tree = min(trees)
            lost = self.costs.ratio(one.drafter, tree, size) - 1 / best.speedup + one.delay
            sequences = [sequence for sequence, _ in mine]
            spared = self._spared(one.drafter, mine)
            if probe_due(guards, idle, lost, best.speedup, sequences, spared):
                self.idle_time[one.drafter] = 0.0  # at once: what comes of it is known a step later
                return one._replace(tree=tree), idle
        return None

    def observe(self, record: StepRecord, choices: Seq[str], alive: Seq[AcceptanceRate]) -> None:
        """A captured step was settled; `alive`: rates of its drafter, of sequences that go on."""
        assert record.captured is not None
        drafter, tree, size = record.captured
        ratio = self.costs.ratio(drafter, tree, size)
        for name in {*self.idle_time, *choices}:
            self.idle_time[name] += ratio * record.passes
        if tree != NO_TREE:  # a probe that paid is followed by another
            short = 0.0
            if alive and self._is_known(drafter):
                numbers = np.array(
                    [(rate.accepted(tree), rate.first, rate.whole, rate.whole_weight) for rate in alive]
                )
                short = float(risk(*numbers.T))
            paid = record.emitted / record.sequences - short > ratio * self.speedup
            self.idle_time[drafter] = inf if paid else 0.0
