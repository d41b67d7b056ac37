"""How to guess in rounds on a device: which drafter, and in which form. No torch.

A round costs the same whoever guesses in it, so one drafter and one form, a chain or a tree, are chosen for all who
leave it open: those that promise the most tokens for their measured cost. Who names no drafter may have any of
`choices`. What is not in use is tried now and then, as often as a small share of the time allows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import inf, sqrt

from outrider.control.costs import RoundCosts
from outrider.control.forms import CHAINS, NO_FORM, Form, chance, ranks_of, shape_of
from outrider.types import NO_BET, Bet, Plan, Sequence, StepRecord

PROBE_FORM: Form = (2, 2)
DEAR = 1.3  # plain rounds' time from which a try makes do with less
PROBE = 24  # plain rounds' time without a guess of a drafter after which one is tried
PROBE_SHARE, SPARE_SHARE = 0.002, 0.01  # of the time, at most, for trying; more where guessing pays anyway
# Of what is left of the answers, at most, for one try that takes longer than a plain round.
PROBE_ANSWER = 0.005
FIRST, FURTHER = 0.6, 0.8  # what is hoped of guesses before any was made
HOPE_GROWS = 0.02
SHORT_MEMORY, LONG_MEMORY = 12, 200  # rounds: of one sequence, and of a drafter in general
HELD_UP = 1.5  # a round's time on the device, at most, that one is taken to cost
TRIED = 50  # rounds of single sequences that a drafter has guessed in before its risk counts
RAREST = 0.02  # chance of a guess to hold below which it makes no difference how seldom it does
HORIZON = 32  # rounds in which guessing must earn what a drafter has to read before it

Settled = list[tuple[Bet, str]]  # what requests fix themselves; "auto": nothing


@dataclass(slots=True)
class Habit:
    """How guesses made in rounds do: the first of a round, and each one after another that held."""

    first: float
    further: float
    weight: float = 4.0  # of what was believed before, in rounds

    def observe(self, guessed: int, accepted: int, memory: float) -> None:
        """A round that wanted guesses in a row; `guessed` 0: there were none, which costs as much as a wrong one."""
        self.first += ((accepted > 0) - self.first) / (self.weight + 1)
        for depth in range(1, min(accepted + 1, guessed)):
            self.further += ((accepted > depth) - self.further) / (self.weight + 1)
        if accepted == guessed:  # nobody knows what one more would have brought: hope grows again
            self.further += HOPE_GROWS * max(0.0, FURTHER - self.further)
        self.weight = min(self.weight + 1, memory)

    def tokens(self, form: Form) -> float:
        """Expected of a round with guesses of this form, beside the one that is sure."""
        if form[0] == form[1]:
            return sum(self.first * self.further**k for k in range(form[0]))
        reached: list[float] = []
        shape, ranks = shape_of(form), ranks_of(form)
        for depth, parent, rank in zip(shape.depths, shape.parents, ranks, strict=True):
            holds = self.first if depth == 1 else self.further
            reached.append(chance(rank, holds) * (reached[parent] if parent >= 0 else 1.0))
        return sum(reached)


@dataclass(slots=True)
class Offer:
    """The best a drafter can do in the next round."""

    name: str
    form: Form
    gain: float  # tokens for each that plain rounds would bring in the same time
    wait: float  # plain rounds' time until it can begin


class RoundPlanner:
    def __init__(self) -> None:
        self.costs = RoundCosts()
        self.choices: tuple[str, ...] = ()  # drafters that whoever names none may have
        self.habits: dict[Sequence, dict[str, Habit]] = {}
        self.general: dict[str, Habit] = {}  # what a new sequence starts from
        self.rested: dict[str, float] = {}  # by drafter: plain rounds' time since it was tried in vain
        self.measured: set[tuple[str, int]] = set()  # drafters, and sizes of their rounds
        self.reference = 1.0  # the gain of what was planned last: what a probe is held against

    def unmeasured(self, sequences: Seq[Sequence], settled: Settled, size: int) -> str:
        for name in _names(self._options(sequences, settled)):
            if (name, size) not in self.measured:
                return name
        return "none"

    def learn(self, drafter: str, size: int, costs: Iterable[tuple[str, Form, float]]) -> None:
        """What rounds of this size were measured to take."""
        self.measured.add((drafter, size))
        for name, form, seconds in costs:
            self.costs.observe(name, form, size, seconds)

    def read(self, drafter: str, tokens: int, seconds: float) -> None:
        """What it took a drafter to catch up."""
        self.costs.observe_reading(drafter, tokens, seconds)

    def plan(
        self,
        sequences: Seq[Sequence],
        settled: Settled,
        deepest: int,
        size: int,
        unread: Callable[[str], int],
    ) -> Plan:
        fixed = Counter(bet.drafter for bet, why in settled if why == "asked")
        options = self._options(sequences, settled)
        names = _names(options)
        if fixed and names:  # one drafter for all: the one most asked for, named or not
            both = fixed + Counter(bet.drafter for bet, why in settled if why == "auto")
            names = [both.most_common(1)[0][0]]
        if not names:
            return _plan(settled)
        depth = max(
            (min(b.depth, deepest) for b, w in settled if w == "asked" and b.drafter in names), default=0
        )
        offers = []
        for name in names:
            mine = [s for s, mine in zip(sequences, options, strict=True) if name in mine]
            offer = self._offer(name, mine, (depth, deepest), len(sequences), size, unread)
            if offer is None:
                return _plan(settled, "unmeasured")
            offers.append(offer)
        best = max(offers, key=lambda offer: offer.gain)
        why = "pays" if best.form != NO_FORM or depth else "below break-even"
        self.reference = best.gain
        if not depth and (probe := self._probe(best, offers, sequences, size)):
            best, why = probe, "probe"
        return _plan(settled, why, best, options)

    def _options(self, sequences: Seq[Sequence], settled: Settled) -> list[tuple[str, ...]]:
        """Drafters that each may have who leaves it open; others none."""
        options = []
        for sequence, (bet, why) in zip(sequences, settled, strict=True):
            named = sequence.request.params.speculation.drafter is not None
            open_ = (bet.drafter,) if named or bet.drafter not in self.choices else self.choices
            options.append(open_ if why == "auto" else ())
        return options

    def _offer(
        self,
        name: str,
        mine: list[Sequence],
        depths: tuple[int, int],
        batch: int,
        size: int,
        unread: Callable[[str], int],
    ) -> Offer | None:
        """The best form for these sequences, in a round of at least and at most such `depths`; None if nobody knows
        what a plain round costs, which is what guessing is told against.
        """
        fixed, deepest = depths
        habits = [self._habit(sequence, name) for sequence in mine]

        def gain(form: Form) -> float:
            ratio = self.costs.ratio(name, max(form, (fixed, fixed)), size)
            brought = [habit.tokens(form) for habit in habits]
            risk = 0.0 if fixed or form == NO_FORM else self._risk(name, habits, brought)
            return (batch + sum(brought) - len(mine) * risk) / batch / ratio

        plain = self.costs.plain(size)
        if not fixed and plain is None:
            return None
        forms = self.costs.forms(name, size)
        if (name, size) not in self.measured:
            forms += [form for form in CHAINS if form[0] <= deepest]
        if fixed:  # everyone's guesses have the form of those that were asked for
            forms = [form for form in forms if form[0] == form[1] <= fixed]
        gains = {form: gain(form) for form in (NO_FORM, *forms)}
        best = max(gains, key=gains.__getitem__)
        wait = 0.0 if fixed else self.costs.reading(name, unread(name)) / (plain or 1.0)
        earned = (1 - gains[NO_FORM] / gains[best]) * _rounds_left(mine, gains[best])
        if fixed or earned > wait:
            return Offer(name, best, gains[best], wait)
        return Offer(name, NO_FORM, gains[NO_FORM], wait)

    def _risk(self, name: str, habits: Seq[Habit], brought: Seq[float]) -> float:
        """By how much the guesses of one among several sequences may bring less than on average, as far as sequences
        differ and habits are known. Whose guesses hold least ends last, when the others no longer gain from theirs: so
        what counts is not what all bring together, but what one does that is worse off by so much. Of a drafter that
        was hardly tried there is only hope.
        """
        if len(habits) < 2 or self._general(name).weight < TRIED:
            return 0.0
        mean = sum(brought) / len(brought)
        squares = 0.0
        for habit, tokens in zip(habits, brought, strict=True):
            first = max(habit.first, RAREST)
            squares += (tokens - mean) ** 2 + tokens**2 * (1 - first) / (first * (habit.weight + 1))
        return sqrt(squares / len(habits))

    def _probe(self, best: Offer, offers: list[Offer], sequences: Seq[Sequence], size: int) -> Offer | None:
        """A drafter that is not in use and may be tried again. Of its guesses none is counted on."""
        share = SPARE_SHARE if best.form != NO_FORM else PROBE_SHARE
        for offer in offers:
            form = self._probe_form(offer.name, size)
            lost = self.costs.ratio(offer.name, form, size) - 1 / best.gain + offer.wait
            idle = form != NO_FORM and (best.form == NO_FORM or offer.name != best.name)
            due = idle and self.rested.get(offer.name, 0.0) >= max(PROBE, lost / share)
            if due and lost <= max(1.0, PROBE_ANSWER * _tokens_left(sequences) / best.gain):
                self.rested[offer.name] = 0.0  # at once: what comes of it is known a round later
                return Offer(offer.name, form, offer.gain, offer.wait)
        return None

    def _probe_form(self, name: str, size: int) -> Form:
        """The usual one, where rounds of this size have it and it is not dear, else the least."""
        known = self.costs.forms(name, size)
        if (name, size) not in self.measured:
            return PROBE_FORM
        if PROBE_FORM in known and self.costs.ratio(name, PROBE_FORM, size) <= DEAR:
            return PROBE_FORM
        return min(known, default=NO_FORM)

    def _habit(self, sequence: Sequence, name: str) -> Habit:
        own = self.habits.setdefault(sequence, {})
        if name not in own:
            general = self._general(name)
            own[name] = Habit(general.first, general.further)
        return own[name]

    def _general(self, name: str) -> Habit:
        return self.general.setdefault(name, Habit(FIRST, FURTHER))

    def observe(self, record: StepRecord, drafter: str, form: Form, size: int) -> None:
        # The host's time counts where it is longer than the device's; a moment's hold-up does not.
        seconds = min(max(record.total_s, record.target_s), HELD_UP * record.target_s)
        self.costs.observe(drafter, form, size, seconds / record.passes)
        plain, ratio = self.costs.plain(size), self.costs.ratio(drafter, form, size)
        if plain is not None:
            record.plain_s = record.total_s if form == NO_FORM else record.emitted / record.sequences * plain
        habits = []
        for o in record.outcomes:
            if o.bet.nodes and not o.sequence.finish_reason:  # whose answer has ended is forgotten already
                habits.append(self._habit(o.sequence, drafter))
                habits[-1].observe(o.deepest, o.straight, SHORT_MEMORY)
            if o.bet.nodes:
                self._general(drafter).observe(o.deepest, o.straight, LONG_MEMORY)
        for name in {*self.general, *self.choices}:
            self.rested[name] = self.rested.get(name, 0.0) + ratio * record.passes
        if form != NO_FORM:  # one that paid is followed by another
            risk = self._risk(drafter, habits, [habit.tokens(form) for habit in habits])
            paid = record.emitted / record.sequences - risk > ratio * self.reference
            self.rested[drafter] = inf if paid else 0.0

    def forget(self, sequence: Sequence) -> None:
        self.habits.pop(sequence, None)


def _rounds_left(sequences: Seq[Sequence], gain: float) -> float:
    """In which guessing may pay: until the answers end, at the latest, as far as one can look."""
    return min(HORIZON, _tokens_left(sequences) / gain)


def _tokens_left(sequences: Seq[Sequence]) -> float:
    """Of one answer, at most, on average."""
    left = sum(s.request.params.max_tokens + s.prompt_len - len(s.tokens) for s in sequences)
    return left / max(len(sequences), 1)


def _names(options: Iterable[tuple[str, ...]]) -> list[str]:
    """Everything among them, once."""
    return list(dict.fromkeys(name for some in options for name in some))


def _plan(
    settled: Settled, why: str = "", offer: Offer | None = None, options: Seq[tuple[str, ...]] = ()
) -> Plan:
    """What is settled, and for the others what was found best."""
    bets, reasons = [bet for bet, _ in settled], [reason for _, reason in settled]
    for i, (bet, reason) in enumerate(settled):
        if reason == "auto":
            mine = offer is not None and offer.form != NO_FORM and offer.name in options[i]
            bets[i] = (
                Bet(offer.name, offer.form[1], offer.form[0], None, bet.mode) if mine and offer else NO_BET
            )
            reasons[i] = why
    return Plan(tuple(bets), tuple(reasons))
