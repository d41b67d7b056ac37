"""An engine is built in one call, complete, and from nothing but what the call is given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch

from outrider import LLM, SamplingParams, Settings
from outrider.cache.formats import FORMATS
from outrider.draft.names import Part
from outrider.engine.build import Reshape, build_engine
from outrider.load.checkpoint import Checkpoint, open_checkpoint
from tests.targets import write_target
from tests.tiny import finish, request, tokens_of

LOOKUP = Part("lookup", "lookup")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Building sets the number of torch's threads, and these tests build on the thread of all tests."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("build") / "model")


def test_what_is_built_is_complete_and_answers(folder: Path) -> None:
    asked = Settings(device="cpu", max_sequences=3)
    parts = (LOOKUP, Part("early_exit", "early_exit:1"))
    built = build_engine(open_checkpoint(folder), parts, None, asked, Reshape())
    assert built.engine.settings is built.settings and built.engine.model is built.model
    assert (built.draft, built.drafter) == (("lookup", "early_exit"), "lookup+early_exit")
    assert built.engine.drafters.members(built.drafter) == built.draft
    assert built.engine.planner.default == built.drafter
    assert (built.settings.max_sequences, built.settings.kv_cache_dtype) == (3, "float32")
    assert asked == Settings(device="cpu", max_sequences=3)  # nothing is changed in what was given
    with pytest.raises(FrozenInstanceError):
        built.settings = asked  # type: ignore[misc]
    assert built.engine.model.kept is torch.float32
    built.engine.add(request("a", [5, 6, 7], max_tokens=4, ignore_eos=True))
    assert [len(tokens_of(events)) for events in finish(built.engine).values()] == [4]


def test_a_kv_cache_in_fewer_bits_holds_more_tokens(folder: Path) -> None:
    """The draft's cache stays as it is."""
    parts, room, tokens = (Part(str(folder), str(folder)),), 1 << 20, {}
    for asked, kept in FORMATS.items():
        settings = Settings(device="cpu", max_sequences=64, cache_bytes=room, kv_cache_dtype=asked)
        built = build_engine(open_checkpoint(folder), parts, None, settings, Reshape())
        store = built.engine.cache.store
        assert (
            {tensor.dtype for tensor in (*store.keys, *store.values)} == {built.engine.model.kept} == {kept}
        )
        drafter = built.engine.drafters[built.draft[0]]
        assert drafter.model.kept is drafter.store.keys[0].dtype is torch.float32
        tokens[asked] = built.engine.table.pool.total
    assert tokens["bfloat16"] == 2 * tokens["float32"]
    size = open_checkpoint(folder).config.specs[0].head_dim
    assert tokens["int8"] == pytest.approx(tokens["float32"] * 4 * size / (size + 4), abs=1)


def test_without_drafts_there_is_no_drafter_to_choose(folder: Path) -> None:
    built = build_engine(open_checkpoint(folder), (), None, Settings(device="cpu"), Reshape())
    assert (built.draft, built.drafter, built.engine.planner.choices) == ((), "none", ())


def test_an_llm_shows_what_was_built_from_what_was_reshaped(folder: Path, tmp_path: Path) -> None:
    other = open_checkpoint(write_target(tmp_path / "other"))
    seen: list[Checkpoint] = []
    reshape = Reshape(target=lambda found: seen.append(found) or other)
    asked = Settings(device="cpu")
    with LLM(folder, draft="lookup", settings=asked, reshape=reshape) as llm:
        assert ([one.path for one in seen], llm.checkpoint) == ([folder], other)
        assert llm.settings is llm.engine.settings and asked == Settings(device="cpu")
        assert (llm.drafter, llm.memory, llm.pair) == ("lookup", None, None)
        assert llm.model is llm.engine.model and llm.live_draft.drafters is llm.engine.drafters


@pytest.mark.parametrize(("draft", "drafter"), [("lookup+early_exit:1", None), ("early_exit:1", "lookup")])
def test_a_prediction_selects_lookup_unless_it_drafts_anyway(
    folder: Path, draft: str, drafter: str | None
) -> None:
    with LLM(folder, draft=draft, device="cpu") as llm:
        for prediction, expected in (("abc", drafter), (None, None)):
            made = llm.request([5], SamplingParams(prediction=prediction))
            assert made.params.speculation.drafter == expected
