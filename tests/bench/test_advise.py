"""What an advice is made of is what happened, and the advice follows from it."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider import LLM, SamplingParams
from outrider.bench import advise as measuring
from outrider.bench.advice import advise, prices, rules_of_thumb, said, speculative_config, table
from outrider.bench.advise import (
    Expected,
    Measured,
    Session,
    Trial,
    Trials,
    by_task,
    draft_seconds,
    expected,
    in_turn,
    row_costs,
    step_outcomes,
    try_drafter,
)
from outrider.bench.as_if import AsIf
from outrider.bench.draft_facts import CandidateFacts, facts_of_draft
from outrider.bench.tally import acceptance_by_depth
from outrider.bench.what_if import price_table
from outrider.cli.coming_from import read_speculative_config
from outrider.control.costs import CapturedCosts, EagerCosts
from outrider.control.expected import CapturedChains, EagerChains
from outrider.load.checkpoint import open_checkpoint
from outrider.model.decoder import kv_bytes
from outrider.types import NO_TREE, DraftPlan, Outcome, StepRecord, TreeShape
from tests.bench.conftest import prompts
from tests.targets import pair_head, write_target
from tests.tiny import sequence

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, seed=3, temperature=0.0)
SOON = 1e12  # never


def quiet(what: str, done: float) -> None:
    assert 0 <= done <= 1


def trials(steps: dict[int, dict[str, list[list[tuple[int, int]]]]], draft_s: float = 0.0) -> Trials:
    """Of given outcomes, by depth and task."""
    made = {
        depth: Trial(
            some,
            [draft_s * depth],
            {task: [1.0] for task in some},
            [o for own in some.values() for p in own for o in p],
        )
        for depth, some in steps.items()
    }
    return Trials(made, {1: [1.0] * 3}, {1: [0.1] * 3}, [1.0, 1.0], [40])


def candidate(draft: str, *speedups: float, kind: str = "lookup", spread: float = 0.02, **more) -> Measured:
    known = [
        Expected(b, 4, s, s - spread, s + spread, 1.5 * s, 0.6, 0.4, 1.3, 10 * s, 10.0, True, {4: s})
        for b, s in zip((1, 4, 16, 64), speedups, strict=False)
    ]
    facts = more.pop("facts", CandidateFacts(kind))
    options = dict(tasks={}, tasks_by_batch={}, acceptance=[], draft_ratio=0.1, check={}, prompts=(8, 9))
    return Measured(draft, facts, known, **{**options, **more})


def test_tasks_are_asked_in_turn() -> None:
    asked = in_turn({"a": [[1], [2], [3]], "b": [[4]]}, lambda task: replace(PARAMS, top_k=len(task)))
    assert [(task, ids) for task, ids, _ in asked] == [("a", [1]), ("b", [4]), ("a", [2]), ("a", [3])]
    assert asked[0][2].top_k == 1


def test_drafts_are_counted_as_the_engine_saw_them(wide: AsIf) -> None:
    asked = in_turn({"chat": prompts(2)}, lambda _: PARAMS)
    found = try_drafter(wide, "lm", asked, (2, 3), SOON, quiet)
    assert set(found.by_depth) <= {2, 3} and found.by_depth
    for depth, trial in found.by_depth.items():
        assert len(trial.prompts("chat")) == 2
        for steps in trial.prompts():
            assert all(drafted == depth and 0 <= accepted <= depth for drafted, accepted in steps)
        assert min(trial.draft_s) > 0
    assert 1 in found.rows and max(found.rows) <= 4
    assert found.context == [24, 24] and len(found.plain) == 2
    assert found.at(1) is found.by_depth[min(found.by_depth)]


def test_of_the_last_step_counts_what_was_emitted() -> None:
    def record(emitted: int) -> StepRecord:
        outcome = Outcome(sequence([1, 2]), DraftPlan("lookup", 4, 4), 4, 4, 3, 3)
        return StepRecord(5, 1, 1, 4, 3, emitted, 0, 0, 1, 0, 1, [outcome])

    assert step_outcomes(record(4), last=False) == [(4, 3)]
    assert step_outcomes(record(2), last=True) == [(4, 1)]


def test_larger_batches_cost_a_pass_over_their_rows_and_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def passes(llm, shapes, context, repeats):
        seen.extend(shapes)
        return [10.0 * rows for _, rows in shapes]

    monkeypatch.setattr(measuring, "pass_seconds", passes)
    one = trials({2: {"t": [[(2, 1)]]}})
    one.rows, one.host = {1: [1.0] * 3, 3: [2.0] * 3, 2: [9.0]}, {1: [0.2] * 3, 3: [0.6] * 3}
    costs = row_costs(SimpleNamespace(), one, (1, 4), 2, SOON, quiet)  # type: ignore[arg-type]
    alone, four = (costs.by_batch[batch].by_rows for batch in (1, 4))
    assert alone[1] == 1.0 and alone[3] == 2.0
    assert alone[2] == pytest.approx(20 + 0.4)  # one step is no median
    assert four[12] == pytest.approx(120 + 0.2 + 0.2 * 11) and 3 not in four
    assert seen == [(1, 2), (4, 4), (4, 8), (4, 12)] and not costs.unmeasured
    late = row_costs(SimpleNamespace(), one, (1, 4), 2, -1.0, quiet)  # type: ignore[arg-type]
    assert late.unmeasured == {1, 4}
    assert late.by_batch[4].by_rows[8] == pytest.approx(2.0 + 0.5 * 5)  # in a straight line


def test_rows_of_several_sequences_are_not_taken_for_rows_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence with three draft tokens took four rows; a plain step of four sequences is measured by itself."""
    monkeypatch.setattr(measuring, "pass_seconds", lambda llm, shapes, *_: [5.0 for _ in shapes])
    one = trials({2: {"t": [[(2, 1)]]}})
    one.rows, one.host = {1: [1.0] * 3, 4: [2.0] * 3}, {1: [0.0] * 3}
    costs = row_costs(SimpleNamespace(), one, (1, 4), 2, SOON, quiet)  # type: ignore[arg-type]
    eager = EagerChains(costs.by_batch[1], lambda batch, depth: 0.0, costs.by_batch)
    assert (eager.plain(4), eager.step(1, 3, 3)) == (5.0, 2.0)
    session = Session((1, 4), rows=costs)
    one.rows[1] = [1.5] * 3  # the machine is slower now
    own = session._rows_with(one)
    assert own[4].step(4) == pytest.approx(7.5) and own[1].step(4) == 2.0


def test_plain_decoding_is_given_up_once_its_steps_are_known(wide: AsIf) -> None:
    asked = in_turn({"chat": prompts(4)}, lambda _: PARAMS)
    found = try_drafter(wide, "lm", asked, (2,), SOON, quiet)
    assert len(found.plain) == 2 and len(found.context) == 4
    assert len(found.by_depth[2].prompts("chat")) == len(found.by_depth[2].ratios["chat"]) == 4


def test_drafting_costs_more_for_more_sequences(wide: AsIf) -> None:
    asked = in_turn({"chat": prompts(1)}, lambda _: PARAMS)
    found = try_drafter(wide, "lm", asked, (2,), SOON, quiet)
    seconds = draft_seconds(wide, "lm", found, asked, (1, 4), SOON)
    assert 0 < seconds(1, 1) < seconds(1, 2) <= seconds(4, 2)
    free = draft_seconds(wide, "lookup", trials({2: {"t": [[(2, 1)]]}}, 1e-6), asked, (1, 4), SOON)
    assert free(4, 2) == pytest.approx(4 * free(1, 2))
    assert free(1, 1) == pytest.approx(free(1, 2) / 2)


def test_the_best_depth_is_taken_at_every_batch() -> None:
    """Rows are free up to eight and dear from there on: deep for one sequence, shallow for four."""
    model = EagerCosts()
    model.by_rows.update({1: 1.0, 8: 1.0, 16: 2.0, 36: 4.5})
    costs = EagerChains(model, lambda batch, depth: 0.0)
    steps = [(4, 4), (4, 1), (4, 1), (4, 2)] * 10
    found = trials({2: {"t": [[(2, min(a, 2)) for _, a in steps]]}, 4: {"t": [steps]}})
    one, four = (expected(found, batch, costs, True) for batch in (1, 4))
    assert (one.depth, four.depth) == (4, 1)
    assert one.speedup == pytest.approx(3.0) and one.tokens_per_step == pytest.approx(3.0)
    assert one.low < one.speedup < one.high and one.pays
    assert list(one.by_depth) == [1, 2, 3, 4] and one.by_depth[4] == one.speedup
    assert four.speedup == pytest.approx(2.0) and four.break_even == 0.0
    assert expected(found, 4, costs, False).low < four.low  # less is known


def test_acceptance_by_depth_and_task() -> None:
    found = trials({2: {"code": [[(2, 2), (2, 1)]], "chat": [[(2, 0), (0, 0)]]}})
    assert acceptance_by_depth(found.by_depth[2].verdicts) == [
        {"depth": 1, "rate": pytest.approx(2 / 3), "of": 3},
        {"depth": 2, "rate": 0.5, "of": 2},
    ]
    model = EagerCosts()
    model.by_rows.update({1: 1.0, 3: 1.0})
    tasks = by_task(found, 2, EagerChains(model, lambda batch, depth: 0.0))
    assert {name: one["tokens_per_step"] for name, one in tasks.items()} == {"code": 2.5, "chat": 1.0}


def test_a_session_measures_drafters_of_a_model(wide: AsIf) -> None:
    asked = in_turn({"chat": prompts(2), "code": prompts(1)}, lambda _: PARAMS)
    session = Session((1, 4), (2, 4), seconds=0.5, candidates=2)
    found = [session.measure(wide, "lookup", name, asked, quiet) for name in ("lookup", "lm")]
    for one in found:
        assert [e.batch for e in one.expected] == [1, 4]
        assert all(e.low <= e.speedup <= e.high and e.p99 > 0 for e in one.expected)
        assert json.loads(json.dumps(one.as_json()))["expected"][0]["batch"] == 1
    for checked in found[1].check.values():
        assert all(task["seen"] > 0 < task["speedup"] for task in checked.values())
    assert found[1].draft_ratio > found[0].draft_ratio
    assert found[0].facts == CandidateFacts("lookup")
    assert session.rows is not None


def test_steps_are_captured_before_answers_are_timed(wide: AsIf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first answers of every depth wait for that, and a good depth is given up."""
    calls: list[str] = []

    def noted(name: str, work):
        return lambda *given: calls.append(name) or work(*given)

    for name in ("captured_costs", "try_drafter"):
        monkeypatch.setattr(measuring, name, noted(name, getattr(measuring, name)))
    asked = in_turn({"chat": prompts(1)}, lambda _: PARAMS)
    Session((1,), (2,), seconds=0.1).measure(wide, "lookup", "lookup", asked, quiet)
    assert calls[:2] == ["captured_costs", "try_drafter"]


def test_what_brings_most_over_all_batches_is_advised() -> None:
    deep, steady = candidate("deep", 2.0, 0.9, 0.7, 0.5), candidate("steady", 1.6, 1.5, 1.2, 1.1)
    advice = advise("model", 135_000_000, [deep, steady])
    assert (advice.draft, advice.depth) == ("steady", 4)
    assert advice.command == "outrider serve model --draft steady"
    assert any("deep is better at batch 1" in reason for reason in advice.why)
    only = advise("model", 1, [deep])
    assert only.draft == "deep" and any("at batch 4, 16, 64 it is not sure to pay" in why for why in only.why)


def test_none_is_advised_where_nothing_is_sure_to_pay() -> None:
    advice = advise("a model", 1, [candidate("lookup", 1.01, 0.9), candidate("early_exit", 0.6, 0.4)])
    assert (advice.draft, advice.depth, advice.vllm) == ("none", 0, None)
    assert advice.command == "outrider serve 'a model' --draft none"
    assert advice.why[0] == "lookup is not sure to pay: 1.01x, 0.99 to 1.03 at best (batch 1, depth 4)"
    assert advice.why[1].startswith(
        "early_exit does not pay: a step brings 0.90 tokens and takes 1.50 times as long"
    )
    assert advise("m", 1, []).draft == "none"


def test_nothing_is_advised_from_too_few_prompts_or_on_a_guess() -> None:
    few = [candidate("auto", 1.5, prompts=(1, 18)), candidate("lookup", 0.9, prompts=(6, 18))]
    advice = advise("a model", 1, few, seconds=20)
    assert (advice.draft, advice.command, advice.vllm) == ("", "", None)
    assert advice.why == ["1 of 18 prompts were measured, and 4 are needed at least: measure for longer"]
    lines = list(said(advice))
    assert lines[0] == "no advice yet:" and "  measure more: outrider advise 'a model' --seconds 60" in lines
    assert advise("m", 1, [candidate("x", 1.5, prompts=(2, 2))]).why[0].endswith("give more prompts")
    likely = advise("m", 1, [candidate("auto", 1.2, 0.9, spread=0.3)])
    assert likely.draft == "" and likely.why[0].startswith(
        "auto may pay: 1.20x at batch 1, between 0.90 and 1.50;"
    )


def test_little_time_goes_to_more_prompts_with_shorter_answers(wide: AsIf, monkeypatch) -> None:
    """A second a token: two of three depths are left out, and answers are as short as they may be."""
    clock = iter(range(10**6))
    monkeypatch.setattr(measuring.time, "monotonic", lambda: float(next(clock)))
    asked = in_turn({"chat": prompts(6)}, lambda _: replace(PARAMS, max_tokens=40))
    depths, longest = measuring._affordable(wide, "lookup", asked, (2, 4, 8), 20.0)
    assert (list(depths), longest) == ([4], 16)
    depths, longest = measuring._affordable(wide, "lookup", asked, (2, 4, 8), 1e5)
    assert depths == (2, 4, 8) and longest > 40
    found = try_drafter(wide, "lookup", asked, (2, 4, 8), -1.0, quiet)
    assert len(found.context) == 1  # even the fewest would take too long


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("lookup", ["--draft", "lookup", "--speculate", "3"]),
        ("lm", ["--draft", "org/small", "--speculate", "3"]),
        ("eagle", ["--draft", "org/small", "--speculate", "3"]),
    ],
)
def test_settings_of_the_other_engine_mean_the_same_here(kind: str, flags: list[str]) -> None:
    one = candidate("x", 2.0, facts=CandidateFacts(kind, model="org/small", engines=("outrider", "vllm")))
    config, _ = speculative_config(one, 3)
    assert read_speculative_config(json.dumps(config)) == flags


def test_what_the_other_engine_has_not_is_said() -> None:
    assert speculative_config(candidate("early_exit", 2.0, kind="early_exit"), 3)[0] is None
    own = candidate("auto", 2.0, facts=CandidateFacts("eagle", model="here", engines=("outrider",)))
    config, note = speculative_config(own, 3)
    assert config is None and note.startswith("only outrider can load this draft; outrider pairs export")
    lines = list(said(advise("m", 1, [own])))
    assert not any("--speculative-config" in line for line in lines)
    assert "rules of thumb (a difference below 5 % counts as none):" in lines


def test_every_batch_is_priced_by_its_own_rate() -> None:
    rows = prices([candidate("lookup", 2.0, 1.5), candidate("early_exit", 0.5, 0.5)], 36.0)
    assert [(row["draft"], row["batch"]) for row in rows[:3]] == [
        ("lookup", 1),
        ("lookup", 4),
        ("early_exit", 1),
    ]
    assert rows[0]["plain_per_million"] == pytest.approx(1000.0)  # ten tokens a second
    assert rows[0]["per_million"] == pytest.approx(500.0) and rows[0]["saving"] == pytest.approx(0.5)
    assert rows[2]["saving"] == pytest.approx(-1.0)
    lines = list(price_table(rows))
    assert lines[0].split() == ["draft", "batch", "plain", "$/M", "tok", "speculative", "saving"]
    assert lines[1].split() == ["lookup", "1", "1000.000", "500.000", "50", "%"]


def test_rules_of_thumb_are_held_against_the_measurement() -> None:
    facts = CandidateFacts("lm", 10**8, 0.32, "qwen2", True, True)
    tasks = {"code": {"tokens_per_step": 1.4}, "chat": {"tokens_per_step": 2.0}}
    heat = {"temperature": 0.7, "tokens_per_step": 1.8, "other": 0.0, "there": 2.4}
    one = candidate("small", 1.7, facts=facts, tasks=tasks, other_temperature=heat)
    found = {rule.rule: rule for rule in rules_of_thumb(10**9, one)}
    agrees = {name: rule.agrees for name, rule in found.items()}
    assert agrees == {
        "a draft of the target's own family": True,
        "a draft of 2-5 % of the target, or 10-20 times smaller": False,  # a third of it, and it pays
        "targets above 30B gain most": False,  # 1B gains much
        "code gains more than prose": False,
        "hot sampling gains least": True,
    }
    assert found["hot sampling gains least"].measured == "2.40 tokens a step at temperature 0, 1.80 at 0.7"
    loses = {r.rule: r.agrees for r in rules_of_thumb(70 * 10**9, candidate("small", 0.9, facts=facts))}
    assert loses["a draft of the target's own family"] is False
    assert loses["targets above 30B gain most"] is False
    assert loses["code gains more than prose"] is None
    assert len(rules_of_thumb(1, candidate("lookup", 1.0))) == 3


def test_everything_fits_80_columns() -> None:
    some = [candidate("org/a-draft-with-a-long-name", 12.34, 1.0, 0.5), candidate("lookup", 1.0, 1.0, 1.0)]
    some[0].facts = CandidateFacts("lm", 10**9, 0.1, "llama", False, True, 4 * 10**9, 123456, "x")
    some[1].expected[2] = replace(some[1].expected[2], measured=False, break_even=None)
    lines = [*table(some), *price_table(prices(some, 2.5)), *said(advise("m", 10**9, some))]
    lines += said(
        advise("m", 10**9, [candidate("auto", 2.0, facts=CandidateFacts("eagle", engines=("outrider",)))])
    )
    assert max(len(line) for line in lines if "--speculative-config" not in line) <= 80
    assert any("another family, llama" in line for line in lines)
    assert any(line.startswith("~") for line in lines)
    assert sum("never" in line for line in lines) == 1
    assert any("time for 8 of 9 prompts" in line for line in lines)


def test_a_draft_tokens_share_of_captured_steps_is_what_it_makes_them_longer() -> None:
    costs = CapturedCosts()
    costs.learn("lm", 1, [("none", NO_TREE, 2.0), ("lm", TreeShape(4, 4), 6.0)])
    assert measuring._draft_ratio(trials({}), 4, CapturedChains(costs, "lm")) == pytest.approx(0.5)


@pytest.mark.parametrize("kind", ["eagle", "lm"])
def test_engine_and_advice_report_the_same_memory(kind: str, tmp_path: Path) -> None:
    """And it is what the tensors take: weights, keys and values, hidden states."""
    target = write_target(tmp_path / "target")
    draft = pair_head(tmp_path / "head", target) if kind == "eagle" else target
    with LLM(
        target, draft=str(draft), device="cpu", kernels="torch", max_sequences=2, cache_bytes=1 << 20
    ) as llm:
        store, features = llm.engine.drafters[kind].store, llm.engine.cache.store.features
        facts = facts_of_draft(llm, str(draft))
        assert {kind: facts.memory_tokens} == llm.engine.planner.returns.held
        cached = sum(
            t.nbytes for t in (*store.keys, *store.values, *([] if features is None else [features]))
        )
        assert facts.memory_tokens == (facts.weight_bytes + cached) // kv_bytes(llm.model)
        assert facts_of_draft(llm, "lookup").memory_tokens == 0
        checkpoint = open_checkpoint(draft)
        numbers = sum(prod(checkpoint.shape(name)) for name in checkpoint.names())
        assert numbers <= facts.weight_bytes <= 5 * numbers
