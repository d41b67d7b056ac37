"""The planner: when it guesses, how much, when it stops and when it tries again."""

from __future__ import annotations

import pytest

from outrider.control.costs import KEEP, Costs
from outrider.control.planner import DEPTH, HOTTEST, MOST_SEQUENCES, PROBE, Planner
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


def test_rows_that_others_asked_for_count():
    """Eight rows are free; beyond them each doubles the cost, so there is nothing to gain beside ten asked for."""
    made = planner({n: 2.0 ** max(0, n - 8) for n in range(1, 64)})
    asked, left_open = sequence([1, 2], speculation={"depth": 10, "nodes": 10}), sequence([1, 3])
    assert made.plan([left_open], 2).reasons == ("pays",)
    assert made.plan([asked, left_open], 2).reasons == ("asked", "below break-even")


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
