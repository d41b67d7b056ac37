"""Cards say what was written, wrong ones name file and field; the catalogue finds the right one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.errors import BadCheckpoint, InvalidRequest, ModelNotFound, OutriderError
from outrider.load import pairs
from outrider.load.cards import Acceptance, Card, card_from_json, read_card
from outrider.load.checkpoint import open_checkpoint
from outrider.load.pairs import add_pair, find_pair, fingerprint, list_pairs, pair_named, remove_pair
from tests.full_disk import file_size_limit
from tests.load.pairs import CHAIN, TREE, some_card, some_score, task_score, write_pair
from tests.load.tiny import gguf_tensors, hf_weights, write_folder, write_gguf


@pytest.fixture(autouse=True)
def nothing_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "SHIPPED", tmp_path / "shipped")
    monkeypatch.delenv("OUTRIDER_PAIRS", raising=False)


@pytest.fixture
def target(tmp_path: Path):
    write_folder(tmp_path / "target")
    return open_checkpoint(tmp_path / "target")


# ----------------------------------------------------------------------------------------------------- cards


@pytest.mark.parametrize(
    "changes", [{}, {"score": None, "trained_tokens": None, "licence": None, "recipe": None}]
)
def test_a_card_is_read_as_it_was_written(tmp_path: Path, changes: dict[str, Any]) -> None:
    card = some_card(**changes)
    assert read_card(write_pair(tmp_path, card)) == card
    assert [file.name for file in tmp_path.glob("*card*")] == ["card.json"]


def test_rates_are_accepted_over_reached_positions() -> None:
    assert CHAIN.by_depth == (0.7, 45 / 70, 25 / 45)
    assert CHAIN.rate == pytest.approx(140 / 215)
    assert CHAIN.tokens_per_step == 2.4
    nothing = Acceptance()
    assert (nothing.rate, nothing.tokens_per_step, nothing.by_depth) == (None, None, ())
    both = CHAIN + Acceptance(10, 20, (10, 5), (5, 5))
    assert both == Acceptance(110, 260, (110, 75, 45), (75, 50, 25))


def test_tasks_count_the_same_or_by_their_positions() -> None:
    sure = Acceptance(10, 60, (10, 10, 10), (10, 10, 10))
    score = some_score(task_score("chat"), task_score("code", 0.7, chain=sure, speedup=None))
    assert score.accept_rate == pytest.approx((140 / 215 + 1) / 2)
    assert score.chain().rate == pytest.approx(170 / 245)
    assert score.mean(lambda one: one.chain.rate, 0.7) == 1
    assert score.speedup == 1.3  # of those that have one
    assert score.effective_accept_rate == pytest.approx(TREE.rate)
    assert some_score(task_score(speedup=None)).speedup is None


def changed(path: str, value: Any) -> dict[str, Any]:
    raw = some_card().as_json()
    *above, last = path.split(".")
    place: Any = raw
    for name in above:
        place = place[int(name)] if name.isdigit() else place[name]
    if value is KeyError:
        del place[last]
    else:
        place[last] = value
    return json.loads(json.dumps(raw))


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("version", 2, "version 2 was written by a newer Outrider"),
        ("version", 0, "version must be 1, not 0"),
        ("target", "smollm", "target must be an object, not 'smollm'"),
        ("target.fingerprint", "abc", "target.fingerprint must be 64 hexadecimal digits"),
        ("target.parameters", True, "target.parameters must be a whole number, not True"),
        ("target.parameters", KeyError, "target.parameters is missing"),
        ("target.name", "\x1b[31mred", "target.name holds characters that cannot be shown"),
        ("draft.kind", "medusa", "draft.kind must be eagle or lm, not 'medusa'"),
        ("draft.engines", "outrider", "draft.engines must be a list"),
        ("draft.engines", [1], r"draft.engines\[0\] must be a text, not 1"),
        ("draft.paramters", 3, "unknown field 'draft.paramters'; did you mean 'parameters'"),
        ("trained_tokens", 1.5, "trained_tokens must be a whole number"),
        ("score.date", "yesterday", "score.date must be like 2026-01-31"),
        ("score.tasks", [], "score.tasks must not be empty"),
        ("score.tasks.0.temperature", float("nan"), r"score.tasks\[0\].temperature must be a number"),
        ("score.tasks.0.chain.accepted", [101, 1, 1], r"score.tasks\[0\].chain.reached and accepted"),
        ("score.tasks.0.chain.accepted", [1], "as long as each other"),
        ("score.tasks.0.tree.steps", 10_000, "steps must be between"),
    ],
)  # fmt: skip
def test_a_wrong_card_names_its_file_and_field(tmp_path: Path, path: str, value: Any, says: str) -> None:
    write_pair(tmp_path, some_card())
    (tmp_path / "card.json").write_text(json.dumps(changed(path, value)))
    with pytest.raises(BadCheckpoint, match=says) as wrong:
        read_card(tmp_path)
    assert str(wrong.value).startswith(f"{tmp_path / 'card.json'}: ")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not sound JSON"),
        ('{"version": 1' + "0" * 400 + "}", "an integer has 401 digits"),
        ("[]", "should hold a JSON object"),
        ("{}", "version is missing"),
    ],
)
def test_a_card_that_is_none_is_named(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "card.json").write_text(text)
    with pytest.raises(BadCheckpoint, match=says):
        read_card(tmp_path)
    with pytest.raises(ValueError, match="must be an object"):
        card_from_json([])


# ----------------------------------------------------------------------------------------------- fingerprints


def test_every_quantisation_of_a_model_has_one_fingerprint(tmp_path: Path) -> None:
    weights = {name: value.bfloat16().float() for name, value in hf_weights().items()}
    write_folder(tmp_path / "bf16", dtype=torch.bfloat16)
    write_gguf(tmp_path / "whole.gguf", tensors=gguf_tensors(weights))
    rounded = {
        name: value if value.ndim == 1 else np.round(value, 1)
        for name, value in gguf_tensors(weights).items()
    }
    write_gguf(tmp_path / "rounded.gguf", tensors=rounded)
    made = {fingerprint(open_checkpoint(tmp_path / name)) for name in ("bf16", "whole.gguf", "rounded.gguf")}
    assert len(made) == 1 and len(made.pop() or "") == 64


def test_another_model_has_another_fingerprint(tmp_path: Path, target) -> None:
    other = hf_weights()
    other["model.norm.weight"][0] += 1e-3
    write_gguf(tmp_path / "tuned.gguf", tensors=gguf_tensors(other))
    write_folder(tmp_path / "shape", num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    found = [fingerprint(open_checkpoint(tmp_path / name)) for name in ("tuned.gguf", "shape")]
    assert len({fingerprint(target), *found}) == 3


def test_a_family_only_transformers_knows_has_none(tmp_path: Path) -> None:
    write_folder(tmp_path, model_type="gpt_neox")
    assert fingerprint(open_checkpoint(tmp_path)) is None


# -------------------------------------------------------------------------------------------------- catalogue


def test_the_best_of_ones_own_comes_before_a_shipped_one(tmp_path: Path, target, monkeypatch) -> None:
    own, cache = fingerprint(target) or "", tmp_path / "cache"
    assert find_pair(target, cache) is None
    write_pair(tmp_path / "shipped" / "there", some_card(own, 3.0))
    write_pair(cache / "pairs" / "other", some_card("1" * 64, 5.0))
    found = find_pair(target, cache)
    assert found is not None and (found.name, found.source) == ("there", "shipped")
    for name, tokens in (("b", 2.0), ("a", 2.0), ("weak", 1.5)):
        write_pair(cache / "pairs" / name, some_card(own, tokens))
    write_pair(cache / "pairs" / "0-unscored", some_card(own, score=None))
    found = find_pair(target, cache)
    assert found is not None and (found.name, found.source) == ("a", "added")
    write_pair(tmp_path / "named" / "mine", some_card(own, 2.5))
    for value in (tmp_path / "named", tmp_path / "named" / "mine"):
        monkeypatch.setenv("OUTRIDER_PAIRS", f"{tmp_path / 'shipped'}:{value}")
        found = find_pair(target, cache)
        assert found is not None and (found.name, found.source) == ("there", "named")
    monkeypatch.setenv("OUTRIDER_PAIRS", str(tmp_path / "named"))
    assert pair_named("mine", cache).source == "named"
    assert find_pair(target, cache) == pair_named("mine", cache)


def test_a_broken_card_costs_a_warning_and_nothing_else(tmp_path: Path, target, monkeypatch) -> None:
    cache = tmp_path / "cache"
    write_pair(cache / "pairs" / "good", some_card(fingerprint(target) or ""))
    bad = write_pair(cache / "pairs" / "bad", some_card(fingerprint(target) or "", 9.0))
    (bad / "card.json").write_text("{")
    monkeypatch.setenv("OUTRIDER_PAIRS", str(tmp_path / "nowhere"))
    with pytest.warns(UserWarning) as warned:
        found = find_pair(target, cache)
    assert found is not None and found.name == "good"
    said = [str(one.message) for one in warned]
    assert len(said) == 2 and "nowhere has no card.json" in said[0] and str(bad / "card.json") in said[1]
    assert list_pairs(cache)[1] == [text.removeprefix("a pair is left out: ") for text in said]


def test_adding_copies_all_and_removing_deletes_it(tmp_path: Path) -> None:
    cache, folder = tmp_path / "cache", write_pair(tmp_path / "made", some_card())
    into = cache / "pairs"
    pair = add_pair(folder, into)
    assert (pair.folder, pair.name) == (cache / "pairs" / "made", "made")
    assert sorted(f.name for f in pair.folder.iterdir()) == sorted(f.name for f in folder.iterdir())
    with pytest.raises(InvalidRequest, match="outrider pairs remove made"):
        add_pair(folder, into)
    add_pair(folder, into, "again")
    assert [pair.name for pair in list_pairs(cache)[0]] == ["again", "made"]
    (cache / "pairs" / "made" / "card.json").write_text("{")  # one that is broken can be removed, too
    remove_pair("made", cache)
    assert [file.name for file in (cache / "pairs").iterdir()] == ["again"]
    assert folder.exists()


def test_a_full_disk_is_named_once_and_leaves_nothing(tmp_path: Path) -> None:
    folder = write_pair(tmp_path / "made", some_card())
    for name in ("a.safetensors", "b.safetensors"):
        (folder / name).write_bytes(b"weights" * 10_000)
    into = tmp_path / "cache" / "pairs"
    with file_size_limit(4096), pytest.raises(InvalidRequest) as caught:
        add_pair(folder, into)
    assert str(caught.value) == f"{into / 'made'} cannot be written: File too large"
    assert list(into.iterdir()) == []
    assert add_pair(folder, into).folder == into / "made"


def test_of_two_that_add_one_name_at_once_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one is complete by the time this one's copy is."""
    folder, into = write_pair(tmp_path / "made", some_card()), tmp_path / "cache" / "pairs"
    write, others = pairs.write_card, []

    def slow(made: Path, card: Card) -> Path:
        if not others:
            others.append("begun")
            add_pair(folder, into, licence="the other's")
        return write(made, card)

    monkeypatch.setattr(pairs, "write_card", slow)
    with pytest.raises(InvalidRequest, match=r"there is a pair 'made' already.*outrider pairs remove made"):
        add_pair(folder, into, licence="mine")
    assert [one.name for one in into.iterdir()] == ["made"]
    assert read_card(into / "made").licence == "the other's"


def test_many_at_once_add_and_remove(tmp_path: Path) -> None:
    """Each ends with success or a refusal that names the pair."""
    cache, folder = tmp_path / "cache", write_pair(tmp_path / "made", some_card())
    ended: list[object] = []

    def often(act: Callable[[], object]) -> None:
        for _ in range(20):
            try:
                ended.append(bool(act()))
            except OutriderError as refusal:
                ended.append(str(refusal))

    acts: list[Callable[[], object]] = [lambda: add_pair(folder, cache / "pairs")] * 3
    acts += [lambda: remove_pair("made", cache)] * 3 + [lambda: list_pairs(cache)]
    with ThreadPoolExecutor(len(acts)) as pool:
        list(pool.map(often, acts))
    assert len(ended) == 20 * len(acts) and False not in ended
    assert all(one is True or "made" in str(one) for one in ended)
    assert [one.name for one in (cache / "pairs").iterdir()] in ([], ["made"])


def test_a_distillation_is_added_by_its_own_name_without_its_folders(tmp_path: Path) -> None:
    draft = write_pair(tmp_path / "smollm2" / "draft", some_card(licence=None))
    (draft / "config.json").write_text("{}")
    made = {
        "command": "outrider distill ../models/a --prompts /home/me/p.jsonl --share code=0.1 --out=/tmp/x y",
        "machine": "A CPU, 2 cores",
        "data": {
            "files": {"/home/me/p.jsonl": "ab"},
            "shards": {"/a/s-0": "1", "/b/s-0": "2", "/b/s-1": "3"},
        },
        "recipe": {
            "target": "org/model",
            "prompts": ["/home/me/p.jsonl"],
            "continue_from": "~/it's",
            "seed": 0,
        },
    }
    (draft / "train.json").write_text(json.dumps(made))
    pair = add_pair(tmp_path / "smollm2", tmp_path / "given", licence="MIT")
    assert pair.folder == tmp_path / "given" / "smollm2" and pair.card == some_card(licence="MIT")
    assert read_card(pair.folder) == pair.card and read_card(draft).licence is None
    assert json.loads((pair.folder / "train.json").read_text()) == {
        "command": "outrider distill a --prompts p.jsonl --share code=0.1 --out=x y",
        "machine": "A CPU, 2 cores",
        "data": {"files": {"p.jsonl": "ab"}, "shards": {"s-0": "1", "s-0 (2)": "2", "s-1": "3"}},
        "recipe": {"target": "org/model", "prompts": ["p.jsonl"], "continue_from": "it's", "seed": 0},
    }
    assert json.loads((draft / "train.json").read_text()) == made


@pytest.mark.parametrize("broken", ["card", "weights", "folder", "name"])
def test_what_is_no_pair_is_not_added(tmp_path: Path, broken: str) -> None:
    folder = write_pair(tmp_path / "made", some_card())
    name = None
    if broken == "card":
        (folder / "card.json").unlink()
    elif broken == "weights":
        (folder / "model.safetensors").unlink()
    elif broken == "folder":
        folder = folder / "card.json"
    else:
        name = "../up"
    said = {"card": "no card.json", "weights": "no weights", "folder": "no folder", "name": "no name"}[broken]
    with pytest.raises((BadCheckpoint, ModelNotFound, InvalidRequest), match=said):
        add_pair(folder, tmp_path / "cache" / "pairs", name)
    assert not (tmp_path / "cache").exists()


def test_only_ones_own_can_be_removed(tmp_path: Path, monkeypatch) -> None:
    write_pair(tmp_path / "shipped" / "given", some_card())
    folder = write_pair(tmp_path / "elsewhere", some_card())
    monkeypatch.setenv("OUTRIDER_PAIRS", str(folder))
    for name, says in (("given", "came with Outrider"), ("elsewhere", "which OUTRIDER_PAIRS names")):
        with pytest.raises(InvalidRequest, match=says):
            remove_pair(name, tmp_path / "cache")
    for name in ("givn", "../shipped/given"):
        with pytest.raises(ModelNotFound, match="there is no pair"):
            remove_pair(name, tmp_path / "cache")
    assert folder.exists() and (tmp_path / "shipped" / "given").exists()


def test_listing_does_not_wait_for_torch() -> None:
    code = "import sys, outrider.load.pairs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
