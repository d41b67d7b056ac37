"""What the benchmark reports is what happened."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from outrider import SamplingParams
from outrider.bench import speculation
from outrider.bench.answering import Answers, answer
from outrider.bench.as_if import AsIf
from outrider.bench.peers import Run
from outrider.bench.show import latencies, table, verdicts
from outrider.bench.speculation import (
    Comparison,
    asked_of,
    compare,
    groups_of,
    left_out,
    methods_of,
    temperatures_of,
)
from outrider.bench.speed import pass_seconds
from outrider.draft.synthetic import SyntheticDrafter
from outrider.errors import InvalidRequest
from outrider.types import Speculation
from tests.bench.conftest import prompts

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, seed=3)


def test_an_answer_is_what_generate_gives(wide: AsIf) -> None:
    params = replace(PARAMS, temperature=0.7, speculation={"drafter": "lm", "depth": 3, "nodes": 3})
    got = answer(wide, prompts(3), params)
    expected = [
        wide.generate([ids], replace(params, seed=3 + i, speculation=False))[0].token_ids
        for i, ids in enumerate(prompts(3))
    ]
    assert got.run.answers == expected
    assert got.tokens == 36
    assert 0 < got.accepted <= got.drafted
    assert got.tokens / 3 > got.steps / 3 >= 12 / 4
    assert 0 < got.run.first_s < got.run.total_s
    assert 3 <= got.run.there < 36


def test_the_same_prompt_twice_gets_two_seeds(wide: AsIf) -> None:
    one, two = answer(wide, prompts(1) * 2, replace(PARAMS, temperature=1.5)).run.answers
    assert one != two


def test_every_way_is_compared_with_plain(wide: AsIf) -> None:
    tasks = {"chat": prompts(4), "rewrite": prompts(2)}
    told: list[tuple[str, int, int]] = []
    methods = methods_of(wide, PARAMS, ["lm", "lookup", "lm:auto", "auto"])
    found = compare(
        wide,
        Comparison(tasks, PARAMS, methods, {"chat": [0.9]}, (1, 2), most=2),
        tell=lambda so_far: told.append([(task, *one["batches"]) for task, one in so_far.items()]),
    )
    assert {task: one["temperature"] for task, one in found.items()} == {"chat": 0.9, "rewrite": 0.0}
    assert {task: [b["groups"] for b in one["batches"].values()] for task, one in found.items()} == {
        "chat": [2, 2],
        "rewrite": [2, 1],
    }
    for one in found.values():
        for batch, size in zip(one["batches"].values(), (1, 2), strict=True):
            assert list(batch["methods"]) == ["plain", "lm", "lookup", "lm:auto", "auto"]
            plain, lm = batch["methods"]["plain"], batch["methods"]["lm"]
            assert (plain["ratio"], plain["worst"], plain["held"]) == (1, 1, None)
            assert plain["tokens_per_step"] == 1
            assert plain["round_rows"] == size
            assert plain["pass_ms"] > 0
            assert lm["tokens_per_step"] > 1
            assert 0 < lm["held"] <= 1
            for method in batch["methods"].values():
                assert method["differing"] == 0
                assert method["compared"] == 12 * size * batch["groups"]
                assert method["outside_pass"] == 1 - method["pass_ms"] / method["round_ms"]
    assert told[0] == [("chat", "1")] and told[-1] == [("chat", "1", "2"), ("rewrite", "1", "2")]
    said = [*table(found), *latencies(found), *verdicts(found)]
    assert max(map(len, said)) < 80
    assert any(line.endswith("tokens compared with plain decoding's: identical") for line in said)


def test_a_model_that_feels_its_company_is_found_out(leaky: AsIf) -> None:
    methods = methods_of(leaky, PARAMS, ["lm"])
    report = compare(leaky, Comparison({"chat": prompts(1)}, PARAMS, methods))
    found = report["chat"]["batches"]["1"]
    assert found["methods"]["plain"]["differing"] == 0
    assert found["methods"]["lm"]["differing"] > 0
    assert next(verdicts(report)).endswith(" DIFFER")


def test_ways(wide: AsIf) -> None:
    assert list(methods_of(wide, PARAMS)) == ["plain", "lookup", "lm", "auto"]
    assert methods_of(wide, PARAMS)["lm"] == Speculation(drafter="lm", depth=4, nodes=4)
    assert methods_of(wide, PARAMS, ["lookup:auto"])["lookup:auto"] == Speculation(drafter="lookup")
    deep = replace(PARAMS, speculation={"depth": 2})
    assert methods_of(wide, deep)["lookup"] == Speculation(drafter="lookup", depth=2)
    assert methods_of(wide, deep)["auto"] == Speculation()
    assert asked_of("lm", Speculation(tree=(2, 1))) == Speculation(drafter="lm", tree=(2, 1))
    with pytest.raises(InvalidRequest, match="unknown method 'eagle'"):
        methods_of(wide, PARAMS, ["eagle"])


def test_prompts_are_grouped(wide: AsIf) -> None:
    assert groups_of([[1], [2], [3], [4], [5]], 2, None) == [[[1], [2]], [[3], [4]]]
    assert groups_of([[1], [2], [3], [4]], 2, 1) == [[[1], [2]]]
    assert groups_of([[1], [2]], 5, None) == [[[1], [2], [1], [2], [1]]]
    with pytest.raises(InvalidRequest, match="max-sequences 9"):
        compare(wide, Comparison({"chat": prompts(1)}, PARAMS, {}, batches=(1, 9)))


def test_a_task_has_its_temperatures() -> None:
    assert temperatures_of("rewrite", {}) == [0]
    assert temperatures_of("chat", {}) == [0.7]
    assert temperatures_of("chat", {"": [0.2], "rewrite": [1.0]}) == [0.2]
    assert temperatures_of("rewrite", {"": [0.2], "rewrite": [1.0, 0.5]}) == [1.0, 0.5]


def test_a_curve_of_temperatures_and_lengths_of_answers() -> None:
    asked = Comparison(
        {"long": [[1]], "chat": [[2]]}, PARAMS, {}, {"chat": [0.0, 1.2]}, (1, 4), lengths={"long": 2.5}
    )
    cells = asked.cells()
    labels = ["long", "long", "chat T=0", "chat T=0", "chat T=1.2", "chat T=1.2"]
    assert [cell.label for cell in cells] == labels
    assert [cell.batch for cell in cells] == [1, 4] * 3
    assert [(cell.params.max_tokens, cell.params.temperature) for cell in cells[::2]] == [
        (30, 0.7),
        (12, 0.0),
        (12, 1.2),
    ]
    assert left_out({"chat T=0": {"batches": {"4": {}}}}, asked) == [
        "long, batch 1", "long, batch 4", "chat T=0, batch 1", "chat T=1.2, batch 1", "chat T=1.2, batch 4",
    ]  # fmt: skip


class Clock:
    """Time passes with every answer alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.answers = 0.0, 0
        monkeypatch.setattr(speculation, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(speculation, "pass_seconds", lambda *_: [1e-3])
        monkeypatch.setattr(speculation, "answer", self.answer)

    def answer(self, llm, group, params):
        """So far every second one takes a little longer."""
        self.now, self.answers = self.now + 1, self.answers + 1
        plain = params.speculation.drafter == "none"
        total = 1.0 + 10.0 * (1.0 if plain else 0.5) * (1.02 if self.answers % 2 else 0.98)
        run = Run([[1] * 11 for _ in group], 1.0, total, len(group))
        return Answers(run, 10, 0, 0, [], 0.1, 0.0, [], [1.0], [(10, total - 1.0)] * len(group), [0.5])


def test_it_is_repeated_until_the_ratio_is_known(wide: AsIf, monkeypatch: pytest.MonkeyPatch) -> None:
    methods = methods_of(wide, PARAMS, ["lookup"])

    def measured(seconds: float, within: float) -> tuple[int, float | None, float]:
        clock = Clock(monkeypatch)
        asked = Comparison({"chat": prompts(2)}, PARAMS, methods, seconds=seconds, within=within)
        found = compare(wide, asked)["chat"]["batches"]["1"]
        method = found["methods"]["lookup"]
        assert clock.answers == 2 + 4 * found["rounds"]  # two short ones first
        return found["rounds"], method["ratio_within"], method["ratio"]

    assert measured(0.0, 0.02)[:2] == (1, None)  # one round says nothing of the noise
    rounds, within, ratio = measured(1e9, 0.02)
    assert rounds > 2 and within <= 0.02 and ratio == pytest.approx(2.0, rel=0.03)
    assert measured(1e9, 0.5)[0] < rounds
    assert measured(22.0, 0.0)[0] == 5  # no round is begun that the time does not allow


def test_what_there_is_no_time_for_is_left_out_and_taken_up_again(
    wide: AsIf, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    asked = Comparison(
        {"chat": prompts(1), "code": prompts(1)}, PARAMS, methods_of(wide, PARAMS, ["lookup"]), {"": [0.0, 1.0]},
        seconds=4.0, bounded=True,
    )  # fmt: skip
    found = compare(wide, asked)
    assert list(found) == ["chat T=0"] and clock.answers == 4
    assert left_out(found, asked) == ["chat T=1, batch 1", "code T=0, batch 1", "code T=1, batch 1"]
    first = found["chat T=0"]["batches"]["1"]
    more = compare(wide, replace(asked, bounded=False), found)
    assert more["chat T=0"]["batches"]["1"] is first and clock.answers == 16
    assert left_out(more, asked) == []


def test_timing_passes_leaves_no_trace(wide: AsIf) -> None:
    used = wide.engine.table.used
    one, many = pass_seconds(wide, [(1, 1), (3, 8)], 20, repeats=3)
    assert one > 0 and many > 0
    assert wide.engine.table.used == used
    wide.engine.table.check()


def test_how_the_draft_is_stored_is_said_where_it_is_not_as_usual(
    wide: AsIf, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, said in (("bfloat16", None), ("int8", "int8"), ("float32", "float32")):
        monkeypatch.setattr(wide, "settings", SimpleNamespace(draft_weights=kind, device="cpu"))
        assert wide.described()["draft"].get("weights") == said


def test_rates_count_what_came_after_the_first() -> None:
    assert Run([[1, 2, 3], [4, 5, 6]], 1.0, 3.0, there=2).decode_rate == 2.0
    assert Run([[1, 2, 3]], 1.0, 3.0, there=3).decode_rate == 1.0
    assert Run([[1, 2, 3]], 1.0, 3.0, 1).differing(Run([[1, 9, 3]], 1.0, 3.0, 1)) == 2


def test_a_synthetic_draft_knows_every_answer_before_it_is_timed(wide: AsIf) -> None:
    """Also that of a group which it is the first to answer."""
    made = {"synthetic": SyntheticDrafter((1.0,), wide.model.config.vocab)}
    wide.driver.run(lambda: wide.engine.drafters.add(made))
    try:
        methods = methods_of(wide, PARAMS, ["synthetic"])
        found = compare(wide, Comparison({"chat": prompts(2)}, PARAMS, methods, {"": [0.8]}))
    finally:
        wide.driver.run(lambda: wide.engine.drafters.remove(made))
    method = found["chat"]["batches"]["1"]["methods"]["synthetic"]
    assert method["held"] == 1.0 and method["tokens_per_step"] == pytest.approx(4.0)
