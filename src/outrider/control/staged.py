"""Plans of staged rows. They are eager, so each sequence has a drafter and a depth of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

from outrider.control.acceptance import AcceptanceRate
from outrider.control.known import Known
from outrider.control.probes import probe_due
from outrider.control.reasons import NOTHING_FOUND
from outrider.types import MAX_NODES, Options, Reason, Sequence

UNLIKELY = 0.02  # survival below which no level is looked at: nobody's rows are that cheap

# Times what a drafter has to read first that it must earn for a text it has not drafted for: how often it will be right
# there, and how long the answer becomes, are guesses.
UNTRIED = 2.0
SHALLOW = 3  # levels, at most, of a draft for whom none was right so far

# Who may get a draft, by place in the work: the sequence, and its drafters.
Left = Mapping[int, tuple[Sequence, Seq[str]]]


class Offer(NamedTuple):
    """What a sequence may expect of a drafter, as far as that can draft."""

    worth: float  # accepted tokens
    drafter: str
    survivals: tuple[float, ...]  # by level
    spared: bool  # it has shown for a while that it does not pay here
    deepest: int  # level that may be drafted
    unproven: bool  # which is not as deep as it could: nothing of it was right so far


class Depths(NamedTuple):
    """A depth for each, and what one more level would have to bring."""

    speed: float  # expected tokens a second
    tokens: float  # expected
    by_item: Mapping[int, int]
    row: float  # seconds that one more row takes
    needed: float  # speed-up that one more must bring
    stretched: float = 0.0  # in times of a plain step: a better plan, left for whom it would hold up

    def break_even(self, level: float) -> float:
        """The least chance of a next guess that pays, where drafting it takes so many seconds."""
        return (self.needed - 1) * self.tokens + self.needed * self.speed * (self.row + level)


class StepRows(NamedTuple):
    """What a step has before anybody's draft is chosen."""

    batch: int  # sequences that get a token
    asked: int = 0  # nodes of drafts that requests fixed
    prompt: int = 0  # rows of prompt chunks beyond one each of those sequences
    joining: int = 0  # sequences whose prompts are read in it or wait


class StagedPlans:
    def __init__(self, known: Known) -> None:
        self.guards, self.costs, self.rates, self.fairness, self.lengths = known
        self.joined = "none"  # the drafter that takes passes, of the last plan
        self.drafting = False  # whether the last plan had a draft that pays

    def plan(self, left: Left, step: StepRows, options: Options) -> Iterator[tuple[int, str, int, Reason]]:
        """Drafter, depth and reason for each. Of drafters that take passes one joins those that somebody has no choice
        but to use, if that brings more tokens per second.
        """
        guards, before, batch = self.guards, self.joined, step.batch
        took, room = self._times(step), self._room(step)
        seconds, needed = took(0), guards.break_even if not self.drafting else 1.0
        offers, nothing = self._all_offers(left, step, took, needed, options)
        serving = {*options.model_free, *(names[0] for _, names in left.values() if len(names) == 1)}
        further = {offer.drafter for some in offers.values() for offer in some} - serving
        late = self.fairness.stretched({s for s, _ in left.values()}) if batch > 1 else set()
        best, speedup = Depths(batch / seconds, batch, {}, max(took(1) - seconds, 0.0), needed), 1.0
        served: dict[int, Offer] = {}
        self.joined = "none"
        for name in ("none", *sorted(further)):
            taken = {
                i: max(mine)
                for i, some in offers.items()
                if (mine := [o for o in some if o.drafter == name or o.drafter in serving])
            }
            if not taken:
                continue
            found = self._depths(taken, batch, room, took, {i for i in left if left[i][0] in late})
            switch = guards.switch ** ((self.joined == before) - (name == before))
            pays = found.speed * seconds / batch > max(switch * speedup, needed)
            alone = speedup * batch / seconds
            if pays and self._earns(name, found, alone, taken, left, options, step.joining):
                self.joined, speedup, best = name, found.speed * seconds / batch, found
                served = taken
            elif found.stretched > best.stretched:
                best = best._replace(stretched=found.stretched)
        self.drafting = bool(best.by_item)
        for i, (sequence, names) in left.items():
            depth = best.by_item.get(i, 0)
            offer = served[i] if depth else max(offers[i], default=None)
            drafter = offer.drafter if offer and depth else "none"
            costly = [name for name in names if name not in (drafter, *options.model_free)]
            if depth and drafter not in options.model_free:
                depth = min(depth, self.guards.start_depth + self.rates.of(sequence, drafter).earned)
            probe = None if best.stretched else self._probe(sequence, costly, batch, speedup, options)
            if probe is not None:
                yield i, *probe
            else:
                yield (
                    i,
                    drafter,
                    depth,
                    nothing if offer is None else self._reason(sequence, offer, depth, best, batch),
                )

    def _earns(
        self,
        name: str,
        found: Depths,
        speed: float,
        taken: Mapping[int, Offer],
        left: Left,
        options: Options,
        joining: int,
    ) -> bool:
        """Whether these depths earn what a drafter has to read first, over the best without it. It drafts in as many of
        the steps to come as others have left it so far: text that is copied goes on being copied. While others are
        `joining`, nobody knows whether drafts will pay in the steps that they share.
        """
        some = [left[i][0] for i in found.by_item if taken[i].drafter == name]
        reading = sum(self.costs.eager_reading(name, options.behind(name, s)) for s in some)
        if not reading:
            return True
        if joining:
            return False
        step = found.tokens / found.speed
        free = sum(self.rates.left_to(s, name) for s in some) / len(some)
        so_far = max((len(s.tokens) - s.prompt_len) / max(s.steps, 1) for s in some)  # tokens of a step
        pace = max(found.tokens / len(left), so_far)
        steps = free * self.lengths.steps_left(some, pace)
        tried = all(self.rates.of(s, name).used for s in some)
        return (1 - speed / found.speed) * steps * step > reading * (1.0 if tried else UNTRIED)

    def _times(self, step: StepRows) -> Callable[[int], float]:
        """Seconds that a step counts for, by the draft rows that it gets. What prompt rows take is spent in any case,
        so that it is left out. Draft rows beside them count for less than they take: a token that comes with them saves
        its request a step that is much longer than others.
        """
        costs, (batch, asked, prompt, _) = self.costs, step
        plain, rows = costs.ragged_plain(batch), batch + asked
        if not prompt:
            return lambda n: costs.step(rows + n) if asked or n else plain
        beside = costs.step(batch + prompt)
        share = 1 / self.guards.worth_beside_prompts
        return lambda n: plain + share * max(costs.step(rows + prompt + n) - beside, 0.0)

    def _all_offers(
        self, left: Left, step: StepRows, took: Callable[[int], float], needed: float, options: Options
    ) -> tuple[dict[int, list[Offer]], Reason]:
        """What each may expect, and why others may expect nothing: there is nothing to propose, or nobody needs to
        look, as no draft would pay.
        """
        rates: dict[str, list[AcceptanceRate]] = {}
        for sequence, names in left.values():
            for name in names:
                rates.setdefault(name, []).append(self.rates.of(sequence, name))
        levels = self.costs.per_level
        hopeless = {
            name
            for name, some in rates.items()
            if not self._might_pay(some, step.batch, took, needed, levels.get(name, 0.0))
        }
        found: dict[int, list[Offer]] = {i: [] for i in left}
        nothing = NOTHING_FOUND
        if hopeless:
            nothing = self._hopeless({name: rates[name] for name in hopeless}, step.batch, took, needed)
        if len(hopeless) == len(rates):
            return found, nothing
        model_free = [
            rate for name in options.model_free if name not in hopeless for rate in rates.get(name, ())
        ]
        shallow = self._shallow(step, sum(not rate.proven for rate in model_free)) if model_free else 0
        for i, (sequence, names) in left.items():
            some = (self._offer(sequence, name, shallow, options) for name in names if name not in hopeless)
            found[i] = [offer for offer in some if offer is not None]
        return found, nothing

    def _hopeless(
        self,
        rates: Mapping[str, list[AcceptanceRate]],
        batch: int,
        took: Callable[[int], float],
        needed: float,
    ) -> Reason:
        """Why nobody's draft would pay: by the drafter that is right most often."""
        name = max(rates, key=lambda one: max(rate.first for rate in rates[one]))
        plain = Depths(batch / took(0), batch, {}, max(took(1) - took(0), 0.0), needed)
        facts = (
            ("next guess", max(rate.first for rate in rates[name])),
            ("break-even", plain.break_even(self.costs.per_level.get(name, 0.0))),
        )
        spared = all(rate.drafts >= self.guards.patience for rate in rates[name])
        return Reason("low gain" if spared else "below break-even", 0, facts)

    def _room(self, step: StepRows) -> int:
        """Draft rows that a step may have. Beside prompts as many as may hold up their first tokens."""
        if not step.prompt:
            return MAX_NODES
        rows = sum(step)
        plain = self.costs.step(rows)
        row = max(self.costs.step(rows + 1) - plain, 1e-9)
        return min(MAX_NODES, int((self.guards.hold_up - 1) * plain / row))

    def _shallow(self, step: StepRows, sequences: int) -> int:
        """How deep so many may be tried of which no draft was right so far."""
        rows, most = sum(step), self.guards.unproven_stretch
        longest = most * self.costs.step(rows)
        return next((n for n in range(SHALLOW, 0, -1) if self.costs.step(rows + n * sequences) <= longest), 0)

    def _might_pay(
        self,
        rates: Seq[AcceptanceRate],
        batch: int,
        took: Callable[[int], float],
        needed: float,
        level: float,
    ) -> bool:
        """Whether a draft for one or for all would, were everybody's as good as the best and did drafting a level take
        so many seconds: else there is nothing to look for, which takes longer than to know this.
        """
        first, further = max(rate.first for rate in rates), max(rate.next for rate in rates)
        limit = needed * batch / took(0)  # tokens a second
        for each in {1, batch}:
            rows, tokens, chance, drafting = 0, float(batch), first, 0.0
            while chance >= UNLIKELY and rows < MAX_NODES:
                rows, tokens, chance = rows + each, tokens + each * chance, chance * further
                drafting += level
                if tokens > limit * (took(rows) + drafting):
                    return True
        return False

    def _reason(self, sequence: Sequence, offer: Offer, depth: int, best: Depths, batch: int) -> Reason:
        """A draft is as deep as the next guess is more likely than what it must bring."""
        likely = offer.survivals[depth] if depth < len(offer.survivals) else 0.0
        facts = (
            ("temperature", sequence.request.params.temperature),
            ("next guess", likely),
            ("break-even", best.break_even(self.costs.per_level.get(offer.drafter, 0.0))),
        )
        if offer.unproven and not depth:
            return Reason("unproven", 0, facts)
        if best.stretched:
            bound = round(self.guards.stretch(batch), 2)
            return Reason("stretch", depth, (("stretch", best.stretched, bound), *facts))
        if depth:
            return Reason("pays", depth, facts)
        return Reason("low gain" if offer.spared else "below break-even", 0, facts)

    def _offer(self, sequence: Sequence, name: str, shallow: int, options: Options) -> Offer | None:
        """None where there is nothing to propose. Those that are scored anyway are tried no deeper than `shallow`
        before anything of theirs was right.
        """
        rate, deepest = self.rates.of(sequence, name), min(self.guards.max_depth, sequence.remaining)
        survivals, unproven = rate.survivals(deepest, UNLIKELY), False
        if name in options.model_free and survivals:
            survivals = survivals[: options.found(name, sequence, len(survivals))]
            unproven = not rate.proven and len(survivals) > shallow
        if not survivals:
            return None
        spared = rate.drafts >= self.guards.patience
        usable = survivals[:shallow] if unproven else survivals
        return Offer(self.kept(rate, sum(usable)), name, survivals, spared, len(usable), unproven)

    def kept(self, rate: AcceptanceRate, tokens: float) -> float:
        """What a drafter is worth to a sequence: more while it has it, so that it does not change for nothing."""
        return tokens * (self.guards.switch if rate.idle == 0 else 1.0)

    def _depths(
        self,
        offers: Mapping[int, Offer],
        batch: int,
        room: int,
        took: Callable[[int], float],
        late: set[int],
    ) -> Depths:
        """A depth for each: draft tokens by descending survival while expected tokens per second rise. Whoever is late
        may not be held up by a step that takes longer than its own tokens are worth.
        """
        nodes = sorted(
            ((s, -k, i) for i, o in offers.items() for k, s in enumerate(o.survivals[: o.deepest], 1)),
            reverse=True,
        )
        best, depths, taken = (0.0, float(batch), 0), dict[int, int](), dict[int, int]()
        levels, tokens, gain = Counter[str](), float(batch), dict.fromkeys(late, 0.0)
        # Tokens of each; of all, the sum of 1 / tokens.
        expected, waits = dict.fromkeys(offers, 1.0), float(batch)
        stretched, rest = 0.0, sum(survival for survival, _, _ in nodes)
        by_tokens = self.guards.objective == "throughput"

        stretched, plain = 0.0, took(0)
        bound = self.guards.stretch(batch) * plain
        for n, (survival, minus_depth, i) in enumerate(nodes[:room], 1):
            tokens, taken[i], name = tokens + survival, -minus_depth, offers[i].drafter
            waits += 1 / (expected[i] + survival) - 1 / expected[i]
            expected[i] += survival
            levels[name] = max(levels[name], taken[i])
            if i in gain:
                gain[i] += survival
            seconds = took(n) + self.costs.drafting(levels)
            speed = self._speed(tokens, waits, batch, seconds)
            rest -= survival
            if by_tokens and tokens + rest <= best[0] * seconds:
                break  # all that is left, accepted for nothing, would not make up for it
            if speed > best[0]:
                if gain and seconds > bound * (1 + min(gain.values())):
                    stretched = max(stretched, seconds / plain)
                    continue
                best, depths = (speed, tokens, n), dict(taken)
        speed, tokens, n = best
        row = max(took(n + 1) - took(n), 0.0)
        return Depths(speed, tokens, depths, row, 1.0, stretched)

    def _speed(self, tokens: float, waits: float, batch: int, seconds: float) -> float:
        """Tokens per second of all; or of one, by its mean time per token, as many times as there are."""
        return (tokens if self.guards.objective == "throughput" else batch * batch / waits) / seconds

    def _probe(
        self, sequence: Sequence, names: Seq[str], batch: int, speedup: float, options: Options
    ) -> tuple[str, int, Reason] | None:
        """A drafter that takes passes and may be tried again for this sequence, among so many, and how deep."""
        costs, guards = self.costs, self.guards
        for name in names:
            rate = self.rates.of(sequence, name)
            if rate.idle / batch < guards.probe_interval:  # most steps: what follows takes the host longer
                continue
            plain = costs.step(batch)
            for depth in (guards.probe_depth, 1):
                ratio = (costs.step(batch + depth) + costs.drafting({name: depth})) / plain
                if ratio <= guards.costly_probe:
                    break
            delay = costs.eager_reading(name, options.behind(name, sequence)) / plain
            lost = ratio - 1 + delay + (1 - 1 / speedup) / batch
            spared = rate.drafts >= guards.patience
            if probe_due(guards, rate.idle / batch, lost, speedup, [sequence], spared):
                return name, depth, Reason("probe", depth, (("drafter", name), ("idle steps", rate.idle)))
        return None
