"""Every guard, crossed in both directions by a running engine; the answers stay what the target writes by itself
(`run` compares them). Every reason is in the record, the log and the metrics.
"""

from __future__ import annotations

import logging

import pytest

from outrider.control.guards import Guards
from outrider.control.reasons import KINDS
from outrider.engine.engine import Engine
from outrider.errors import InvalidRequest
from outrider.serve.engine_process import EngineProcess
from outrider.serve.metrics import Metrics
from outrider.types import Reason, StepResult
from tests.engine.scripted import LAGS, PHASE, PROMPT, copied, make_engine, novel, run
from tests.tiny import request


def kinds(results: list[StepResult]) -> list[set[str]]:
    """Of every step that emitted something."""
    return [{r.kind for r in result.record.reasons} for result in results if result.events]


def copies(seed: int, tokens: int = PHASE) -> list[int]:
    prompt = novel(PROMPT, seed)
    return [*prompt, *copied(prompt, tokens)]


def in_turn(engine: Engine, first: list[str], later: str, **options) -> list[StepResult]:
    """Some requests, and one more that comes when they have begun, and ends before they do."""
    scripts = {name: copies(n, 4 * PHASE if name in first else 40) for n, name in enumerate([*first, later])}
    engine.model.scripts.update(scripts)
    started, results = [], []

    def add(name: str) -> None:
        script = scripts[name]
        started.extend(engine.add(request(name, script[:PROMPT], max_tokens=len(script) - PROMPT, **options)))

    for name in first:
        add(name)
    for _ in range(12):
        results += engine.step()
    add(later)
    while not engine.idle:
        results += engine.step()
    assert {s.request.id: s.tokens for s in started} == scripts
    return results


@LAGS
def test_batch(lag) -> None:
    engine, _ = make_engine(lag, 0.8, names=("lookup",), guards=Guards(max_batch=2, max_depth=4))
    results = in_turn(engine, ["a", "b"], "c")
    steps = [(len(result.record.reasons), {r.kind for r in result.record.reasons}) for result in results]
    assert all("pays" not in found for n, found in steps if n == 3) and any(
        n == 3 and "batch" in f for n, f in steps
    )
    last = max(i for i, (n, _) in enumerate(steps) if n == 3)
    assert any("pays" in found for _, found in steps[:last]) and any(
        "pays" in found for _, found in steps[last + 1 :]
    )
    texts = {str(r) for result in results for r in result.record.reasons if r.kind == "batch"}
    assert texts == {"off: batch 3 > 2"}


@LAGS
def test_temperature(lag) -> None:
    engine, _ = make_engine(lag, 0.8, names=("lookup",))
    for temperature, expected in ((1.5, "pays"), (1.51, "temperature"), (1.5, "pays")):
        found = set().union(*kinds(run(engine, {"a": copies(1)}, temperature=temperature)))
        assert expected in found and ({"pays", "temperature"} - {expected}).isdisjoint(found)


@LAGS
def test_a_request_that_does_not_gain(lag, monkeypatch) -> None:
    monkeypatch.setattr("outrider.control.planner.PROBE_INTERVAL", 4)
    monkeypatch.setattr("outrider.control.planner.PROBE_SHARE", 0.1)
    engine, head = make_engine(lag, 0.0, row=0.02, level=0.05, names=("head",))
    script = [*novel(PROMPT, 1), *novel(4 * PHASE, 2)]
    engine.model.scripts["a"] = script
    [sequence] = engine.add(request("a", script[:PROMPT], max_tokens=len(script) - PROMPT))
    results: list[StepResult] = []
    while not engine.idle:
        if len(sequence.output) > 2 * PHASE:
            head.right = 1.0
        results += engine.step()
    assert sequence.tokens == script
    found = ["".join(k) for k in kinds(results) if len(k) == 1]
    first, last = found.index("below break-even"), len(found) - 1 - found[::-1].index("below break-even")
    assert "probe" in found[first:last] and found[-3:] == ["pays"] * 3
    assert last < len(found) - 10 and "pays" in found[: first + 1]


@LAGS
def test_how_far_others_drafts_may_slow_a_request_down(lag) -> None:
    """One answer is copied, the other is new and waits for the first one's drafts."""
    scripts = {"copies": copies(9, 3 * PHASE), "new": [*novel(PROMPT, 10), *novel(3 * PHASE, 11)]}
    worst = {}
    for bound in (1.05, 9.0):
        guards = Guards(max_slowdown=bound, max_depth=8)
        engine, _ = make_engine(lag, 0.0, row=0.1, names=("lookup",), guards=guards)
        lags, observe = [], engine.planner.fairness.observe

        def observed(record, ratio, fairness=engine.planner.fairness, inner=observe, lags=lags) -> None:
            inner(record, ratio)
            for s, behind in fairness.lag.items():
                written = len(s.tokens) - s.prompt_len
                if s.request.id == "new" and written > 60:
                    lags.append(behind / written)

        engine.planner.fairness.observe = observed
        found = kinds(run(engine, scripts))
        worst[bound] = max(lags, default=0.0)
        flat = [kind for some in found for kind in some]
        assert "pays" in flat and ("slowdown" in flat) == (bound < 2)
        if bound < 2:  # and back again
            assert "pays" in flat[flat.index("slowdown") :]
    assert worst[1.05] < 0.15 < worst[9.0]


@LAGS
def test_plain_steps_are_measured_though_drafts_pay(lag, monkeypatch) -> None:
    monkeypatch.setattr("outrider.control.costs.BASELINE_INTERVAL", 10)
    engine, _ = make_engine(lag, 0.8, names=("lookup",), guards=Guards(max_depth=4))
    found = ["".join(sorted(some)) for some in kinds(run(engine, {"a": copies(1, 4 * PHASE)}))]
    assert 0.05 * len(found) <= found.count("baseline") <= 0.15 * len(found)
    after = [found[i + 1] for i, kind in enumerate(found[:-2]) if kind == "baseline"]
    assert set(after) <= {"pays", "baseline"} and "pays" in after


# ------------------------------------------------------------------------------------------ saying why


def test_reasons_in_words() -> None:
    assert str(Reason("batch", 0, (("batch", 23, 16),))) == "off: batch 23 > 16"
    facts = (("temperature", 1.2), ("next guess", 0.31), ("break-even", 0.44))
    assert str(Reason("pays", 2, facts)) == "depth 2: temperature 1.2, next guess 0.31, break-even 0.44"
    probe = Reason("probe", 2, (("drafter", "lm"), ("idle steps", 24)))
    assert str(probe) == "depth 2: probe, drafter lm, idle steps 24"
    assert str(Reason("prefill")) == "off: prefill"


@LAGS
def test_reasons_are_in_record_log_and_metrics(lag, caplog, monkeypatch) -> None:
    monkeypatch.setattr("outrider.control.costs.BASELINE_INTERVAL", 10)
    guards = Guards(max_batch=3, max_depth=8)
    engine, _ = make_engine(lag, 0.3, guards=guards)
    hot = {"temperature": 1.6}
    with caplog.at_level(logging.DEBUG, "outrider.engine.engine"):
        results = run(engine, {"a": [*copies(1), *novel(PHASE, 2)], "b": copies(3)})
        results += run(engine, {"c": copies(1)}, **hot)
        results += run(engine, {"d": copies(1)}, speculation={"depth": 2})
        results += run(engine, {"e": copies(1)}, speculation=False)
        results += run(engine, {name: copies(n) for n, name in enumerate("fghi")})
    metrics, counted = Metrics(), {}
    for result in results:
        metrics.step(EngineProcess._step(None, result.record))  # type: ignore[arg-type]
        for reason in result.record.reasons:
            counted[reason.kind] = counted.get(reason.kind, 0) + 1
    assert (
        {"pays", "baseline", "temperature", "asked", "off", "batch", "prefill"}
        <= counted.keys()
        <= KINDS.keys()
    )
    series = metrics.counters["planner_decisions"]
    assert {labels[0][1]: times for labels, times in series.items()} == counted
    lines = {line.partition(": ")[2] for line in caplog.messages}
    assert {str(r) for result in results for r in result.record.reasons if result.events} <= lines
    caplog.clear()
    run(engine, {"j": copies(1)})
    assert not caplog.messages  # only on demand


@LAGS
def test_step_details_are_kept_for_those_who_ask(lag) -> None:
    engine, _ = make_engine(lag, 0.8)
    engine.model.scripts.update({"a": copies(1), "b": copies(2)})
    both = [
        engine.add(request(name, copies(n)[:PROMPT], max_tokens=PHASE, speculation=asked))[0]
        for n, name, asked in ((1, "a", {"explain": True}), (2, "b", {}))
    ]
    events = []
    while not engine.idle:
        events += [event for result in engine.step() for event in result.events]
    details = both[0].details
    assert len(details) >= both[0].steps // 8 > 0
    assert {str(d.reason)[:5] for d in details} <= {"depth", "off: "}
    assert both[1].details == []
    assert [e.detail for e in events if e.request_id == "a"] == details
    assert not any(e.detail for e in events if e.request_id == "b")


@LAGS
def test_step_details_say_what_was_drafted_and_what_became_of_it(lag) -> None:
    engine, _ = make_engine(lag, 0.8)
    engine.model.scripts["a"] = copies(1)
    asked = {"explain": True, "drafter": "lookup", "depth": 3}
    [one] = engine.add(request("a", copies(1)[:PROMPT], max_tokens=PHASE, speculation=asked))
    while not engine.idle:
        engine.step()
    assert [origin for d in one.details for origin in d.origins] == one.origins
    drafting = [d for d in one.details if d.tokens]
    assert [(len(d.tokens), d.origins.count("accepted")) for d in drafting] == one.draft_counts
    assert drafting and {d.drafter for d in drafting} == {"lookup"}
    place = one.prompt_len
    for detail in one.details:
        path = [detail.tokens[node] for node in detail.accepted]
        kept = detail.origins.count("accepted")
        assert one.tokens[place : place + kept] == path[:kept]
        assert [detail.parents[node] for node in detail.accepted] == [-1, *detail.accepted][: len(path)]
        place += len(detail.origins)


# ---------------------------------------------------------------------------------------- drafts that never pay


@LAGS
@pytest.mark.parametrize("release", [True, False])
def test_a_draft_that_never_pays_is_reported_and_released(lag, release, caplog, monkeypatch) -> None:
    monkeypatch.setattr("outrider.control.history.REPORT_STEPS", 100)
    engine, head = make_engine(lag, 0.0, release_draft=release)
    engine.planner.returns.watch("head", 1234)
    run(engine, {"a": copies(1), "b": [*novel(PROMPT, 3), *novel(PHASE, 4)]})
    said = [line for line in caplog.messages if "does not pay" in line]
    assert len(said) == 1 and "head" in said[0] and "1234 tokens" in said[0] and "--release-draft" in said[0]
    assert head.asked
    run(engine, {"c": copies(1)})
    assert ("head" in engine.drafters) != release
    assert engine.planner.returns.unprofitable == ({} if release else {"head": 1234})
    if release:
        assert engine.planner.default == "lookup" and engine.planner.choices == ("lookup",)
        with pytest.raises(InvalidRequest, match="head"):
            engine.add(request("d", [1, 2], speculation={"drafter": "head"}))


def test_a_draft_that_pays_is_not_reported(monkeypatch, caplog) -> None:
    monkeypatch.setattr("outrider.control.history.REPORT_STEPS", 50)
    engine, _ = make_engine(None, 0.9, names=("head",))
    engine.planner.returns.watch("head", 1234)
    run(engine, {"a": [*novel(PROMPT, 3), *novel(2 * PHASE, 4)]})
    assert engine.planner.returns.unprofitable == {} and not caplog.messages


@LAGS
@pytest.mark.parametrize("asked", [False, {"drafter": "lookup", "depth": 2}])
def test_a_draft_that_nobody_wanted_is_not_reported(lag, asked, monkeypatch, caplog) -> None:
    monkeypatch.setattr("outrider.control.history.REPORT_STEPS", 50)
    engine, head = make_engine(lag, 0.0)
    engine.planner.returns.watch("head", 1234)
    run(engine, {"a": [*novel(PROMPT, 3), *novel(PHASE, 4)]}, speculation=asked)
    assert not head.asked and engine.planner.returns.unprofitable == {} and not caplog.messages


def test_nobody_loses_a_draft_that_it_named(monkeypatch) -> None:
    monkeypatch.setattr("outrider.control.history.REPORT_STEPS", 20)
    engine, _ = make_engine(None, 0.0, release_draft=True)
    engine.planner.returns.watch("head", 1)
    run(engine, {"a": [*novel(PROMPT, 3), *novel(PHASE, 4)]}, speculation={"drafter": "head", "depth": 2})
    assert "head" in engine.drafters and engine.planner.returns.unprofitable
    run(engine, {"b": [*novel(PROMPT, 3), *novel(PHASE, 4)]})
    assert "head" not in engine.drafters


@pytest.mark.parametrize("right", [1.0, 0.0])
def test_how_deep_drafts_begin(right: float) -> None:
    """A text that the drafter knows is soon drafted for as deep as pays, another never deeper than at first."""
    engine, _ = make_engine(None, right, row=0.001, level=0.001, names=("head",), guards=Guards(max_depth=6))
    script = [*novel(PROMPT, 1), *novel(PHASE, 2)]
    for first in (True, False):  # the second answer begins as the first did, if it is drafted for at all
        reasons = [reason for result in run(engine, {"a": script}) for reason in result.record.reasons]
        depths = [reason.depth for reason in reasons if reason.kind == "pays"]
        assert depths or not (first or right)
        assert depths[:1] in ([1], []) and max(depths, default=1) == (6 if right else 1)
