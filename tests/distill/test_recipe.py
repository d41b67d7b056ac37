"""A recipe is complete or refused by name, goes through JSON unchanged, and knows which stage a change concerns."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest

from outrider.distill.recipe import STAGES, Recipe, read_count
from outrider.errors import InvalidRequest


def test_there_and_back_through_json() -> None:
    recipe = Recipe(
        prompts=("a", "b"), shares={"code": 0.25}, taps=(1, 2), temperatures=(0.5,), learning_rate=3e-4
    )
    assert Recipe.of(json.loads(recipe.text())) == recipe


def test_every_option_belongs_to_a_stage() -> None:
    assert {one.metadata["stage"] for one in fields(Recipe)} == set(STAGES)


def test_what_changed_and_whom_it_concerns() -> None:
    recipe = Recipe(prompts=("a",))
    changed = replace(recipe, max_tokens=9, loss="kl", depth=3)
    assert changed.changed(recipe) == {"max_tokens": "answer", "loss": "train", "depth": "score"}
    assert not recipe.changed(Recipe.of(recipe.to_json()))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"kind": "head"}, "unknown kind 'head'; known: eagle, lm"),
        ({"loss": "mse"}, "unknown loss"),
        ({"made_up": True}, "made_up must be a whole number, not bool"),
        ({"made_up": "3"}, "made_up must be a whole number, not str"),
        ({"made_up": -1}, "made_up must be at least 0, got -1"),
        ({"tap_norms": 1}, "tap_norms must be true or false"),
        ({"decay": "x"}, "decay must be a number"),
        ({"decay": float("nan")}, r"decay must be in \[0, 1\], got nan"),
        ({"temperatures": ()}, "temperatures needs one"),
        ({"temperatures": (3.0,)}, r"temperatures must be in \[0, 2\], got 3"),
        ({"temperatures": 0.7}, "temperatures must be a list of numbers"),
        ({"taps": (1.5,)}, "taps must be a list of whole numbers"),
        ({"prompts": (1,)}, "prompts must be a string or a list of strings"),
        ({"shares": {"code": 2}}, "share of 'code' must be between 0 and 1"),
        ({"shares": {"code": 0.6, "web": 0.6}}, r"add up to 1\.2"),
        ({"shares": {"made-up": 0.5}}, "needs some: --made-up N"),
        ({"prompts": (), "made_up": 3, "joined": 3}, "joined of the texts in files: give --prompts FILE"),
        ({"batch_tokens": 100}, r"batch_tokens \(100\) must hold one conversation of 2048"),
        ({"prompts": ()}, "nothing to learn from: give --prompts FILE, --made-up N, or --shards DIR"),
        ({"learnin_rate": 1}, "did you mean 'learning_rate'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict, what: str) -> None:
    with pytest.raises(InvalidRequest, match=what):
        Recipe.of({"prompts": ("a",), **options})


@pytest.mark.parametrize(
    ("text", "count"),
    [("300000", 300_000), ("20M", 20_000_000), ("1.5G", 1_500_000_000), ("2k", 2000)],
)
def test_numbers_of_tokens(text: str, count: int) -> None:
    assert read_count(text) == count


@pytest.mark.parametrize("text", ["", "many", "-3", "20MiB", "1.2.3"])
def test_what_is_no_number_of_tokens(text: str) -> None:
    with pytest.raises(ValueError, match="write 300000, 20M"):
        read_count(text)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"hidden": 64}, "hidden"),
        ({"size": 0.1}, "size"),
        ({"kind": "lm", "taps": (1,)}, "taps"),
        ({"kind": "lm", "unroll": 2}, "unroll"),
        ({"kind": "lm", "layout": "eagle3"}, "layout"),
    ],
)
def test_what_would_make_no_difference_is_refused(options: dict, name: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{name} is for a draft of kind") as refused:
        Recipe(prompts=("a",), **options)
    assert refused.value.param == name
