"""The planner: when it guesses, how much, when it stops and when it tries again."""

from __future__ import annotations

import pytest

from outrider.control.costs import HOPED, KEEP, Costs, RoundCosts
from outrider.control.forms import CHAINS, TREES
from outrider.control.planner import (
    DEPTH,
    HOTTEST,
    MOST_SEQUENCES,
    PROBE,
    PROBE_SHARE,
    SIDE,
    Habit,
    Planner,
)
from outrider.types import NO_BET, Bet, Outcome, StepRecord
from tests.tiny import sequence

FREE = dict.fromkeys(range(1, 64), 1.0)  # rows cost nothing: every guess pays


def planner(costs: dict[int, float] | None = FREE, **options) -> Planner:
    made = Planner("lookup", **options)
    made.costs.by_rows = dict(costs or {})
    return made


def step(sequences, bets=None, rows=1, total=1.0, draft=0.0, drafted=0, accepted=0, known=None) -> StepRecord:
    bets = bets or [NO_BET] * len(sequences)
    outcomes = [
        Outcome(s, b, drafted, drafted, accepted, accepted) for s, b in zip(sequences, bets, strict=True)
    ]
    n = len(sequences)
    return StepRecord(
        rows, n, n if known is None else known, drafted, accepted, n, 0, draft, 0, 0, total, outcomes
    )


def only(made: Planner, s, batch: int = 1) -> tuple[Bet, str]:
    plan = made.plan([s], batch)
    return plan.bets[0], plan.reasons[0]


def test_guesses_by_default():
    bet, reason = only(planner(), sequence([1, 2]))
    assert reason == "pays" and bet.drafter == "lookup" and bet.depth == DEPTH and bet.nodes >= DEPTH


def test_off_above_sixteen_sequences():
    s = sequence([1, 2])
    assert only(planner(), s, MOST_SEQUENCES)[1] == "pays"
    assert only(planner(), s, MOST_SEQUENCES + 1) == (NO_BET, "batch")


def test_off_above_the_hottest():
    assert only(planner(), sequence([1, 2], temperature=HOTTEST))[1] == "pays"
    assert only(planner(), sequence([1, 2], temperature=HOTTEST + 0.01)) == (NO_BET, "temperature")


def test_depth_falls_with_temperature():
    depths = [only(planner(), sequence([1, 2], temperature=t))[0].depth for t in (0, 0.7, 0.9, 1.0, 1.3)]
    assert depths == [4, 4, 3, 3, 2]


def test_trees_only_in_small_batches():
    s = [sequence([1, i]) for i in range(6)]
    few, many = planner().plan(s[:2], 2), planner().plan(s, 6)
    assert all(bet.nodes > bet.depth for bet in few.bets) and all(bet.nodes == bet.depth for bet in many.bets)


def test_no_guess_where_rows_cost_what_they_bring():
    made = planner({n: float(n) for n in range(1, 64)})
    assert only(made, sequence([1, 2])) == (NO_BET, "below break-even")


def test_measured_costs_turn_it_off_and_a_probe_turns_it_on_again():
    made, s = planner({}), sequence([1, 2])
    assert only(made, s)[0].nodes > 0  # nothing measured: try
    made.observe(step([s], rows=1, total=1.0))
    for _ in range(40):  # guesses that never hold, in steps twice as long
        bet, _ = only(made, s)
        if bet is NO_BET:
            break
        made.observe(step([s], [bet], rows=1 + bet.nodes, total=2.0, drafted=bet.nodes))
    assert only(made, s) == (NO_BET, "below break-even")
    rests = 0
    while only(made, s)[1] == "below break-even":
        made.observe(step([s]))
        rests += 1
        assert rests <= PROBE
    bet, reason = only(made, s)
    assert reason == "probe" and 0 < bet.nodes <= 2 and rests == PROBE
    for _ in range(30):  # now they hold, and steps with guesses turn out cheap
        bet, _ = only(made, s)
        bet = bet if bet.nodes else Bet("lookup", 2, 2)
        made.observe(step([s], [bet], rows=1 + bet.nodes, total=1.1, drafted=bet.depth, accepted=bet.depth))
    assert only(made, s)[1] == "pays"


def test_a_probe_that_fails_rests_again():
    made, s = planner({n: float(n) for n in range(1, 64)}), sequence([1, 2])
    for _ in range(PROBE):
        made.observe(step([s]))
    bet, reason = only(made, s)
    assert reason == "probe"
    made.observe(step([s], [bet], rows=3, total=3.0, drafted=2))
    assert only(made, s) == (NO_BET, "below break-even")


def test_drafting_costs_count():
    made, s = planner(), sequence([1, 2])
    made.costs.by_drafter["lookup"] = 5.0
    assert only(made, s) == (NO_BET, "below break-even")


def test_the_likelier_sequence_gets_the_rows():
    made, good, bad = planner({n: 1 + 0.3 * n for n in range(1, 64)}), sequence([1, 2]), sequence([1, 3])
    for _ in range(20):
        made.observe(step([good], [Bet("lookup", 4, 4)], rows=5, total=2.5, drafted=4, accepted=4))
        made.observe(step([bad], [Bet("lookup", 4, 4)], rows=5, total=2.5, drafted=4, accepted=0))
    plan = made.plan([good, bad], 2)
    assert plan.bets[0].depth > plan.bets[1].depth


@pytest.mark.parametrize("batch", [1, 40])
@pytest.mark.parametrize("temperature", [0, 2.0])
@pytest.mark.parametrize(
    "asked, nodes, depth, tree",
    [
        ({"depth": 6}, 6, 6, None),
        ({"depth": 3, "nodes": 9}, 9, 3, None),
        ({"nodes": 2}, 2, 2, None),
        ({"nodes": 2, "depth": 5}, 2, 2, None),
        ({"nodes": 30}, 30, 4, None),
        ({"tree": (3, 2)}, 9, 2, (3, 2)),
        ({"depth": 63, "nodes": 63}, 63, 63, None),
    ],
)
def test_what_a_request_asks_is_done(batch, temperature, asked, nodes, depth, tree):
    costs = {n: float(n) for n in range(1, 64)}
    s = sequence([1, 2], temperature=temperature, speculation={**asked, "drafter": "lm"})
    assert only(planner(costs), s, batch) == (Bet("lm", nodes, depth, tree, "coupled"), "asked")


@pytest.mark.parametrize("asked", [False, {"drafter": "none"}, {"nodes": 0}, {"depth": 0}])
def test_off_is_off(asked):
    assert only(planner(), sequence([1, 2], speculation=asked)) == (NO_BET, "off")
    assert only(Planner("none"), sequence([1, 2])) == (NO_BET, "off")


def test_depth_for_everyone():
    assert only(planner(depth=2, nodes=5), sequence([1, 2]))[0] == Bet("lookup", 5, 2)
    assert only(planner(depth=2), sequence([1, 2], speculation={"depth": 7}))[0].depth == 7


@pytest.mark.parametrize("asked", [{}, {"nodes": 20}, {"depth": 3, "nodes": 20}, {"depth": 3}])
def test_rejection_never_gets_a_grown_tree(asked):
    for batch in (1, 8):
        s = sequence([1, 2], temperature=0.8, speculation={**asked, "mode": "rejection"})
        bet, _ = only(planner(), s, batch)
        assert bet.mode == "rejection" and bet.nodes == bet.depth > 0
    for _ in range(PROBE + 1):
        made, s = (
            planner({n: float(n) for n in range(1, 64)}),
            sequence([1, 2], speculation={"mode": "rejection"}),
        )
    for _ in range(PROBE):
        made.observe(step([s]))
    bet, reason = only(made, s)
    assert reason == "probe" and bet.nodes == bet.depth


def test_nothing_is_kept_of_sequences_that_ended():
    made, s = planner(), sequence([1, 2])
    bet, _ = only(made, s)
    assert s in made.records
    s.finish_reason = "stop"
    made.forget(s)  # the engine forgets while it commits, and observes after
    made.observe(step([s], [bet], rows=5, drafted=4, accepted=4))
    assert not made.records


def test_costs_between_and_beyond_what_was_measured():
    costs = Costs()
    assert costs.step(9) > costs.step(1)
    costs.by_rows = {2: 1.0, 6: 3.0}
    assert costs.step(2) == 1.0 and costs.step(6) == 3.0
    assert costs.step(3) == pytest.approx(1.5) and costs.step(5) == pytest.approx(2.5)
    assert costs.step(1) < 1.0 and 3.0 < costs.step(12) < 6.0


def test_costs_are_learned_from_plain_steps_and_guesses():
    costs, s = Costs(), sequence([1, 2])
    costs.observe(step([s], rows=1, total=2.0))
    costs.observe(step([s], rows=1, total=1.0))
    assert costs.step(1) == pytest.approx(KEEP * 2 + (1 - KEEP) * 1)
    costs.observe(step([s], rows=50, total=9.0, known=50))  # a prompt
    assert 50 not in costs.by_rows
    costs.observe(step([s], [Bet("lm", 4, 4)], rows=5, total=3.0, draft=0.8, drafted=4))
    assert costs.step(5) == pytest.approx(2.2) and costs.level("lm") == pytest.approx(0.2)
    assert costs.level("lookup") == 0.0


# ------------------------------------------------------------------------------------------ rounds on a device

CHEAP = {n: 1 + 0.02 * n for n in range(9)}  # cost of a round by its guesses
DEAR = {n: 1.0 + n for n in range(9)}
RISING = {n: 1 + 0.2 * n for n in range(9)}


def size_of(sequences) -> int:
    return 1 << (len(sequences) - 1).bit_length()


def fly(made: Planner, sequences, bets, costs: dict[int, float], accepted=0, drafted=None) -> None:
    """A round as the engine would record it."""
    guesses = max(bet.nodes for bet in bets)
    name = next((bet.drafter for bet in bets if bet.nodes), "none")
    outcomes = []
    for s, bet in zip(sequences, bets, strict=True):
        nodes = bet.nodes if drafted is None else drafted
        outcomes.append(Outcome(s, bet, nodes, nodes, min(accepted, nodes), min(accepted, nodes)))
    n, took = len(sequences), costs[guesses]
    emitted = n + sum(o.accepted for o in outcomes)
    record = StepRecord(
        n,
        n,
        n,
        0,
        0,
        emitted,
        0,
        0,
        took,
        0,
        took,
        outcomes,
        flight=(name, (guesses, guesses), size_of(sequences)),
    )
    made.observe(record)


def measured(costs: dict[int, float]) -> list[tuple[str, tuple[int, int], float]]:
    return [("lm" if depth else "none", (depth, depth), costs[depth]) for depth in (0, 1, 2, 4, 8)]


def in_round(made: Planner, sequences) -> tuple[set[int], set[str]]:
    plan = made.plan_round(sequences, 8, size_of(sequences))
    return {bet.nodes for bet in plan.bets}, set(plan.reasons)


def test_a_round_of_a_new_size_is_plain_first():
    made, some = Planner("lookup"), [sequence([1, i]) for i in range(4)]
    assert in_round(made, some) == ({0}, {"unmeasured"})
    fly(made, some, [NO_BET] * 4, CHEAP)
    depths, reasons = in_round(made, some)
    assert reasons == {"pays"} and depths <= {1, 2, 4, 8}
    assert in_round(made, some[:2]) == ({0}, {"unmeasured"})  # another size


def test_the_depth_of_a_round_follows_what_holds():
    made, some = Planner("lookup"), [sequence([1, i]) for i in range(3)]
    fly(made, some, [NO_BET] * 3, RISING)
    for held, expected in ((8, {8}), (1, {1}), (8, {8})):
        for _ in range(150):
            fly(made, some, made.plan_round(some, 8, size_of(some)).bets, RISING, accepted=held)
        assert in_round(made, some) == (expected, {"pays"})


def test_a_round_that_costs_more_than_it_brings_is_plain():
    made, some = Planner("lm"), [sequence([1, i]) for i in range(16)]
    fly(made, some, [NO_BET] * 16, DEAR)
    flown = 0
    for _ in range(100):
        bets = made.plan_round(some, 8, size_of(some)).bets
        flown += bets[0].nodes > 0
        fly(made, some, bets, DEAR, accepted=1)
    assert flown <= 3  # until it was measured
    assert in_round(made, some) == ({0}, {"below break-even"})


def test_probes_take_a_small_share_of_the_time_and_find_what_changed():
    made, some = Planner("lm"), [sequence([1, 2])]
    half = {n: 1 + 0.5 * (n > 0) for n in range(9)}
    fly(made, some, [NO_BET], half)
    while in_round(made, some)[0] != {0}:
        fly(made, some, made.plan_round(some, 8, size_of(some)).bets, half)
    spent = probes = 0.0
    for _ in range(3000):
        bets = made.plan_round(some, 8, size_of(some)).bets
        probes += bets[0].nodes > 0
        spent += half[bets[0].nodes]
        fly(made, some, bets, half)
    assert probes > 10 and (spent - 3000) / spent <= PROBE_SHARE * 1.1
    for _ in range(200):
        fly(made, some, made.plan_round(some, 8, size_of(some)).bets, half, accepted=8)
    assert in_round(made, some) == ({8}, {"pays"})  # a probe that paid is followed by another


def test_a_drafter_with_nothing_to_say_counts_as_wrong():
    made, some = Planner("lookup"), [sequence([1, 2])]
    fly(made, some, [NO_BET], RISING)
    for _ in range(20):
        fly(made, some, made.plan_round(some, 8, size_of(some)).bets, RISING, drafted=0)
    assert in_round(made, some) == ({0}, {"below break-even"})


def test_a_new_sequence_starts_from_what_others_taught():
    made = Planner("lookup")
    old, new = [sequence([1, i]) for i in range(2)], [sequence([2, i]) for i in range(2)]
    fly(made, old, [NO_BET] * 2, RISING)
    assert in_round(made, [sequence([3, i]) for i in range(2)])[1] == {"pays"}
    for _ in range(60):
        fly(made, old, [Bet("lookup", 2, 2)] * 2, RISING)
    assert in_round(made, new) == ({0}, {"below break-even"})
    for s in list(made.habits):
        made.forget(s)
    assert not made.habits


def test_a_size_is_measured_before_it_is_planned_for():
    made, some = Planner("lm"), [sequence([1, i]) for i in range(3)]
    assert made.unmeasured(some, 4) == "lm"
    made.learn("lm", 4, measured(DEAR))
    assert made.unmeasured(some, 4) == "none"
    assert made.unmeasured(some[:2], 2) == "lm"  # another size
    off = [sequence([1], speculation=False), sequence([1], speculation={"depth": 4, "nodes": 4})]
    assert made.unmeasured(off, 4) == "none"  # nothing is left open
    assert in_round(made, some) == ({0}, {"below break-even"})


def test_what_must_be_read_first_has_to_be_earned():
    made, some = Planner("lm"), [sequence([1, i]) for i in range(4)]
    made.learn("lm", 4, measured(RISING))
    made.read("lm", 1000, 10.0)
    depth = made.plan_round(some, 8, 4, lambda _: 1000).bets[0].nodes
    assert (
        depth == made.plan_round(some, 8, size_of(some)).bets[0].nodes > 0
    )  # ten plain rounds' time, soon earned
    assert made.plan_round(some, 8, 4, lambda _: 9000).bets == (NO_BET,) * 4
    tries = 0
    while not made.plan_round(some, 8, 4, lambda _: 9000).bets[0].nodes:
        tries += 1  # a cost that keeps it from trying is not believed for ever
        assert tries < 200
    assert tries > 10
    made.read("lm", 1000, 90.0)  # something was made on the way
    assert made.plan_round(some, 8, 4, lambda _: 1000).bets[0].nodes
    assert made.round_costs.reading("lm", 1) == made.round_costs.reading("lm", 100) > 0
    assert made.round_costs.reading("lm", 0) == made.round_costs.reading("lookup", 9) == 0


def test_what_a_request_fixed_is_done_and_others_go_along():
    made = Planner("lookup")
    asked = sequence([1, 2], speculation={"depth": 4, "nodes": 4})
    free, off = sequence([1, 3]), sequence([1, 4], speculation=False)
    for n in (3, 1):
        fly(made, [free] * n, [NO_BET] * n, DEAR)
        assert made.plan_round([free] * n, 8, size_of([free] * n)).bets[0].nodes > 0  # hoped to be cheap
        fly(made, [free] * n, [Bet("lookup", 4, 4)] * n, DEAR, accepted=1)
    assert made.plan_round([free], 8, 1).bets == (NO_BET,)
    plan = made.plan_round([asked, free, off], 8, 4)
    assert plan.bets[0].nodes == 4 and plan.reasons[0] == "asked"
    assert plan.bets[1].nodes == 4  # the round is that deep already
    assert plan.bets[2] == NO_BET and plan.reasons[2] == "off"


def test_what_plain_rounds_would_have_cost():
    made, s = Planner("lookup"), sequence([1, 2])
    plain = StepRecord(1, 1, 1, 0, 0, 8, 0, 0, 4.0, 0, 5.0, flight=("none", (0, 0), 1), passes=8)
    made.observe(plain)
    assert made.round_costs.plain(1) == 0.5 and plain.plain_s == 5.0
    outcome = Outcome(s, Bet("lookup", 4, 4), 4, 4, 3, 3)
    record = StepRecord(5, 1, 1, 4, 3, 4, 0, 0, 0.75, 0, 0.8, [outcome], flight=("lookup", (4, 4), 1))
    made.observe(record)
    assert record.plain_s == 4 * 0.5 and made.round_costs.ratio("lookup", (4, 4), 1) == 1.5


def test_a_round_costs_what_it_set_out_with_however_many_are_left():
    made = Planner("lookup")
    made.observe(StepRecord(16, 8, 8, 0, 0, 8, 0, 0, 4.0, 0, 5.0, flight=("none", (0, 0), 16)))
    assert made.round_costs.plain(16) == 4.0 and made.round_costs.plain(8) is None


def test_unmeasured_rounds_are_judged_by_their_neighbours():
    costs = RoundCosts()
    assert costs.ratio("lm", (4, 4), 16) == 1 + 4 * HOPED
    for size in (1, 16):
        costs.observe("none", (0, 0), size, 2.0)
    costs.observe("lm", (4, 4), 1, 3.0)
    assert costs.ratio("lm", (4, 4), 16) == 1 + 4 * HOPED  # another size says nothing
    costs.observe("lm", (2, 2), 16, 4.0)
    assert costs.ratio("lm", (4, 4), 16) == 3.0 and costs.ratio("lm", (2, 6), 16) == 4.0  # another form
    costs.observe("lm", (4, 4), 16, 5.0)
    assert costs.ratio("lm", (4, 4), 16) == 2.5 and costs.ratio("lm", (0, 0), 16) == 1.0
    assert costs.ratio("lookup", (4, 4), 16) == 1 + 4 * HOPED


def test_a_tree_is_taken_where_it_brings_more_than_it_costs():
    made, some = Planner("lm"), [sequence([1, 2])]
    chains = [("none", (0, 0), 1.0), *(("lm", form, 1 + 0.2 * form[0]) for form in CHAINS)]
    made.learn("lm", 1, chains)
    habit = made._general("lm")
    habit.first = habit.further = 0.5
    assert made.plan_round(some, 8, 1).bets[0].nodes == made.plan_round(some, 8, 1).bets[0].depth > 0
    made.learn("lm", 1, [("lm", form, 1 + 0.2 * form[0] + 0.01 * form[1]) for form in TREES])
    bet = made.plan_round(some, 8, 1).bets[0]
    assert (bet.depth, bet.nodes) in TREES
    asked = sequence([1, 3], speculation={"depth": 3, "nodes": 3})
    both = made.plan_round([*some, asked], 8, 1).bets
    assert [bet.nodes <= bet.depth <= 3 for bet in both] == [True, True]  # one form for all
    made.learn("lm", 1, [("lm", form, 9.0) for form in TREES] * 40)
    assert made.plan_round(some, 8, 1).bets[0].nodes == made.plan_round(some, 8, 1).bets[0].depth


def test_what_a_tree_brings():
    habit = Habit(0.5, 0.8)
    assert habit.tokens((2, 2)) == 0.5 + 0.4
    wide = 0.5 + 0.5 * SIDE + 0.5 * SIDE * (1 - SIDE)  # three choices for the first token
    assert habit.tokens((2, 6)) == pytest.approx(wide + 0.5 * (0.8 + 0.2 * SIDE) + 0.5 * SIDE * 0.8)


def test_a_habit_knows_the_first_guess_from_the_others():
    habit = Habit(0.5, 0.5)
    for i in range(400):
        habit.observe(4, 4 if i % 2 else 0, 200)
    assert abs(habit.first - 0.5) < 0.05 and habit.further > 0.95
    assert abs(habit.tokens((4, 4)) - 2.0) < 0.2
