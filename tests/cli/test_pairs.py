"""`outrider pairs`: what the catalogue holds, in 80 columns, in tabs and as JSON."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from outrider.cli.card_words import described, in_columns, score_table, short
from outrider.load import pairs
from outrider.load.cards import Acceptance, Measured, read_card
from outrider.load.pairs import list_pairs
from tests.load.pairs import some_card, some_score, task_score, write_pair

from .conftest import Outrider


@pytest.fixture(autouse=True)
def nothing_shipped(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "SHIPPED", tmp_path / "shipped")


def test_an_empty_catalogue_says_how_to_fill_it(outrider: Outrider) -> None:
    ran = outrider("pairs")
    assert (ran.code, ran.out) == (0, "") and "outrider pairs add DIR" in ran.err
    assert outrider("pairs", "--json").rows == []


def test_added_listed_shown_and_removed(outrider: Outrider, empty_cache: Path, tmp_path: Path) -> None:
    folder = write_pair(tmp_path / "made", some_card())
    place = empty_cache / "pairs" / "made"
    assert outrider("pairs", "add", folder).out == f"{place}\n"
    figures = "a-target made 50k 5.0_% 1.5M 0.65 0.81 1.30x a_machine 2026-01-31 added"
    assert outrider("pairs").out == figures.replace(" ", "\t").replace("_", " ") + "\n"
    [row] = outrider("pairs", "--json").rows
    assert (row["name"], row["ratio"], row["speedup"]) == ("made", 0.05, 1.3)
    assert row["accept_rate"] == pytest.approx(140 / 215) and row["card"] == some_card_json()
    assert outrider("pairs", "show", "made", "--json").rows == [row]
    shown = outrider("pairs", "show", "made").out
    assert f"folder         {place}\n" in shown and "chain of 5, by depth: 0.70 0.64 0.56" in shown
    assert "500 tokens compared with plain decoding's: identical" in shown
    ran = outrider("pairs", "add", folder)
    assert ran.code == 2 and "--name" in ran.err
    assert outrider("pairs", "add", folder, "--name", "twice").code == 0
    assert outrider("pairs", "remove", "made").code == 0 and not place.exists()
    ran = outrider("pairs", "show", "mad")
    assert ran.code == 1 and "there is no pair 'mad'; known: twice" in ran.err


def some_card_json() -> dict:
    import json

    return json.loads(json.dumps(some_card().as_json()))


def test_a_broken_card_is_named_beside_the_others(outrider: Outrider, empty_cache: Path) -> None:
    write_pair(empty_cache / "pairs" / "good", some_card())
    bad = write_pair(empty_cache / "pairs" / "bad", some_card())
    (bad / "card.json").write_text('{"version": 1}')
    ran = outrider("pairs")
    assert ran.code == 0 and ran.out.count("\n") == 1
    assert f"left out: {bad / 'card.json'}: target is missing" in ran.err
    ran = outrider("pairs", "show", "bad")
    assert ran.code == 1 and "target is missing" in ran.err
    assert outrider("pairs", "remove", "bad").code == 0


def test_everything_fits_80_columns(empty_cache: Path) -> None:
    long = "a-very-long-name-of-a-model-that-goes-on"
    tasks = [task_score(long, t) for t in (0, 0.7)] + [task_score("x", 0, chain=Acceptance(), speedup=None)]
    card = some_card(score=some_score(*tasks))
    write_pair(empty_cache / "pairs" / f"{long}-eagle-head-of-the-year", card)
    write_pair(empty_cache / "pairs" / "bare", some_card(score=None, trained_tokens=None))
    found, _ = list_pairs(empty_cache)
    lines = [*in_columns(found), *score_table(some_score(*tasks))]
    assert max(map(len, lines)) <= 80
    assert f"{long}-eagle-head-of-the-year" in lines and "…" not in "".join(in_columns(found))
    [bare] = [pair for pair in found if pair.name == "bare"]
    assert dict(described(bare))["score"].startswith("none yet: outrider pairs score a-target ")


@pytest.mark.parametrize(
    ("count", "said"),
    [(7, "7"), (6_600_000, "6.6M"), (134_515_008, "135M"), (1_543_714_304, "1.54G"), (2500, "2.5k")],
)
def test_counts_are_short(count: int, said: str) -> None:
    assert short(count) == said


def test_a_difference_is_said_loudly() -> None:
    assert list(score_table(some_score(task_score(differing=2))))[-1].endswith("2 answers DIFFER")


def test_a_speed_up_from_elsewhere_is_shown_with_where_it_comes_from(
    outrider: Outrider, empty_cache: Path
) -> None:
    unmeasured = some_score(task_score(speedup=None))
    one = Measured("chat", 0.0, 1.5, "a laptop", "2026-01-31", "abc1234", "outrider bench x")
    card = some_card(score=unmeasured, measured=(one, replace(one, temperature=0.7, speedup=1.3)))
    pair = write_pair(empty_cache / "pairs" / "a-head", card)
    assert read_card(pair) == card and card.speedup == pytest.approx(1.4)
    assert some_card(measured=(one,)).speedup == some_score().speedup  # what the score measured goes first
    [found] = [pair for pair in list_pairs(empty_cache)[0] if pair.name == "a-head"]
    lines = [*in_columns([found])]
    assert lines[1].split()[0] == "a-head" and lines[1].endswith("1.40x")
    assert "  speed-up: chat 1.50x (T=0), chat 1.30x (T=0.7); 2026-01-31 on a laptop" in lines
    told = outrider("pairs", "show", "a-head").out
    assert (
        "1.50x, chat at T = 0, one sequence; 2026-01-31 on a laptop, commit abc1234: outrider bench x" in told
    )
    assert "measured" not in told  # a column that would be empty
    assert outrider("pairs", "show", "a-head", "--json").rows[0]["speedup"] == pytest.approx(1.4)
