"""The planner: which drafter, how deep and how wide, for every sequence of a step. No torch.

It takes the drafts with the most expected tokens per second: tokens by acceptance rates (acceptance.py), seconds by the
cost model (costs.py). No draft at all is one of the choices; a probe now and then keeps it from being for ever. A
request that names no drafter gets any of the engine's. Those that take no pass are scored on what was verified, asked
or not, so they need no probes; of the others one serves a step. Staged rows are ragged, so each sequence has a drafter
and a depth of its own. Resident rows are captured together and share one tree; beside a chain's drafter those that take
no pass may serve. What a request fixes itself (drafter, depth, nodes, tree) is done as asked.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from math import inf, prod
from typing import NamedTuple

from outrider.control.acceptance import AcceptanceRate, AcceptanceRates, deviation
from outrider.control.costs import CostModel
from outrider.control.guards import Guards
from outrider.control.trees import NO_TREE, TreeShape
from outrider.types import MAX_NODES, NO_BET, Bet, Options, Plan, Sequence, StepRecord, Work

MAX_PROMPT_ROWS = 1 << 20  # more than any step has

Choice = tuple[Bet, str]  # a bet and its reason; "auto": only the drafter is settled


class Candidate(NamedTuple):
    speedup: float  # over plain decoding
    drafter: str
    tree: TreeShape
    delay: float  # plain steps' time until the drafter has caught up


class Offer(NamedTuple):
    """What a staged sequence may expect of a drafter, as far as that can draft."""

    worth: float  # accepted tokens
    drafter: str
    survivals: tuple[float, ...]  # by level


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
        self.guards, self.costs, self.rates = guards or Guards(), CostModel(), AcceptanceRates()
        self.learn, self.learn_reading = self.costs.learn, self.costs.learn_reading
        # Resident: plain steps' time since the last probe.
        self.idle_time: defaultdict[str, float] = defaultdict(float)
        self.joined = "none"  # the drafter that takes passes, of the last plan
        self.speedup = 1.0  # expected of the last resident plan: what a probe must beat

    def plan(self, work: Seq[Work], options: Options) -> Plan:
        """One bet and one reason for each item of work."""
        sequences, batch, self.rates.scored = [item.sequence for item in work], len(work), options.riding
        found = [self._settled(item, options.is_resident(i), batch) for i, item in enumerate(work)]
        resident = [i for i, item in enumerate(work) if item.emits and options.is_resident(i)]
        if resident:
            chosen = self._resident([sequences[i] for i in resident], [found[i] for i in resident], options)
            for i, choice in zip(resident, chosen, strict=True):
                found[i] = choice
        left = {
            i: (sequences[i], self._allowed(sequences[i], one))
            for i, one in enumerate(found)
            if one[1] == "auto"
        }
        rows = batch + sum(bet.nodes for bet, _ in found)
        for i, drafter, depth, reason in self._staged(left, batch, rows, options) if left else ():
            found[i] = self._shaped(found[i][0], drafter, depth, reason, batch), reason
        return Plan(tuple(bet for bet, _ in found), tuple(reason for _, reason in found))

    def unmeasured(self, work: Seq[Work], options: Options) -> str:
        """A drafter whose captured steps of this size must be measured before a plan is made, or "none"."""
        if all((name, options.size) in self.costs.measured for name in options.trees):
            return "none"
        for i, item in enumerate(work):
            if options.is_resident(i):
                for name in self._allowed(item.sequence, self._settled(item, True, len(work))):
                    if name in options.trees and (name, options.size) not in self.costs.measured:
                        return name
        return "none"

    def prompt_rows(self, decoding: int, waited: float) -> int:
        """Prompt rows that a step may have beside so many decoding sequences: more the longer a prompt has waited."""
        guards = self.guards
        if guards.prefill_stretch == inf:
            return MAX_PROMPT_ROWS
        share = guards.prefill_stretch * max(1.0, waited / guards.prefill_wait)
        rows = self.costs.prompt_rows(decoding, share, MAX_PROMPT_ROWS)
        return max(rows, guards.min_prompt_rows)

    def forget(self, sequence: Sequence) -> None:
        self.rates.forget(sequence)

    def forget_drafter(self, name: str) -> None:
        """It drafts with other weights now, alone or merged with others: what it achieved says nothing any more."""
        self.rates.forget_drafter(name)
        for known in self.idle_time:
            if name in known.split("+"):
                self.idle_time[known] = inf  # so that one that did not pay is tried again

    def observe(self, record: StepRecord) -> None:
        if record.catch_up is not None:
            self.learn_reading(*record.catch_up)
        self.costs.observe(record)
        record.plain_s = self.costs.plain_seconds(record)
        drafter, tree, size = record.captured or ("none", NO_TREE, 0)
        alive: list[AcceptanceRate] = []
        for o in record.outcomes:
            resident = o.bet.nodes > 0 and o.bet.drafter == drafter  # its rows ran, drafted or not
            if resident or o.drafted:
                # A captured tree is valued by the rate of first choices, a grown one by the depth it reached.
                accepted = o.straight if resident else o.accepted
                self.rates.observe(o.sequence, o.bet.drafter, o.deepest, accepted)
            if not o.sequence.finish_reason:  # else already forgotten
                alive += [self.rates.of(o.sequence, drafter)] if resident else []
                self.rates.note(o.sequence, o.bet.drafter if o.drafted else "none")
        for o in record.scored:
            if o.drafted or record.captured is not None:  # a captured step has rows for it, drafted or not
                self.rates.observe(o.sequence, o.bet.drafter, o.deepest, o.accepted)
        if record.captured is not None:
            ratio = self.costs.ratio(drafter, tree, size)
            for name in {*self.idle_time, *self.choices}:
                self.idle_time[name] += ratio * record.passes
            if tree != NO_TREE:  # a probe that paid is followed by another
                risk = self._risk(drafter, alive, [rate.accepted(tree) for rate in alive])
                paid = record.emitted / record.sequences - risk > ratio * self.speedup
                self.idle_time[drafter] = inf if paid else 0.0

    def _settled(self, item: Work, resident: bool, batch: int) -> Choice:
        """What the request or a guard settles at once; reason "auto" leaves depth and tree to measurement."""
        params, asked = item.sequence.request.params, item.sequence.request.params.speculation
        name = asked.drafter or self.default
        if not item.emits:
            return NO_BET, "prefill"
        if name == "none" or asked.off:
            return NO_BET, "off"
        depth, nodes = asked.depth or self.depth, asked.nodes or self.nodes
        if asked.tree is not None:
            nodes = sum(prod(asked.tree[: k + 1]) for k in range(len(asked.tree)))
            return Bet(name, nodes, len(asked.tree), asked.tree, asked.mode), "asked"
        if depth or nodes:
            depth = min(depth or self.guards.max_depth, nodes or MAX_NODES)
            free = asked.mode != "rejection"  # the ratio test must not choose nodes by looking at them
            return Bet(name, (nodes or depth) if free else depth, depth, None, asked.mode), "asked"
        if batch > self.guards.max_batch and not resident:
            return NO_BET, "batch"
        if params.temperature > self.guards.max_temperature:
            return NO_BET, "temperature"
        return Bet(name, mode=asked.mode), "auto"

    # ------------------------------------------------------------------------------------------- staged rows

    def _staged(
        self, left: Mapping[int, tuple[Sequence, Seq[str]]], batch: int, rows: int, options: Options
    ) -> Iterator[tuple[int, str, int, str]]:
        """Drafter, depth and reason for each. Of drafters that take passes one joins those that somebody has no choice
        but to use, if that brings more tokens per second.
        """
        offers = {i: self._offers(*one, options) for i, one in left.items()}
        serving = {*options.riding, *(names[0] for _, names in left.values() if len(names) == 1)}
        further = {offer.drafter for some in offers.values() for offer in some} - serving
        plain, before = batch / self.costs.step(rows), self.joined
        self.joined, speedup, served = "none", 1.0, dict[int, tuple[str, int]]()
        for name in ("none", *sorted(further)):
            taken = {
                i: max(mine)
                for i, some in offers.items()
                if (mine := [o for o in some if o.drafter == name or o.drafter in serving])
            }
            speed, depths = self._depths(taken, batch, rows)
            switch = self.guards.switch ** ((self.joined == before) - (name == before))
            if speed / plain > max(switch * speedup, self.guards.break_even):
                self.joined, speedup = name, speed / plain
                served = {i: (taken[i].drafter, depth) for i, depth in depths.items()}
        for i, (sequence, names) in left.items():
            drafter, depth = served.get(i, ("none", 0))
            costly = [name for name in names if name not in (drafter, *options.riding)]
            if probe := self._staged_probe(sequence, costly, batch, speedup, options):
                yield i, *probe, "probe"
            elif depth:
                yield i, drafter, depth, "pays"
            else:
                yield i, "none", 0, "below break-even" if offers[i] else "nothing found"

    def _offers(self, sequence: Sequence, names: Seq[str], options: Options) -> list[Offer]:
        found = []
        for name in names:
            depth = self.guards.depth_at(sequence.request.params.temperature)
            if name in options.riding:
                depth = options.found(name, sequence, depth)
            if depth:
                rate = self.rates.of(sequence, name)
                survivals = tuple(map(rate.survival, range(1, depth + 1)))
                found.append(Offer(self._kept(rate, sum(survivals)), name, survivals))
        return found

    def _kept(self, rate: AcceptanceRate, tokens: float) -> float:
        """What a drafter is worth to a sequence: more while it has it, so that it does not change for nothing."""
        return tokens * (self.guards.switch if rate.idle == 0 else 1.0)

    def _depths(self, offers: Mapping[int, Offer], batch: int, rows: int) -> tuple[float, dict[int, int]]:
        """A depth for each: draft tokens by descending survival while expected tokens per second rise."""
        survivals = [(s, -k, i) for i, o in offers.items() for k, s in enumerate(o.survivals, 1)]
        best, depths, taken = 0.0, dict[int, int](), dict[int, int]()
        levels, tokens = Counter[str](), float(batch)
        for n, (survival, minus_depth, i) in enumerate(sorted(survivals, reverse=True), 1):
            tokens, taken[i], name = tokens + survival, -minus_depth, offers[i].drafter
            levels[name] = max(levels[name], taken[i])
            speed = tokens / (self.costs.step(rows + n) + self.costs.drafting(levels))
            if speed > best:
                best, depths = speed, dict(taken)
        return best, depths

    def _staged_probe(
        self, sequence: Sequence, names: Seq[str], batch: int, speedup: float, options: Options
    ) -> tuple[str, int] | None:
        """A drafter that takes passes and may be tried again for this sequence, among so many, and how deep."""
        costs, plain = self.costs, self.costs.step(batch)
        for name in names:
            for depth in (self.guards.probe_depth, 1):
                ratio = (costs.step(batch + depth) + costs.drafting({name: depth})) / plain
                if ratio <= self.guards.costly_probe:
                    break
            delay = costs.reading(name, options.behind(name, sequence)) / plain
            lost = ratio - 1 + delay + (1 - 1 / speedup) / batch
            if self._due(self.rates.of(sequence, name).idle / batch, lost, speedup, [sequence]):
                return name, depth
        return None

    def _shaped(self, bet: Bet, drafter: str, depth: int, reason: str, batch: int) -> Bet:
        """A chain, or a tree where its rows cost little."""
        if not depth:
            return NO_BET
        guards, step = self.guards, self.costs.step
        tree = reason == "pays" and batch <= guards.tree_batch and bet.mode != "rejection"
        cheap = tree and step(batch + 2 * depth) <= guards.tree_cost * step(batch + depth)
        return replace(bet, drafter=drafter, nodes=2 * depth if cheap else depth, depth=depth)

    # ----------------------------------------------------------------------------------------- resident rows

    def _resident(self, sequences: Seq[Sequence], settled: Seq[Choice], options: Options) -> list[Choice]:
        """What is settled, and for the others the best drafter and tree."""
        allowed = [self._allowed(*one) for one in zip(sequences, settled, strict=True)]
        names = list(dict.fromkeys(name for some in allowed for name in some))
        asked = Counter(bet.drafter for bet, why in settled if why == "asked")
        if asked and names:  # one drafter for all: the one most asked for, named or not
            asked += Counter(bet.drafter for bet, why in settled if why == "auto")
            names = [asked.most_common(1)[0][0]]
        depths = (bet.depth for bet, why in settled if why == "asked" and bet.drafter in names)
        fixed = min(max(depths, default=0), options.max_depth)
        best, reason = Candidate(1.0, "none", NO_TREE, 0.0), "unmeasured"
        mine = list(zip(sequences, allowed, strict=True))
        if names and (fixed or self.costs.plain(options.size) is not None):
            candidates = [self._candidate(name, mine, fixed, options) for name in names]
            switch = {self.joined: self.guards.switch}
            best = max(candidates, key=lambda one: one.speedup * switch.get(one.drafter, 1.0))
            self.speedup, reason = best.speedup, "pays" if best.tree[1] or fixed else "below break-even"
            self.joined = best.drafter if best.tree[1] else "none"
            if not fixed and (probe := self._probe(best, candidates, sequences, options)):
                best, reason = probe, "probe"
        depth, nodes = best.tree
        found = list(settled)
        for i, (bet, why) in enumerate(settled):
            if why == "auto":
                first = best.drafter in allowed[i] and reason == "probe"
                drafter = best.drafter if first else self._serving(*mine[i], best.drafter, best.tree, options)
                found[i] = Bet(drafter, nodes, depth, None, bet.mode) if nodes and drafter else NO_BET, reason
        return found

    def _serving(
        self, sequence: Sequence, allowed: Seq[str], drafter: str, tree: TreeShape, options: Options
    ) -> str:
        """Of a step's drafters the one that brings most: beside a chain's, those that take no pass may serve."""
        names = [name for name in (drafter, *options.riding) if name in allowed]
        if tree[0] != tree[1]:
            names = names[: drafter in allowed]
        if len(names) < 2:
            return names[0] if names else ""
        rates = {name: self.rates.of(sequence, name) for name in names}
        return max(names, key=lambda name: self._kept(rates[name], rates[name].accepted(tree)))

    def _allowed(self, sequence: Sequence, settled: Choice) -> tuple[str, ...]:
        """Drafters that a sequence may get; none where its bet is settled."""
        bet, why = settled
        named = sequence.request.params.speculation.drafter is not None or bet.drafter not in self.choices
        return () if why != "auto" else (bet.drafter,) if named else self.choices

    def _candidate(
        self, name: str, mine: Seq[tuple[Sequence, Seq[str]]], fixed: int, options: Options
    ) -> Candidate:
        """The best tree for these, in a step that is `fixed` levels deep for others."""
        sequences = [sequence for sequence, allowed in mine if name in allowed]
        trees = options.trees.get(name, ())
        if fixed:
            trees = tuple(tree for tree in trees if tree[0] == tree[1] <= fixed)
        speedups = {}
        for tree in (NO_TREE, *trees):
            serving = [(s, self._serving(s, names, name, tree, options)) for s, names in mine]
            rates = [self.rates.of(*one) for one in serving if one[1]]
            accepted = [rate.accepted(tree) for rate in rates]
            risk = 0.0 if fixed else len(rates) * self._risk(name, rates, accepted)
            ratio = self.costs.ratio(name, max(tree, (fixed, fixed)), options.size)
            speedups[tree] = (1 + (sum(accepted) - risk) / len(mine)) / ratio
        best = max(speedups, key=speedups.__getitem__)
        delay = 0.0
        if not fixed:
            behind = sum(options.behind(name, sequence) for sequence in sequences)
            delay = self.costs.reading(name, behind) / (self.costs.plain(options.size) or 1.0)
            steps = min(self.guards.payback_steps, _tokens_left(sequences) / speedups[best])
            best = best if (1 - speedups[NO_TREE] / speedups[best]) * steps > delay else NO_TREE
        return Candidate(speedups[best], name, best, delay)

    def _risk(self, drafter: str, rates: Seq[AcceptanceRate], accepted: Seq[float]) -> float:
        """What to subtract from the mean of accepted tokens, one standard deviation: sequences with low acceptance
        finish last, in a batch that has shrunk. Of a drafter that was hardly tried nobody knows how sequences differ.
        """
        known = len(rates) > 1 and self.rates.trials[drafter] >= self.guards.min_trials
        return deviation(rates, accepted) if known else 0.0

    def _probe(
        self, best: Candidate, candidates: Seq[Candidate], sequences: Seq[Sequence], options: Options
    ) -> Candidate | None:
        """A drafter that is not in use and may be tried again. None of its draft is expected to be accepted."""
        guards, size = self.guards, options.size
        for one in candidates:
            trees = options.trees.get(one.drafter, ())
            if not trees or (best.tree != NO_TREE and one.drafter == best.drafter):
                continue
            tree = guards.probe_depth, guards.probe_depth
            if tree not in trees or self.costs.ratio(one.drafter, tree, size) > guards.costly_probe:
                tree = min(trees)
            lost = self.costs.ratio(one.drafter, tree, size) - 1 / best.speedup + one.delay
            if self._due(self.idle_time[one.drafter], lost, best.speedup, sequences):
                self.idle_time[one.drafter] = 0.0  # at once: what comes of it is known a step later
                return one._replace(tree=tree)
        return None

    def _due(self, idle: float, lost: float, speedup: float, sequences: Seq[Sequence]) -> bool:
        """Whether a probe that loses so much may be made after so long; both in plain steps' time."""
        guards = self.guards
        share = guards.spare_probe_share if speedup > 1 else guards.probe_share
        longest = max(1.0, guards.probe_answer_share * _tokens_left(sequences) / speedup)
        return idle >= max(guards.probe_interval, lost / share) and lost <= longest


def _tokens_left(sequences: Seq[Sequence]) -> float:
    """Of one answer, at most, on average."""
    left = sum(s.remaining for s in sequences)
    return left / max(len(sequences), 1)
