"""The planner: how much to guess this step, for each sequence. No torch.

A simple rule, from what was measured. Each sequence has an estimate of the chance that its next guess
holds; a guess at depth k survives with that chance to the power k. All sequences' guesses compete: the
likeliest to survive is taken first, as long as expected tokens a second rise under the measured cost of a
step. None at all is one of the outcomes. A sequence whose guesses stopped paying is asked again now and
then, so that off is never for ever.

A round on a device costs the same whoever guesses in it, so there one form of guesses is chosen for all, a chain or a
tree: the one that promises the most tokens for its measured cost.

What a request fixes itself (drafter, depth, nodes, tree) is done as asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.control.costs import Costs, RoundCosts
from outrider.control.forms import CHAINS, Form, ranks_of, shape_of
from outrider.types import MAX_NODES, NO_BET, Bet, Plan, Sequence, StepRecord

DEPTH = 4  # guesses in a row, at most, unless a request says otherwise
MOST_SEQUENCES = 16  # above this, steps are full of real work: guessing stops
TREE_SEQUENCES = 4  # up to this many, a grown tree may be worth its rows
HOTTEST = 1.5  # above this temperature hardly any guess holds
FADE = 0.9  # how fast an old result is forgotten
PROBE = 24  # steps without a guess after which one is tried
PROBE_FORM: Form = (2, 2)
NONE: Form = (0, 0)
SIDE = 0.35  # the chance that a draft's next choice holds where the one before it did not
FIRST, FURTHER = 0.6, 0.8  # what is hoped of guesses in rounds before any was made
HOPE_GROWS = 0.02
SHORT_MEMORY, LONG_MEMORY = 12, 200  # rounds: of one sequence, and of a drafter in general
HORIZON = 64  # rounds in which guessing must earn what a drafter has to read before it
PROBE_SHARE = 0.005  # of the time, at most, may go into rounds that try whether guessing pays again


@dataclass(slots=True)
class Record:
    """How a sequence's guesses have done lately, starting from what its temperature suggests."""

    held: float
    failed: float
    rest: int = 0  # steps since the last guess

    @property
    def chance(self) -> float:
        return self.held / (self.held + self.failed)


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
            chance = holds if rank == 0 else (1 - holds) * SIDE * (1 - SIDE) ** (rank - 1)
            reached.append(chance * (reached[parent] if parent >= 0 else 1.0))
        return sum(reached)


class Planner:
    def __init__(self, default: str = "none", depth: int | None = None, nodes: int | None = None) -> None:
        self.default, self.depth, self.nodes = default, depth, nodes
        self.costs, self.round_costs = Costs(), RoundCosts()
        self.records: dict[Sequence, Record] = {}
        self.habits: dict[Sequence, Habit] = {}  # in rounds
        self.habit: dict[
            str, Habit
        ] = {}  # of a drafter's guesses in general: what a new sequence starts from
        self.rested = 0  # plain rounds in a row
        self.measured: set[tuple[str, int]] = set()  # drafters, and sizes of their rounds

    def plan(self, sequences: Seq[Sequence], batch: int) -> Plan:
        """Bets for the sequences that emit this step, of `batch` that move."""
        bets, reasons = [NO_BET] * len(sequences), ["plain"] * len(sequences)
        open_: list[int] = []
        for i, sequence in enumerate(sequences):
            bets[i], reasons[i] = self._asked(sequence, batch)
            if reasons[i] == "auto":
                open_.append(i)
        fixed = sum(bet.nodes for i, bet in enumerate(bets) if i not in open_)
        names = {i: bets[i].drafter for i in open_}
        for i, depth in self._share_out(sequences, names, batch, batch + fixed).items():
            bets[i], reasons[i] = self._bet(sequences[i], bets[i], depth, batch)
        return Plan(tuple(bets), tuple(reasons))

    def unmeasured(self, sequences: Seq[Sequence], size: int) -> str:
        """The drafter whose rounds of this size are to be measured before anything can be planned, or none."""
        names = [bet.drafter for bet, reason in (self._asked(s, 1) for s in sequences) if reason == "auto"]
        ((name, _),) = Counter(names).most_common(1) or [("none", 0)]
        return "none" if (name, size) in self.measured else name

    def learn(self, drafter: str, size: int, costs: Iterable[tuple[str, Form, float]]) -> None:
        """What rounds of this size were measured to take."""
        self.measured.add((drafter, size))
        for name, form, seconds in costs:
            self.round_costs.observe(name, form, size, seconds)

    def read(self, drafter: str, tokens: int, seconds: float) -> None:
        """What it took a drafter to catch up."""
        self.round_costs.observe_reading(drafter, tokens, seconds)

    def plan_round(
        self, sequences: Seq[Sequence], deepest: int, size: int, unread: Callable[[str], int] = lambda _: 0
    ) -> Plan:
        """Bets for a round on the device with room for `size`: one drafter, and one depth for all who leave it open.
        `unread`: tokens that a drafter would have to read first.
        """
        settled = [self._asked(sequence, 1) for sequence in sequences]
        names = Counter(bet.drafter for bet, _ in settled if bet.drafter != "none")
        if not names:
            return Plan(tuple(bet for bet, _ in settled), tuple(reason for _, reason in settled))
        ((name, _),) = names.most_common(1)
        open_ = [i for i, (bet, reason) in enumerate(settled) if reason == "auto" and bet.drafter == name]
        fixed = max(
            (min(b.depth, deepest) for b, why in settled if why == "asked" and b.drafter == name), default=0
        )
        waiting = 0.0 if fixed else self.round_costs.reading(name, unread(name))
        (depth, nodes), why = self._round_form(
            [sequences[i] for i in open_], name, (fixed, deepest), len(sequences), size, waiting
        )
        for i, (bet, reason) in enumerate(settled):
            if reason == "auto":
                mine = i in open_ and depth > 0
                settled[i] = (Bet(name, nodes, depth, None, bet.mode), why) if mine else (NO_BET, why)
        return Plan(tuple(bet for bet, _ in settled), tuple(reason for _, reason in settled))

    def _round_form(
        self,
        open_: list[Sequence],
        name: str,
        depths: tuple[int, int],
        batch: int,
        size: int,
        waiting: float,
    ) -> tuple[Form, str]:
        """How to guess for those who leave it open, in a round of at least and at most such `depths`, and why.
        `waiting`: seconds until guessing could begin, which it must earn within some rounds.
        """
        fixed, deepest = depths
        habits = [self._habit(sequence, name) for sequence in open_]

        def speed(form: Form) -> float:
            tokens = batch + sum(habit.tokens(form) for habit in habits)
            return tokens / self.round_costs.ratio(name, max(form, (fixed, fixed)), size)

        plain = self.round_costs.plain(size)
        if not fixed and plain is None:
            return NONE, "unmeasured"  # what guessing costs is told against a plain round
        forms = self.round_costs.forms(name, size)
        if (name, size) not in self.measured:
            forms += [form for form in CHAINS if form[0] <= deepest]
        if fixed:  # everyone's guesses have the form of those that were asked for
            forms = [form for form in forms if form[0] == form[1] <= fixed]
        best = max((NONE, *forms), key=speed)
        wait = waiting / (plain or 1.0)  # in plain rounds
        earned = (1 - speed(NONE) / speed(best)) * HORIZON
        if not open_ or earned > wait:
            return best, "pays"
        if earned > 0:
            self.round_costs.doubt_reading(name)
        extra = self.round_costs.ratio(name, max(PROBE_FORM, (fixed, fixed)), size) - 1 + wait
        if self.rested >= max(PROBE, extra / PROBE_SHARE):
            return PROBE_FORM, "probe"
        return NONE, "below break-even"

    def _habit(self, sequence: Sequence, name: str) -> Habit:
        if sequence not in self.habits:
            general = self._general(name)
            self.habits[sequence] = Habit(general.first, general.further)
        return self.habits[sequence]

    def _general(self, name: str) -> Habit:
        return self.habit.setdefault(name, Habit(FIRST, FURTHER))

    def observe(self, record: StepRecord) -> None:
        if record.flight is not None:
            self._observe_round(record, *record.flight)
            return
        self.costs.observe(record)
        record.plain_s = self._plain_cost(record)
        for o in record.outcomes:
            if o.sequence.finish_reason:
                continue  # already forgotten
            known = self._record(o.sequence)
            known.rest = 0 if o.drafted else known.rest + 1
            if o.drafted:
                known.held = FADE * known.held + o.accepted
                known.failed = FADE * known.failed + (o.accepted < o.deepest)

    def _observe_round(self, record: StepRecord, drafter: str, form: Form, size: int) -> None:
        self.round_costs.observe(drafter, form, size, record.target_s / record.passes)
        plain = self.round_costs.plain(size)
        if plain is not None:
            record.plain_s = record.total_s if form == NONE else record.emitted / record.sequences * plain
        for o in record.outcomes:
            if o.bet.nodes and not o.sequence.finish_reason:
                self._habit(o.sequence, drafter).observe(o.deepest, o.straight, SHORT_MEMORY)
            if o.bet.nodes:
                self._general(drafter).observe(o.deepest, o.straight, LONG_MEMORY)
        if form == NONE:
            self.rested += record.passes
        elif record.emitted / record.sequences <= self.round_costs.ratio(drafter, form, size):
            self.rested = 0  # one that paid is followed by another

    def _plain_cost(self, record: StepRecord) -> float:
        """Seconds that plain steps over the same sequences would have taken for the tokens of this one."""
        if record.known != record.sequences or not record.emitted:
            return 0.0
        if not record.drafted:
            return record.total_s
        return record.emitted / record.sequences * self.costs.step(record.sequences)

    def forget(self, sequence: Sequence) -> None:
        self.records.pop(sequence, None)
        self.habits.pop(sequence, None)

    def _record(self, sequence: Sequence) -> Record:
        if sequence not in self.records:
            hope = 0.7 / (1 + 0.5 * sequence.request.params.temperature)
            self.records[sequence] = Record(2 * hope, 2 * (1 - hope))
        return self.records[sequence]

    def _asked(self, sequence: Sequence, batch: int) -> tuple[Bet, str]:
        """What the request or the rule settles at once; reason "auto" leaves the depth to measurement."""
        params, asked = sequence.request.params, sequence.request.params.speculation
        name = asked.drafter or self.default
        if name == "none" or asked.off:
            return NO_BET, "off"
        depth = asked.depth or self.depth
        nodes = asked.nodes or self.nodes
        if asked.tree is not None:
            return Bet(name, _size(asked.tree), len(asked.tree), asked.tree, asked.mode), "asked"
        if depth or nodes:
            depth = min(depth or DEPTH, nodes or MAX_NODES)
            free = asked.mode != "rejection"  # the ratio test must not choose nodes by looking at them
            return Bet(name, (nodes or depth) if free else depth, depth, None, asked.mode), "asked"
        if batch > MOST_SEQUENCES:
            return NO_BET, "batch"
        if params.temperature > HOTTEST:
            return NO_BET, "temperature"
        return Bet(name, mode=asked.mode), "auto"

    def _share_out(
        self, sequences: Seq[Sequence], names: dict[int, str], batch: int, rows: int
    ) -> dict[int, int]:
        """Depth for each sequence that left it open, by descending survival while tokens a second rise."""
        chances = {i: self._record(sequences[i]).chance for i in names}
        limit = {i: _depth_at(sequences[i].request.params.temperature) for i in names}
        guesses = sorted(
            ((chances[i] ** k, -k, i) for i in names for k in range(1, limit[i] + 1)), reverse=True
        )
        depths = dict.fromkeys(names, 0)
        levels: dict[str, int] = {}
        tokens = float(batch)
        best = tokens / self.costs.step(rows)
        taken = dict(depths)
        for n, (survival, minus_k, i) in enumerate(guesses, 1):
            tokens += survival
            taken[i] = -minus_k
            levels[names[i]] = max(levels.get(names[i], 0), taken[i])
            drafting = sum(depth * self.costs.level(name) for name, depth in levels.items())
            speed = tokens / (self.costs.step(rows + n) + drafting)
            if speed > best:
                best, depths = speed, dict(taken)
        return depths

    def _bet(self, sequence: Sequence, bet: Bet, depth: int, batch: int) -> tuple[Bet, str]:
        if depth == 0:
            if self._record(sequence).rest < PROBE:
                return NO_BET, "below break-even"
            return Bet(bet.drafter, 2, 2, None, bet.mode), "probe"
        nodes = depth
        if batch <= TREE_SEQUENCES and bet.mode != "rejection":
            wide = self.costs.step(batch + 2 * depth) <= 1.1 * self.costs.step(batch + depth)
            nodes = 2 * depth if wide else depth
        return Bet(bet.drafter, nodes, depth, None, bet.mode), "pays"


def _depth_at(temperature: float) -> int:
    """Less depth as temperature rises: guesses hold less often, so a long one is rarely used up."""
    return DEPTH if temperature <= 0.7 else DEPTH - 1 if temperature <= 1.0 else DEPTH - 2


def _size(tree: tuple[int, ...]) -> int:
    total, level = 0, 1
    for children in tree:
        level *= children
        total += level
    return total
