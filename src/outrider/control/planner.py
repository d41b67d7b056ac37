"""The planner: how much to guess this step, for each sequence. No torch.

A simple rule, from what was measured. Each sequence has an estimate of the chance that its next guess
holds; a guess at depth k survives with that chance to the power k. All sequences' guesses compete: the
likeliest to survive is taken first, as long as expected tokens a second rise under the measured cost of a
step. None at all is one of the outcomes. A sequence whose guesses stopped paying is asked again now and
then, so that off is never for ever.

Rounds on a device are planned in rounds.py.

What a request fixes itself (drafter, depth, nodes, tree) is done as asked.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.control.costs import Costs
from outrider.control.rounds import RoundPlanner
from outrider.types import MAX_NODES, NO_BET, Bet, Plan, Sequence, StepRecord

DEPTH = 4  # guesses in a row, at most, unless a request says otherwise
MOST_SEQUENCES = 16  # above this, steps are full of real work: guessing stops
TREE_SEQUENCES = 4  # up to this many, a grown tree may be worth its rows
HOTTEST = 1.5  # above this temperature hardly any guess holds
FADE = 0.9  # how fast an old result is forgotten
PROBE = 24  # steps without a guess after which one is tried


@dataclass(slots=True)
class Record:
    """How a sequence's guesses have done lately, starting from what its temperature suggests."""

    held: float
    failed: float
    rest: int = 0  # steps since the last guess

    @property
    def chance(self) -> float:
        return self.held / (self.held + self.failed)


class Planner:
    def __init__(self, default: str = "none", depth: int | None = None, nodes: int | None = None) -> None:
        self.default, self.depth, self.nodes = default, depth, nodes
        self.costs, self.rounds = Costs(), RoundPlanner()
        self.records: dict[Sequence, Record] = {}

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
        return self.rounds.unmeasured(sequences, [self._asked(one, 1) for one in sequences], size)

    def plan_round(
        self, sequences: Seq[Sequence], deepest: int, size: int, unread: Callable[[str], int] = lambda _: 0
    ) -> Plan:
        """Bets for a round on the device with room for `size`. `unread`: tokens a drafter would have to read first."""
        settled = [self._asked(one, 1) for one in sequences]
        return self.rounds.plan(sequences, settled, deepest, size, unread)

    def observe(self, record: StepRecord) -> None:
        if record.flight is not None:
            self.rounds.observe(record, *record.flight)
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

    def _plain_cost(self, record: StepRecord) -> float:
        """Seconds that plain steps over the same sequences would have taken for the tokens of this one."""
        if record.known != record.sequences or not record.emitted:
            return 0.0
        if not record.drafted:
            return record.total_s
        return record.emitted / record.sequences * self.costs.step(record.sequences)

    def forget(self, sequence: Sequence) -> None:
        self.records.pop(sequence, None)
        self.rounds.forget(sequence)

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
