"""Steps of a mixture of experts: what they read is counted, and the costs of passes are measured by it."""

from __future__ import annotations

import json

import pytest

from outrider.draft.lookup import LookupDrafter
from outrider.engine import eager_runner
from outrider.engine.build import expert_costs
from outrider.engine.kept_costs import KeptCosts
from outrider.engine.rows import padding
from outrider.load.config import Experts
from outrider.model.decoder import make_store
from tests.tiny import finish, prompt_of, request, tiny_engine, tiny_model

EXPERTS = Experts(count=8, per_token=2, width=24)


@pytest.fixture(scope="module", params=["torch", "c"])
def model(request):
    return tiny_model(kernels=request.param, experts=EXPERTS, intermediate=0)


def test_experts_that_rows_share_are_counted_once(model) -> None:
    store, slot = make_store(model, 8), 8
    model.forward(padding(5, slot), store)
    assert model.experts_read == EXPERTS.per_token
    model.forward(eager_runner._any_text(5, model.config.vocab), store)
    apart = model.experts_read
    assert EXPERTS.per_token < apart <= 8
    model.forward(padding(1, slot), store)
    assert model.experts_read == EXPERTS.per_token


def test_a_step_records_what_it_read_and_the_planner_learns_from_it(model) -> None:
    engine = tiny_engine(model, drafters=lambda cache: {"lookup": LookupDrafter()})
    costs = expert_costs(model.config)
    engine.planner.costs.know_experts(costs)
    for name in "abc":
        engine.add(request(name, prompt_of(9), max_tokens=20))
    records = [result.record for _ in range(30) for result in engine.step()]
    plain = [one for one in records if one.decodes_only and one.sequences == 3]
    assert plain and all(2 <= one.experts <= 6 for one in plain)
    assert costs.batch.weight > 1.0 and costs.chain.exponent == 1.0
    finish(engine)


def test_warm_up_measures_rows_alike_and_apart(model, tmp_path, monkeypatch) -> None:
    engine = tiny_engine(model)
    costs = expert_costs(model.config)
    engine.planner.costs.know_experts(costs)
    seen: list[tuple[int, int]] = []

    def measured(model, store, batch) -> float:
        """On a machine that takes ten milliseconds for an expert, and as much for the rest."""
        seen.append((batch.rows, len(batch.ids.unique())))
        model.forward(batch, store)
        return 0.01 * (1 + model.experts_read)

    monkeypatch.setattr(eager_runner, "_measure", measured)
    list(engine.prepare(2))
    assert seen[:5] == [(1, 1), (2, 1), (2, 2), (3, 1), (3, 3)]
    for rows in (2, 4, 8):
        assert engine.planner.costs.eager.curve[rows] == pytest.approx(0.01 * (1 + costs.distinct(rows)))
        assert costs.alike[rows] == pytest.approx(3 / (1 + costs.distinct(rows)))
    kept = KeptCosts(tmp_path / "costs.json", {}, engine.planner.costs.eager)
    costs.chain.exponent = 0.6
    kept.keep(always=True)
    again = tiny_engine(model).planner.costs
    again.know_experts(expert_costs(model.config))
    of_next_start = KeptCosts(kept.file, {}, again.eager)
    assert of_next_start.recall(engine.planner.costs.eager.curve.__getitem__)
    assert again.eager.experts.alike == costs.alike and again.eager.experts.chain.exponent == 0.6
    written = json.loads(kept.file.read_text())
    for broken in ({"chain": 2.0}, {"alike": {"2": 0.0}}):
        kept.file.write_text(json.dumps(written | {"experts": written["experts"] | broken}))
        assert not of_next_start.recall(engine.planner.costs.eager.curve.__getitem__)


def test_an_expert_is_priced_by_its_share_of_the_weights() -> None:
    config = tiny_model(kernels="torch", experts=EXPERTS, intermediate=0).config
    costs = expert_costs(config)
    assert (costs.total, costs.chosen) == (8, 2)
    of_an_expert = config.hidden * config.layers * 3 * EXPERTS.width
    read = config.active_parameters - (0 if config.tied else config.hidden * config.vocab)
    assert (costs.dense + 2) * of_an_expert == pytest.approx(read)
    assert expert_costs(tiny_model(kernels="torch").config) is None
