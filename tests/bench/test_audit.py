"""The audit finds what it looks for, and looks everywhere."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from outrider import SamplingParams
from outrider.bench import audit as module
from outrider.bench.as_if import AsIf
from outrider.bench.audit import BATCHES, SPELL, Extent, Toggling, audit, how
from outrider.device.ops import StepOps
from outrider.device.state import SequenceState
from outrider.engine.graph_runner import GraphRunner
from outrider.types import NO_DRAFT_PLAN, DraftPlan, Options, Plan, Speculation, Work
from tests.bench.conftest import prompts
from tests.tiny import sequence

PARAMS = SamplingParams(max_tokens=10, ignore_eos=True)
ENEMIES = {"random", "wrong", "oracle", "ends", "duplicates"}
OWN = {"plain", "auto", *(kind + name for kind in ("", "toggled ", "tree ") for name in ("lookup", "lm"))}


def test_every_way_is_compared_and_guesses(wide: AsIf) -> None:
    before = wide.engine.drafters.names, wide.engine.planner
    found = audit(wide, prompts(3), True, [0.0, 0.8], PARAMS)
    assert (wide.engine.drafters.names, wide.engine.planner) == before
    assert found.differing == 0 and not found.divergences
    assert {method for method, _ in found.tokens} == OWN | ENEMIES
    assert {heat for _, heat in found.tokens} == {0.0, 0.8}
    assert found.by_batch == {3: found.compared}
    for method in (OWN | ENEMIES) - {"plain", "auto"}:
        assert found.drafted[method] > 0, method
    assert found.drafted["plain"] == 0
    assert found.accepted["wrong"] == 0 < found.accepted["oracle"]
    assert 0 < found.drafted["toggled lm"] < found.drafted["lm"]
    assert found.as_json()["by_batch"] == {"3": found.compared}


def test_the_persistent_batch_is_audited_as_it_is_planned(wide: AsIf, monkeypatch) -> None:
    """Steps of resident sequences are launched ahead: a plan without them would have a token said twice."""
    engine, model = wide.engine, wide.engine.model
    cache = engine.cache
    ops = StepOps(SequenceState(*cache.table.tensor.shape, model.device, model.config.vocab), model)
    runner = GraphRunner(
        model, cache, engine.drafters, ops, lambda batch, *_: model.forward(batch, cache.store), default="lm"
    )
    monkeypatch.setattr(engine, "runner", runner)
    found = audit(wide, prompts(4), False, [0.0, 0.8], replace(PARAMS, max_tokens=24))
    assert found.compared > 1000 and found.differing == 0
    drafted = sum(step.launches for shape, step in runner.graphs.steps.items() if shape.tree.nodes)
    assert drafted > 50 and 0 < found.accepted["toggled lm"] < found.accepted["lm"]


def test_a_model_that_feels_its_company_is_found_out(leaky: AsIf) -> None:
    found = audit(leaky, prompts(1), False, [0.0], PARAMS)
    assert found.differing > 0
    worst = found.divergences[0]
    assert worst.plain != worst.speculative
    assert {d.method for d in found.divergences} >= {"lm", "tree lm"}


def test_it_goes_on_until_enough_was_compared(wide: AsIf, monkeypatch) -> None:
    monkeypatch.setattr(module, "BATCHES", (2, 1))
    told: list[tuple[int, float]] = []
    found = audit(
        wide,
        prompts(2),
        False,
        [0.7],
        PARAMS,
        extent=Extent(tokens=400),
        tell=lambda f, done: told.append((f.compared, done)),
    )
    compared, done = zip(*told, strict=True)
    assert found.compared >= 400 > compared[0] > 0  # told of every comparison
    assert list(done) == sorted(done) and done[-1] == 1
    assert set(found.by_batch) == {1, 2}
    assert found.differing == 0


def test_ways_ask_for_what_they_say() -> None:
    asked = SamplingParams(speculation={"mode": "coupled"})
    assert how(asked, "plain").off
    assert how(asked, "auto") == asked.speculation
    assert how(asked, "lm") == how(asked, "toggled lm") == Speculation(drafter="lm", depth=4, nodes=4)
    assert how(asked, "tree lm") == Speculation(drafter="lm", depth=4, nodes=12)
    deep = SamplingParams(speculation={"depth": 2})
    assert how(deep, "lm").depth == 2


def test_batches_are_of_every_size_and_mostly_large() -> None:
    assert {1, 2, 4, 8, 16, 32} == set(BATCHES)
    assert Counter(BATCHES)[32] >= len(BATCHES) // 2


def test_toggling_switches_only_whom_it_should() -> None:
    class Always:
        def plan(self, work, options) -> Plan:
            return Plan(tuple(DraftPlan("lm", 2, 2) for _ in work))

    toggling = Toggling(Always())  # type: ignore[arg-type]
    for length in range(4 * SPELL):
        one = sequence([1] * (3 + length), prompt=3, seed=7)
        other = sequence([1] * (3 + length), prompt=3, seed=8)
        toggling.seeds = {7}
        first, second = toggling.plan([Work(one, 1), Work(other, 1)], Options()).draft_plans
        assert (first == NO_DRAFT_PLAN) == (length // SPELL % 2 == 1)
        assert second.nodes == 2
