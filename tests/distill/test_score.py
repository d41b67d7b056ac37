"""What a score says is what happened: counted by hand, by a draft that is always right, and by another counter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import exp
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from outrider import LLM, Settings
from outrider.distill import score as scoring
from outrider.distill.report import Silent
from outrider.distill.score import (
    ScoreOptions,
    count_origins,
    make_card,
    prompt_ids,
    score,
    score_open,
)
from outrider.errors import InvalidRequest
from outrider.load.cards import Acceptance, read_card, write_card
from outrider.load.checkpoint import open_checkpoint
from outrider.load.heads import card_facts
from tests.bench.conftest import Leaky
from tests.targets import pair_head, write_target

SETTINGS = Settings(device="cpu", max_sequences=4, cache_bytes=1 << 22)
OPTIONS = ScoreOptions(temperatures=(0.0, 0.7), depth=3, tree_nodes=8, max_tokens=12, timed=1)
PROMPTS = {
    task: [[5 + i, 17 + shift, 30, 44, 17, 30] for i in range(2)]
    for shift, task in enumerate(("chat", "code"))
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("draft"), noise=0.1)


@pytest.fixture(scope="module")
def llm(target: Path, draft: Path) -> Iterator[LLM]:
    with LLM(target, draft=str(draft), settings=SETTINGS) as made:
        yield made


A, R, B, P = "accepted", "recovered", "bonus", "plain"


@pytest.mark.parametrize(
    ("origins", "counted"),
    [
        ([P, P], Acceptance()),
        ([P, R], Acceptance(1, 1, (1,), (0,))),
        ([P, A, A, R, R], Acceptance(2, 4, (2, 1, 1), (1, 1, 0))),
        ([P, A, A, B], Acceptance(1, 3, (1, 1), (1, 1))),  # accepted whole: the third was not drafted
        ([A, R, P, A], Acceptance(2, 3, (2, 1), (2, 0))),  # the answer ended inside the draft
        ([], Acceptance()),
    ],
)
def test_origins_are_counted_by_depth(origins: list[str], counted: Acceptance) -> None:
    assert count_origins(origins) == counted


def test_a_score_counts_what_the_engine_saw(llm: LLM) -> None:
    """Against the outcomes of every step, which the planner learns from, up to where answers end."""
    seen: list[Any] = []
    before, llm.driver.observer = llm.driver.observer, lambda record: seen.extend(record.outcomes)
    try:
        found = score_open(llm, PROMPTS, replace(OPTIONS, timed=0), Silent())
    finally:
        llm.driver.observer = before
    assert [(one.task, one.temperature, one.prompts) for one in found.tasks] == [
        (task, t, 2) for task in PROMPTS for t in (0.0, 0.7)
    ]
    assert all((one.speedup, one.expected_speedup) == (None, None) for one in found.tasks)
    for counts, nodes in ((found.chain(), 3), (found.tree(), 8)):
        drafting = [o for o in seen if o.drafted and o.draft_plan.nodes == nodes]
        past = sum(o.sequence.finish_reason is not None for o in drafting)  # some of these were cut short
        assert 0 <= sum(o.accepted for o in drafting) - sum(counts.accepted) <= nodes * past
        assert counts.steps == counts.reached[0] == len(drafting)
        assert counts.reached[1:] <= counts.accepted[:-1]  # only after an accepted one
        assert counts.tokens == 8 * 12
    assert found.tree().rate > found.chain().rate > 0.2
    assert sum(one.compared for one in found.tasks) == 2 * 8 * 12
    assert not any(one.differing for one in found.tasks)
    task, some = next(iter(PROMPTS.items()))
    outs = llm.generate(some, temperature=0.0, max_tokens=12, logprobs=0, speculation="off")
    chances = [exp(entry.logprob) for out in outs for entry in out.logprobs or ()]
    [first] = [one for one in found.tasks if (one.task, one.temperature) == (task, 0.0)]
    assert first.target_probability == pytest.approx(fmean(chances)) and 0 < fmean(chances) < 1
    assert Counter(found.date)["-"] == 2 and found.machine and "torch" in found.versions


def test_a_draft_that_is_always_right_is_always_accepted(target: Path) -> None:
    found = score(target, target, PROMPTS, replace(OPTIONS, temperatures=(0.0,)), settings=SETTINGS)
    assert found.accept_rate == found.effective_accept_rate == 1
    assert found.chain().by_depth == (1, 1, 1) and found.tokens_per_step == 4
    assert all(one.speedup and one.expected_speedup >= 1 for one in found.tasks)


def test_a_model_that_feels_its_company_is_found_out(llm: LLM) -> None:
    runner, sound = llm.engine.runner, llm.engine.model
    runner.model = Leaky(sound)  # type: ignore[assignment]
    try:
        once = replace(OPTIONS, temperatures=(0.0,))
        found = score_open(llm, {"chat": PROMPTS["chat"][:1]}, once, Silent())
    finally:
        runner.model = sound
    assert all(one.differing for one in found.tasks)


def test_only_drafts_with_weights_have_a_score(target: Path) -> None:
    with pytest.raises(InvalidRequest, match="not lookup"):
        score(target, "lookup", PROMPTS, OPTIONS, settings=SETTINGS)


def test_prompts_without_room_are_left_out(llm: LLM) -> None:
    long, said = [5] * 250, Silent()
    once = replace(OPTIONS, timed=0, temperatures=(0.0,))
    found = score_open(llm, {"a": [long, PROMPTS["chat"][0]], "b": [long]}, once, said)
    assert [(one.task, one.prompts) for one in found.tasks] == [("a", 1)]
    assert said.notes == ["2 prompts leave no room for 12 tokens and are left out"]
    with pytest.raises(InvalidRequest, match="no prompt leaves room"):
        score_open(llm, {"b": [long]}, OPTIONS, Silent())


@pytest.mark.parametrize("wrong", [{"depth": 0}, {"tree_nodes": 0}, {"temperatures": ()}, {"timed": -1}])
def test_options_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(wrong))):
        ScoreOptions(**wrong)


def test_prompts_may_be_text_ids_or_messages(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert prompt_ids(llm, "hello") == llm.tokenizer.encode("hello")  # this model has no template
    assert prompt_ids(llm, [1, 2]) == [1, 2]
    monkeypatch.setattr(llm, "chat_ids", lambda messages: [len(messages)])
    assert prompt_ids(llm, [{"role": "user", "content": "x"}] * 3) == [3]
    monkeypatch.setattr(llm, "template", object())
    assert prompt_ids(llm, "hello") == [1]


def test_a_card_says_what_the_draft_is(target: Path, draft: Path, tmp_path: Path) -> None:
    opened = open_checkpoint(target)
    small = make_card(opened, "tiny", draft)
    assert (small.draft.kind, small.draft.layout, small.ratio) == ("lm", "huggingface", 1.0)
    folder = pair_head(tmp_path / "head", target)
    head = make_card(opened, "tiny", folder, trained_tokens=9, recipe="r", licence="MIT")
    facts = head.draft
    # Of so shallow a target it reads a layer twice, which others cannot.
    assert (facts.kind, facts.layout, facts.engines) == ("eagle", "eagle3", ("outrider",))
    tensors = open_checkpoint(folder)
    assert facts.parameters == sum(
        tensors.tensor(name).numel() for name in tensors.names() if name not in ("d2t", "t2d")
    )
    write_card(folder, head)
    assert read_card(folder) == head and (head.trained_tokens, head.licence) == (9, "MIT")
    assert card_facts(folder, opened) == facts
    assert scoring.BATCH["cpu"] > 1
