"""`draft="auto"`: the paired draft where there is one that can be used, else lookup; never a failed start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM
from outrider.draft.names import parse_draft, settle_auto
from outrider.engine import build as build_module
from outrider.engine.memory import DraftRoom, check_room, draft_room
from outrider.engine.placement import DRAFT_TOKENS
from outrider.errors import BadCheckpoint, OutOfMemory
from outrider.load import pairs
from outrider.load.cards import write_card
from outrider.load.checkpoint import open_checkpoint
from outrider.load.heads import FREQUENT, HeadConfig, write_head
from outrider.load.pairs import fingerprint
from outrider.model.weights import kept_formats
from outrider.settings import Settings
from outrider.types import MAX_NODES
from tests.load.pairs import CHAIN, some_card, write_pair
from tests.targets import pair_head, target_config, write_target
from tests.tiny import head_tensors, sequence

OPTIONS: dict[str, Any] = dict(device="cpu", max_sequences=2, cache_bytes=1 << 20)
PROMPT = [5, 17, 30, 44, 17, 30]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one; kernels stay where they are built."""
    monkeypatch.setattr(pairs, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("OUTRIDER_PAIRS", str(tmp_path / "pairs"))
    (tmp_path / "pairs").mkdir()
    return tmp_path / "pairs"


def test_auto_takes_the_pair_and_keeps_lookup(target: Path, catalogue: Path) -> None:
    folder = pair_head(catalogue / "mine", target)
    with LLM(target, **OPTIONS) as llm:
        assert (llm.drafter, llm.pair and llm.pair.folder) == ("eagle", folder)
        assert llm.engine.planner.choices == ("eagle", "lookup")
        prior = llm.engine.planner.rates.of(sequence([1]), "eagle")  # as scored, not as of an unknown drafter
        assert (prior.first, prior.next) == (CHAIN.by_depth[0], pytest.approx(70 / 115))
        plain, drafted, copied = (
            llm.generate(PROMPT, temperature=0, max_tokens=24, speculation=how)[0]
            for how in (False, {"depth": 3}, {"drafter": "lookup", "depth": 3})
        )
        assert plain.token_ids == drafted.token_ids == copied.token_ids
        assert plain.stats.drafted == 0 < drafted.stats.drafted


def test_a_head_drafts_with_the_most_frequent_words(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer words change no token."""
    monkeypatch.setitem(DRAFT_TOKENS, "cpu", 24)
    config = target_config()
    head = HeadConfig(config, config.vocab, (0, 1, 1), shared_head=True)
    frequent = torch.arange(config.vocab - 1, config.vocab - 41, -1)
    write_head(tmp_path, head, {**head_tensors(head), FREQUENT: frequent.int()})
    with LLM(target, draft=str(tmp_path), **OPTIONS) as llm:
        assert llm.engine.drafters["eagle"].head.config.draft_vocab == 24
        plain, drafted = (
            llm.generate(PROMPT, temperature=0.8, seed=3, max_tokens=24, speculation=how)[0]
            for how in (False, {"depth": 3})
        )
        assert plain.token_ids == drafted.token_ids and drafted.stats.drafted


def test_a_small_model_may_be_the_pair(target: Path, catalogue: Path) -> None:
    folder = write_target(catalogue / "small", noise=0.1)
    write_card(folder, some_card(fingerprint(open_checkpoint(target)) or ""))
    with LLM(target, **OPTIONS) as llm:
        assert (llm.drafter, llm.pair and llm.pair.name) == ("lm", "small")


def test_a_card_of_another_target_is_not_for_this_one(target: Path, catalogue: Path) -> None:
    write_pair(catalogue / "other", some_card("1" * 64))
    with LLM(target, **OPTIONS) as llm:
        assert (llm.drafter, llm.pair) == ("lookup", None)


@pytest.mark.parametrize("damage", ["cut", "gone", "config"])
def test_a_damaged_pair_costs_a_warning_and_lookup_drafts(target: Path, catalogue: Path, damage: str) -> None:
    folder = pair_head(catalogue / "mine", target)
    weights = folder / "model.safetensors"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "gone":
        weights.unlink()
    else:
        (folder / "config.json").write_text("{")
    with pytest.warns(UserWarning, match=f"cannot be used, lookup drafts instead: {folder}: "):
        llm = LLM(target, **OPTIONS)
    with llm:
        assert (llm.drafter, llm.pair, llm.live_draft.states) == ("lookup", None, {})
    with pytest.raises(BadCheckpoint):  # named, it is an error
        LLM(target, draft=str(folder), **OPTIONS)


@pytest.mark.parametrize("draft", ["none", "lookup"])
def test_other_words_do_not_look_for_pairs(
    target: Path, catalogue: Path, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair_head(catalogue / "mine", target)
    monkeypatch.setattr(build_module, "find_pair", lambda *_: pytest.fail("looked"))
    with LLM(target, draft=draft, **OPTIONS) as llm:
        assert (llm.drafter, llm.pair) == (draft, None)


def test_auto_joins_others() -> None:
    kinds = lambda parts: [(part.kind, part.paired) for part in parts]  # noqa: E731 - a name for a long name
    both = parse_draft("auto+early_exit:1")
    assert kinds(settle_auto(both, None)) == [("lookup", False), ("early_exit", False)]
    assert kinds(settle_auto(both, Path("there"))) == [("model", True), ("early_exit", False)]


# ------------------------------------------------------------------------------------------------------ memory


def test_a_draft_takes_the_memory_that_was_counted(target: Path, catalogue: Path) -> None:
    folder = pair_head(catalogue / "mine", target)
    room = draft_room([open_checkpoint(folder)])
    with LLM(target, **OPTIONS) as llm:
        drafter, slots = llm.engine.drafters["eagle"], llm.engine.table.pool.total
        features = llm.engine.cache.store.features
        kept = sum(t.numel() for t in (*drafter.store.keys, *drafter.store.values)) + features.numel()
        assert room.cached * slots == pytest.approx(kept, rel=0.1)
    assert draft_room([open_checkpoint(target)]).cached == target_config().kv_bytes_per_token // 4
    assert draft_room([]) == DraftRoom()


def test_a_draft_counts_before_anything_is_loaded() -> None:
    config, settings = target_config(), Settings(device="cpu", cache_bytes=1 << 20)
    weights = 4 * config.parameters
    assert check_room(config, settings, weights + (1 << 20), weights) is None
    with pytest.raises(OutOfMemory, match="weights of model and draft"):
        check_room(config, settings, weights, weights, DraftRoom(1, 0, 2))
    with pytest.raises(OutOfMemory, match="cache"):
        check_room(config, settings, weights + (1 << 20), weights, DraftRoom(0, 1))


def test_a_pair_without_room_is_left_out(
    target: Path, catalogue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = pair_head(catalogue / "mine", target)
    config, weights = target_config(), kept_formats(open_checkpoint(target), "stored")
    tokens = OPTIONS["max_sequences"] * (config.context + MAX_NODES)
    free = sum(weights.values()) + tokens * config.kv_bytes_per_token
    monkeypatch.setattr(build_module, "free_memory", lambda: free)
    with pytest.warns(UserWarning, match=f"{folder} is left out"):
        llm = LLM(target, **OPTIONS)
    with llm:
        assert (llm.drafter, llm.pair) == ("lookup", None)
    with pytest.raises(OutOfMemory):
        LLM(target, draft=str(folder), **OPTIONS)
