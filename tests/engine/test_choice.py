"""The drafter follows the content, for each request, eagerly and with resident sequences. What the target writes is
fixed beforehand, and costs are given, so that nothing depends on the clock.
"""

from __future__ import annotations

from collections import Counter

from outrider.engine.engine import MAX_SCORED
from tests.engine.scripted import LAGS, PHASE, PROMPT, choices, copied, make_engine, novel, run
from tests.tiny import request

FOLLOWS = 20  # steps, at most, until the choice is another: the head's first draft may be rejected


def script_of(seed: int) -> list[int]:
    """Copied, novel, copied again, and novel again."""
    prompt = novel(PROMPT, seed)
    first, second = novel(PHASE, seed + 1), novel(PHASE, seed + 2)
    return [*prompt, *copied(prompt, PHASE), *first, *copied(prompt, PHASE), *second]


@LAGS
def test_the_choice_follows_the_content(lag) -> None:
    engine, _ = make_engine(lag, right=0.8)
    chosen = choices(run(engine, {"a": script_of(1)}), "a")
    for phase, name in enumerate(("lookup", "head", "lookup", "head")):
        here = [who for written, who in chosen if written // PHASE == phase]
        followed = next(i for i in range(len(here)) if here[i:].count(name) >= 0.9 * len(here[i:]))
        assert followed <= FOLLOWS and here[-5:].count(name) >= 4, (phase, here)


@LAGS
def test_lookup_is_expected_by_its_last_draft_from_the_first_score_on(lag) -> None:
    """The score of a prompt's own step starts an estimate of a model-free drafter."""
    engine, _ = make_engine(lag, right=0.8)
    script = [*(prompt := novel(PROMPT, 1)), *copied(prompt, PHASE)]
    engine.model.scripts["a"] = script
    [sequence] = engine.add(request("a", prompt, max_tokens=PHASE))
    while len(sequence.output) < 2:
        engine.step()
    assert engine.planner.rates.of(sequence, "lookup").after is not None


@LAGS
def test_two_requests_of_a_step_have_a_drafter_each(lag) -> None:
    engine, _ = make_engine(lag, right=0.8, level=0.02, deepest=4)
    prompt = novel(PROMPT, 9)
    copies, new = [*prompt, *copied(prompt, PHASE)], [*novel(PROMPT, 10), *novel(PHASE, 11)]
    outcomes = [result.record.outcomes for result in run(engine, {"copies": copies, "new": new})]
    pairs = [{o.sequence.request.id: o for o in some} for some in outcomes if len(some) == 2]
    names = [(pair["copies"].draft_plan.drafter, pair["new"].draft_plan.drafter) for pair in pairs]
    assert names[FOLLOWS:].count(("lookup", "head")) >= 0.8 * len(names[FOLLOWS:]) > 10
    accepted = {name: sum(pair[name].accepted for pair in pairs[FOLLOWS:]) for name in ("copies", "new")}
    assert accepted["copies"] > 1.2 * accepted["new"] > 0  # each with its own


@LAGS
def test_a_drafter_that_is_never_right_is_dropped(lag) -> None:
    engine, head = make_engine(lag, right=0.0)
    run(engine, {"a": [*novel(PROMPT, 3), *novel(2 * PHASE, 4)]})
    assert 0 < head.asked <= 24  # until it was known, and probes
    before = head.asked
    results = run(engine, {name: [*novel(PROMPT, n), *novel(PHASE, n + 50)] for n, name in enumerate("bcd")})
    assert head.asked - before <= 0.02 * sum(result.record.emitted for result in results)


@LAGS
def test_scores_bring_lookup_back_without_a_draft_of_its_own(lag) -> None:
    """Nothing pays, then the text copies itself."""
    engine, _ = make_engine(lag, right=0.0)
    prompt = novel(PROMPT, 5)
    chosen = choices(run(engine, {"a": [*prompt, *novel(PHASE, 6), *copied(prompt, PHASE)]}), "a")
    plain = [who for written, who in chosen if PHASE // 2 < written < PHASE]
    assert plain.count("none") > 0.6 * len(plain)  # one step may be eight plain passes
    after = [who for written, who in chosen if written >= PHASE]
    assert "lookup" in after[:FOLLOWS] and after[-4:] == ["lookup"] * 4


@LAGS
def test_everybody_is_scored_by_turns_where_there_are_many(lag) -> None:
    engine, _ = make_engine(lag, right=0.0)
    many = 2 * MAX_SCORED + 3
    scripts = {f"{n}": [*novel(PROMPT, n), *novel(90, n + 500)] for n in range(many)}
    records = [result.record for result in run(engine, scripts)]
    scored = [[o.sequence for o in r.shadow] for r in records]
    assert max(map(len, scored)) <= MAX_SCORED
    counts = Counter(sequence for some in scored for sequence in some)
    assert len(counts) == many and max(counts.values()) <= 3 * min(counts.values())


@LAGS
def test_the_planner_hears_of_answers_that_ended_and_of_prompts_that_wait(lag) -> None:
    engine, _ = make_engine(lag, right=0.0)
    waiting, plan = [], engine.planner.plan

    def noted(work, options):
        waiting.append((options.waiting, len(engine.scheduler.waiting)))
        return plan(work, options)

    engine.planner.plan = noted
    lengths = {f"{n}": 4 + 3 * n for n in range(24)}
    run(engine, {name: [*novel(PROMPT, n), *novel(n, 900)] for name, n in lengths.items()})
    assert all(said == there for said, there in waiting) and max(waiting)[0] > 0


@LAGS
def test_who_names_a_drafter_or_none_gets_that(lag) -> None:
    script = script_of(7)[: PROMPT + PHASE + 40]
    for asked, names in (
        ({"drafter": "lookup"}, {"lookup"}),
        ({"drafter": "head"}, {"head"}),
        (False, set()),
    ):
        engine, _ = make_engine(lag, right=0.8)
        records = [result.record for result in run(engine, {"a": script}, speculation=asked)]
        assert {o.draft_plan.drafter for r in records for o in r.outcomes if o.drafted} == names
        assert all(o.draft_plan.drafter in names for r in records for o in r.shadow)


def test_reasons_say_when_there_is_nothing_to_propose() -> None:
    engine, _ = make_engine(None, right=0.0)
    engine.planner.choices = ("lookup",)
    engine.planner.default = "lookup"
    prompt = novel(PROMPT, 5)
    results = run(engine, {"a": [*prompt, *novel(PHASE, 6), *copied(prompt, PHASE)]})
    records = [result.record for result in results]
    for record in records[1:]:
        (reason,), (outcome,) = [one.kind for one in record.reasons], record.outcomes
        assert (reason == "pays") == (outcome.drafted > 0) == (outcome.draft_plan.drafter == "lookup")
        assert reason in ("pays", "nothing found", "below break-even")
    assert {"pays", "nothing found"} <= {record.reasons[0].kind for record in records}
