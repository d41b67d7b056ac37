"""How rounds on a device are planned: which drafter, in which form, and when something else is tried."""

from __future__ import annotations

from collections import Counter

import pytest

from outrider.control.costs import HOPED, RoundCosts
from outrider.control.forms import CHAINS, LATER, SECOND, TREES
from outrider.control.planner import Planner
from outrider.control.rounds import HELD_UP, PROBE_SHARE, SPARE_SHARE, TRIED, Habit
from outrider.types import NO_BET, Bet, Outcome, StepRecord
from tests.tiny import sequence

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


def test_a_try_is_not_made_again_before_it_is_known():
    """The next round is planned while one is on its way."""
    made, some = Planner("lm"), [sequence([1, 2], max_tokens=10_000)]
    made.rounds.learn("lm", 1, [("none", (0, 0), 1.0), ("lm", (2, 2), 1.5)])
    made.rounds.general["lm"] = Habit(0.1, 0.1)
    reasons, tries = [], 0
    for _ in range(1000):
        bets = [made.plan_round(some, 8, 1) for _ in range(2)]
        tries += [plan.reasons for plan in bets].count(("probe",))
        reasons.append({plan.reasons for plan in bets})
        for plan in bets:
            fly(made, some, plan.bets, {0: 1.0, 2: 1.5})
    assert ("probe",) in set().union(*reasons) and reasons.count({("probe",)}) == 0
    assert 0.5 * tries <= 2000 * PROBE_SHARE * 1.1


def test_whose_answer_has_ended_is_not_remembered():
    made, some = Planner("lm"), [sequence([1, i]) for i in range(3)]
    fly(made, some, [NO_BET] * 3, CHEAP)
    fly(made, some, [Bet("lm", 2, 2)] * 3, CHEAP, accepted=1)
    assert set(made.rounds.habits) == set(some)
    for s in some[:2]:  # the engine ends answers before it tells of the round
        s.finish_reason = "stop"
        made.forget(s)
    fly(made, some, [Bet("lm", 2, 2)] * 3, CHEAP, accepted=1)
    assert set(made.rounds.habits) == {some[2]}


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
    for s in list(made.rounds.habits):
        made.forget(s)
    assert not made.rounds.habits


def test_a_size_is_measured_before_it_is_planned_for():
    made, some = Planner("lm"), [sequence([1, i]) for i in range(3)]
    assert made.unmeasured(some, 4) == "lm"
    made.rounds.learn("lm", 4, measured(DEAR))
    assert made.unmeasured(some, 4) == "none"
    assert made.unmeasured(some[:2], 2) == "lm"  # another size
    off = [sequence([1], speculation=False), sequence([1], speculation={"depth": 4, "nodes": 4})]
    assert made.unmeasured(off, 4) == "none"  # nothing is left open
    assert in_round(made, some) == ({0}, {"below break-even"})


def test_what_must_be_read_first_has_to_be_earned():
    def guesses(sequences, unread: int) -> int:
        return made.plan_round(sequences, 8, 4, lambda _: unread).bets[0].nodes

    made, some = Planner("lm"), [sequence([1, i], max_tokens=100) for i in range(4)]
    made.rounds.learn("lm", 4, measured(RISING))
    plain = guesses(some, 0)
    assert guesses(some, 200) == plain > 0  # what it takes is not known, but not more than a few rounds' time
    assert guesses(some, 1000) == 0  # as it may take sixteen
    made.rounds.read("lm", 1000, 5.0)
    assert guesses(some, 1000) == plain  # five plain rounds' time, soon earned
    assert guesses(some, 9000) == 0
    ending = [sequence([1, i] + [3] * 97, prompt=2, max_tokens=100) for i in range(4)]
    assert guesses(ending, 0) == plain and guesses(ending, 1000) == 0  # not in the rounds that are left
    made.rounds.read("lm", 1000, 90.0)  # something was made on the way
    assert guesses(some, 1000) == plain
    assert made.rounds.costs.reading("lm", 1) == made.rounds.costs.reading("lm", 100) > 0
    assert made.rounds.costs.reading("lm", 0) == RoundCosts().reading("lookup", 9) == 0


def test_the_dearer_guesses_are_the_more_they_must_promise_to_several():
    """0.6 of first guesses mostly hold: 1.6 tokens for 1.5 times a plain round's time is too little for two."""
    costs = {0: 1.0, 1: 1.5, 2: 4.0, 4: 8.0, 8: 16.0}
    made, two = Planner("lm"), [sequence([1, i], max_tokens=1000) for i in range(2)]
    for size in (1, 2):
        made.rounds.learn("lm", size, measured(costs))
    made.rounds.general["lm"] = Habit(0.6, 0.8, TRIED)
    assert made.plan_round(two[:1], 8, 1).bets[0].nodes == 1
    assert made.plan_round(two, 8, 2).bets[0].nodes == 0


def test_what_takes_long_to_read_is_tried_now_and_then():
    made, [one] = Planner("lm"), [sequence([1, 2], max_tokens=1 << 20)]
    made.rounds.learn("lm", 1, measured(RISING))
    made.rounds.read("lm", 1000, 5.0)
    rounds = 0
    while (plan := made.plan_round([one], 8, 1, lambda _: 9000)).reasons != ("probe",):
        fly(made, [one], plan.bets, RISING)
        rounds += 1
        assert rounds < 50 / PROBE_SHARE
    lost = 45 + RISING[2] - 1
    assert rounds == pytest.approx(lost / PROBE_SHARE, rel=0.01)


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
    assert made.rounds.costs.plain(1) == 5.0 / 8 and plain.plain_s == 5.0
    outcome = Outcome(s, Bet("lookup", 4, 4), 4, 4, 3, 3)
    record = StepRecord(5, 1, 1, 4, 3, 4, 0, 0, 0.75, 0, 0.7, [outcome], flight=("lookup", (4, 4), 1))
    made.observe(record)
    assert record.plain_s == 4 * 5 / 8 and made.rounds.costs.ratio("lookup", (4, 4), 1) == 0.75 / (5 / 8)


def test_a_round_costs_what_it_set_out_with_however_many_are_left():
    made = Planner("lookup")
    made.observe(StepRecord(16, 8, 8, 0, 0, 8, 0, 0, 4.0, 0, 5.0, flight=("none", (0, 0), 16)))
    assert made.rounds.costs.plain(16) == 5.0 and made.rounds.costs.plain(8) is None


def test_a_round_costs_the_hosts_time_where_that_is_longer_but_no_hold_up():
    for total, cost in ((3.0, 4.0), (4.8, 4.8), (400.0, 4.0 * HELD_UP)):
        made = Planner("lookup")
        made.observe(StepRecord(1, 1, 1, 0, 0, 1, 0, 0, 4.0, 0, total, flight=("none", (0, 0), 1)))
        assert made.rounds.costs.plain(1) == cost


def test_among_several_the_worse_off_must_gain():
    """The same on average: alike, they guess; half of them never right, they do not; and one alone does as it likes."""
    made, some = Planner("lookup"), [sequence([1, i]) for i in range(16)]
    made.rounds.learn("lookup", 16, [("none", (0, 0), 1.0), ("lookup", (1, 1), 1.2)])
    made.rounds.learn("lookup", 1, [("none", (0, 0), 1.0), ("lookup", (1, 1), 1.2)])

    def asked(chances: list[float], weight: float) -> set[int]:
        for s, chance in zip(some, chances, strict=True):
            made.rounds.habits[s] = {"lookup": Habit(chance, chance, weight)}
        return {bet.nodes for bet in made.plan_round(some, 8, 16).bets}

    assert asked([0.5] * 16, 0) == {1}  # hope
    made.rounds.general["lookup"] = Habit(0.5, 0.5, TRIED)
    assert asked([0.5] * 16, 12) == {1}
    assert asked([0.5] * 16, 0) == {0}  # nobody knows yet
    assert asked([0.0, 1.0] * 8, 12) == {0}
    made.rounds.habits[some[0]] = {"lookup": Habit(0.3, 0.3)}
    assert [bet.nodes for bet in made.plan_round(some[:1], 8, 1).bets] == [1]


def test_a_dear_try_waits_for_long_answers():
    """Reading a hundred prompts to see how guesses would do is not for answers of a few words."""
    for left, tried in ((100, False), (4000, True)):
        made, some = Planner("lm"), [sequence([1, i], max_tokens=left) for i in range(3)]
        made.rounds.learn("lm", 4, [("none", (0, 0), 1.0), ("lm", (2, 2), 3.0)])
        made.rounds.read("lm", 256, 5.0)
        made.rounds.general["lm"] = Habit(0.05, 0.05)
        named = set()
        for _ in range(6000):
            bets = made.plan_round(some, 8, 4, lambda name: 256).bets
            named.add(bets[0].drafter)
            fly(made, some, bets, {0: 1.0, 2: 3.0})
        assert ("lm" in named) == tried


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
    costs.observe("lm", (3, 15), 16, 6.0)
    costs.observe("lm", (4, 15), 16, 8.0)
    assert costs.ratio("lm", (3, 15), 16) == 3.0 and costs.ratio("lm", (4, 15), 16) == 4.0


def test_a_tree_is_taken_where_it_brings_more_than_it_costs():
    made, some = Planner("lm"), [sequence([1, 2])]
    chains = [("none", (0, 0), 1.0), *(("lm", form, 1 + 0.2 * form[0]) for form in CHAINS)]
    made.rounds.learn("lm", 1, chains)
    habit = made.rounds._general("lm")
    habit.first = habit.further = 0.5
    assert made.plan_round(some, 8, 1).bets[0].nodes == made.plan_round(some, 8, 1).bets[0].depth > 0
    made.rounds.learn("lm", 1, [("lm", form, 1 + 0.2 * form[0] + 0.01 * form[1]) for form in TREES])
    bet = made.plan_round(some, 8, 1).bets[0]
    assert (bet.depth, bet.nodes) in TREES
    asked = sequence([1, 3], speculation={"depth": 3, "nodes": 3})
    both = made.plan_round([*some, asked], 8, 1).bets
    assert [bet.nodes <= bet.depth <= 3 for bet in both] == [True, True]  # one form for all
    made.rounds.learn("lm", 1, [("lm", form, 9.0) for form in TREES] * 40)
    assert made.plan_round(some, 8, 1).bets[0].nodes == made.plan_round(some, 8, 1).bets[0].depth


def test_what_a_tree_brings():
    habit = Habit(0.5, 0.8)
    assert habit.tokens((2, 2)) == 0.5 + 0.4
    wide = 0.5 + 0.5 * SECOND + 0.5 * (1 - SECOND) * LATER  # three choices for the first token
    assert habit.tokens((2, 6)) == pytest.approx(wide + 0.5 * (0.8 + 0.2 * SECOND) + 0.5 * SECOND * 0.8)


def test_a_habit_knows_the_first_guess_from_the_others():
    habit = Habit(0.5, 0.5)
    for i in range(400):
        habit.observe(4, 4 if i % 2 else 0, 200)
    assert abs(habit.first - 0.5) < 0.05 and habit.further > 0.95
    assert abs(habit.tokens((4, 4)) - 2.0) < 0.2


# ------------------------------------------------------------------------------------------------ two drafters


def two_drafters() -> tuple[Planner, list]:
    """A draft whose rounds are dear and a lookup whose rounds are cheap, both known."""
    made, some = Planner("lm"), [sequence([1, 2])]
    made.rounds.choices = ("lm", "lookup")
    for name, costs in (("lm", RISING), ("lookup", CHEAP)):
        assert made.unmeasured(some, 1) == name
        made.rounds.learn(name, 1, named(name, costs))
    assert made.unmeasured(some, 1) == "none"
    return made, some


def named(name: str, costs: dict[int, float]) -> list[tuple[str, tuple[int, int], float]]:
    return [(name if who == "lm" else who, form, cost) for who, form, cost in measured(costs)]


def flown(made: Planner, some, holds: dict[str, int], rounds: int) -> list[str]:
    """Who guessed in each round, where so many of each drafter's guesses hold."""
    names = []
    for _ in range(rounds):
        bets = made.plan_round(some, 8, 1).bets
        names.append(bets[0].drafter if bets[0].nodes else "none")
        costs = RISING if names[-1] == "lm" else CHEAP
        fly(made, some, bets, costs, accepted=holds.get(names[-1], 0))
    return names


def test_the_drafter_that_pays_most_is_taken_and_changed_when_the_text_does():
    made, some = two_drafters()
    assert set(flown(made, some, {"lm": 2, "lookup": 0}, 100)[-20:]) <= {"lm", "lookup"}
    assert flown(made, some, {"lm": 2, "lookup": 0}, 100).count("lm") > 90
    names = flown(made, some, {"lm": 2, "lookup": 8}, 200)  # the text begins to copy itself
    assert names[-100:].count("lookup") > 95
    names = flown(made, some, {"lm": 2, "lookup": 0}, 200)  # and ends to
    assert names[-100:].count("lm") > 90
    names = flown(made, some, {"lm": 0, "lookup": 0}, 3000)[-2000:]
    lost = names.count("lm") * (RISING[1] - 1) + names.count("lookup") * (CHEAP[2] - 1)
    assert lost / len(names) <= 2 * PROBE_SHARE * 1.1


def test_what_is_not_in_use_is_tried_in_a_small_share_of_the_time():
    made, some = two_drafters()
    flown(made, some, {"lm": 2}, 200)
    spent, tokens = Counter(), Counter()
    for _ in range(2000):
        bet = made.plan_round(some, 8, 1).bets[0]
        costs, held = (RISING, min(bet.nodes, 2)) if bet.drafter == "lm" else (CHEAP, 0)
        spent[bet.drafter] += costs[bet.nodes]
        tokens[bet.drafter] += 1 + held
        fly(made, some, [bet], costs, accepted=held)
    lost = spent["lookup"] - tokens["lookup"] * spent["lm"] / tokens["lm"]
    assert tokens["lookup"] > 10 and lost <= SPARE_SHARE * 1.1 * spent.total()


def test_who_names_a_drafter_gets_no_other():
    made, some = two_drafters()
    asked = [sequence([1, 2], speculation={"drafter": "lm"})]
    flown(made, some, {"lm": 0, "lookup": 8}, 60)
    assert made.plan_round(some, 8, 1).bets[0].drafter == "lookup"
    assert {made.plan_round(asked, 8, 1).bets[0].drafter for _ in range(60)} <= {"lm", "none"}
    both = made.plan_round([*some, *asked], 8, 1).bets
    assert len({bet.drafter for bet in both if bet.nodes}) == 1  # one drafter a round


def test_a_size_that_has_no_room_for_guesses_is_never_tried():
    made, some = Planner("lm"), [sequence([1, i]) for i in range(3)]
    made.rounds.learn("lm", 4, [("none", (0, 0), 1.0)])
    assert {bet for _ in range(200) for bet in [*made.plan_round(some, 8, 4).bets, rest(made, some)]} == {
        NO_BET
    }
    made.rounds.learn("lm", 4, [("lm", (1, 1), 1.9)])
    tried = set()
    for _ in range(4000):
        bets = made.plan_round(some, 8, 4).bets
        tried.add((bets[0].depth, bets[0].nodes))
        fly(made, some, bets, {0: 1.0, 1: 1.9})
    assert tried == {(0, 0), (1, 1)}


def rest(made: Planner, some) -> Bet:
    fly(made, some, [NO_BET] * len(some), CHEAP)
    return NO_BET
