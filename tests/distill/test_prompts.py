"""Prompts by number are a function of the recipe; shares are kept; a wrong row is named with its file and line."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from outrider.distill.prompts import (
    LONG,
    Prompt,
    Schedule,
    is_prompt,
    joined_prompts,
    made_up_prompts,
    read_prompts,
)
from outrider.distill.recipe import Recipe
from outrider.errors import InvalidRequest
from outrider.load.prompts import Row


def write(path: Path, *rows: object) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def prompts(**tasks: int) -> list[Prompt]:
    return [
        Prompt(f"{task}-{i}", task, Row(str(i), turns=("x",))) for task, n in tasks.items() for i in range(n)
    ]


def test_rows_of_several_files_have_tasks_and_ids(tmp_path: Path) -> None:
    one = write(tmp_path / "a.jsonl", {"id": "x", "task": "code", "turns": ["a", "b"]}, "plain")
    two = write(
        tmp_path / "b.jsonl", {"prompt": "raw"}, {"messages": [{"role": "user", "content": "c"}]}, "plain"
    )
    found = read_prompts([one, two], has_template=True)
    assert [p.task for p in found] == ["code", *["text"] * 4]
    assert found[0].id == "x" and found[0].row.turns == ("a", "b")
    assert found[1].id == found[4].id != found[2].id  # the same text is the same prompt
    assert found[2].row.prompt == "raw"


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ('{"turns": ["a"', "not JSON"),
        ({"text": "a"}, 'needs one of "turns", "messages" or "prompt"'),
        ({"turns": []}, '"turns" must be a list that is not empty'),
        ({"turns": ["a", 3]}, '"turns" must hold texts'),
        ({"prompt": 3}, '"prompt" must be a string'),
        ({"turns": ["a"], "task": 3}, '"task" must be a text'),
        ({"messages": [{"role": "user"}]}, r"messages\[0\] needs a content"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "nothing to answer"),
        ("[", "a JSON list"),
        ('[{"prompt": "a"}]', "a JSON list"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, row: object, what: str) -> None:
    name = write(tmp_path / "p.jsonl", "fine", "", row)
    with pytest.raises(InvalidRequest, match=rf"p\.jsonl, line 3: .*{what}"):
        read_prompts([name], has_template=True)


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"PAR1\xff\xfe\0")
    for name, what in (
        (tmp_path / "gone", "cannot be read"),
        (tmp_path / "binary", "not UTF-8"),
        ("-", "files"),
    ):
        with pytest.raises(InvalidRequest, match=what):
            read_prompts([str(name)], has_template=True)
    with pytest.raises(InvalidRequest, match="no prompt in"):
        read_prompts([write(tmp_path / "empty")], has_template=True)
    with pytest.raises(InvalidRequest, match=r'line 1: this target has no chat template.*needs a "prompt"'):
        read_prompts([write(tmp_path / "t", {"turns": ["a"]})], has_template=False)


def test_a_number_always_asks_the_same() -> None:
    recipe = Recipe(prompts=("p",), seed=7, shares={"code": 0.5})
    some = prompts(code=5, chat=7)
    one, two = Schedule(some, recipe), Schedule(some, recipe)
    ahead = [two.prompt(n) for n in (40_000, 3, 500)]
    assert ahead == [one.prompt(n) for n in (40_000, 3, 500)]
    other = Schedule(some, Recipe(prompts=("p",), seed=8, shares={"code": 0.5}))
    assert [one.prompt(n)[0].id for n in range(50)] != [other.prompt(n)[0].id for n in range(50)]


def test_shares_are_kept_and_the_rest_comes_as_it_is() -> None:
    recipe = Recipe(prompts=("p",), shares={"code": 0.3, "reasoning": 0.2, "web": 0})
    schedule = Schedule(prompts(code=3, reasoning=1000, web=50, chat=300, text=100), recipe)
    found = Counter(schedule.prompt(n)[0].task for n in range(20_000))
    shares = {task: count / 20_000 for task, count in found.items()}
    assert shares == pytest.approx({"code": 0.3, "reasoning": 0.2, "chat": 0.375, "text": 0.125}, abs=0.02)


def test_every_prompt_comes_once_before_any_comes_again() -> None:
    schedule = Schedule(prompts(chat=40), Recipe(prompts=("p",), temperatures=(0.0, 0.7)))
    over = [[schedule.prompt(n)[0].id for n in range(begin, begin + 40)] for begin in (0, 40)]
    assert set(over[0]) == set(over[1]) and len(set(over[0])) == 40 and over[0] != over[1]
    heat = Counter(schedule.prompt(n)[1] for n in range(2000))
    assert set(heat) == {0.0, 0.7} and abs(heat[0.0] - 1000) < 150


def test_shares_that_cannot_be() -> None:
    with pytest.raises(InvalidRequest, match="no prompt is of the task 'cod'; did you mean 'code'"):
        Schedule(prompts(code=1), Recipe(prompts=("p",), shares={"cod": 0.3}))
    with pytest.raises(InvalidRequest, match=r"add up to 0\.3, and no prompt is of another task"):
        Schedule(prompts(code=1), Recipe(prompts=("p",), shares={"code": 0.3}))


@pytest.mark.parametrize(
    ("text", "complete", "good"),
    [
        ("How do I sort a list?", True, True),
        ("Warum?\n\n1. weil", True, True),
        ("How do I", False, False),
        ("", True, False),
        ("  \n", True, False),
        ("12 + 3 =", True, False),
        ("caf\ufffd au lait", True, False),
        ("beep\x07 boop", True, False),
    ],
)
def test_what_can_be_asked(text: str, complete: bool, good: bool) -> None:
    assert is_prompt(text, complete) is good


def test_made_up_prompts_come_once() -> None:
    made = made_up_prompts(["a question", "another", "a question"])
    assert [p.row.turns[0] for p in made] == ["a question", "another"]
    assert {p.task for p in made} == {"made-up"} and made[0].id != made[1].id


def test_joined_prompts_are_long_and_the_same_for_a_seed() -> None:
    texts = [f"passage {i} " * 30 for i in range(6)] + [f"what is {i}?" for i in range(6)]
    rows = [Prompt(str(i), "web", Row(str(i), turns=(text,))) for i, text in enumerate(texts)]
    made = joined_prompts(rows, 40, seed=3)
    asked = [p.row.turns[0] for p in made]
    assert asked == [p.row.turns[0] for p in joined_prompts(rows, 40, seed=3)]
    assert asked != [p.row.turns[0] for p in joined_prompts(rows, 40, seed=4)]
    assert {p.task for p in made} == {"joined"} and len({p.id for p in made}) == len(set(asked))
    assert all(LONG[0] <= len(text) <= LONG[1] + 200 for text in asked)
    assert any("ummar" in text[:60] for text in asked) and any(text.endswith("?") for text in asked)


def test_joined_prompts_need_texts_and_questions() -> None:
    short = [Prompt("1", "web", Row("1", turns=("what is it?",)))]
    with pytest.raises(InvalidRequest, match="texts of 200 characters or more"):
        joined_prompts(short, 1, 0)
    assert joined_prompts(short, 0, 0) == []
