"""Two processes that share a model: the tokens of one process, and a clean end when a rank is lost."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from outrider import LLM, SamplingParams
from outrider.bench.audit import audit
from outrider.engine import ranks
from outrider.engine.ranks import check_ranks
from outrider.errors import InvalidRequest, RankLost, UnsupportedModel
from outrider.load.checkpoint import open_checkpoint
from outrider.load.config import LayerSpec, ModelConfig
from outrider.load.weight_map import expected_shapes
from outrider.settings import Settings, usable_cores
from tests.load.tiny import byte_level_backend, hf_config, vocabulary
from tests.model.families import NEEDS_COMPILER
from tests.tiny import eagle_tensors, random_tensors, tiny_config, write_eagle

NEEDS_CORES = pytest.mark.skipif(usable_cores() < 2, reason="one core cannot run two ranks")
SMALL: dict[str, Any] = {"device": "cpu", "max_sequences": 16, "cache_bytes": 400 * 2 * 4 * 2 * 2 * 16}
PARAMS = SamplingParams(max_tokens=5, ignore_eos=True)


def write_model(folder: Path, seed: int, **changes: Any) -> ModelConfig:
    """A tiny model whose heads are wide enough for the C kernels."""
    config = tiny_config(vocab=len(vocabulary()), context=128, **changes)
    names = {"hidden": "hidden_size", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads"}
    names |= {"intermediate": "intermediate_size", "layers": "num_hidden_layers", "head_dim": "head_dim"}
    folder.mkdir()
    raw = hf_config(**{theirs: getattr(config, ours) for ours, theirs in names.items()})
    (folder / "config.json").write_text(json.dumps(raw))
    byte_level_backend().save(str(folder / "tokenizer.json"))
    read = random_tensors(config, seed)
    save_file({name: read(name) for name, _ in expected_shapes(config)}, folder / "model.safetensors")
    return config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a head and a smaller model that draft for it."""
    place = tmp_path_factory.mktemp("ranks")
    config = write_model(place / "model", 0)
    write_model(place / "draft", 0, layers=1)
    write_eagle(place / "head", config, eagle_tensors(config, 64))
    return place


@pytest.fixture
def pair(folder: Path) -> Iterator[LLM]:
    llm = LLM(folder / "model", draft="lookup", tensor_parallel=2, **SMALL)
    yield llm
    llm.close()


@NEEDS_COMPILER
@NEEDS_CORES
def test_every_drafter_gives_the_tokens_of_one_process(folder: Path) -> None:
    """In batches of 16 that do not fit the cache, so that sequences are preempted."""
    draft = "+".join([str(folder / "head"), str(folder / "draft"), "early_exit:1", "lookup"])
    prompts = [[2 + (7 * i + j) % 260 for j in range(20 + i)] for i in range(16)]
    with (
        LLM(folder / "model", draft="lookup", **SMALL) as alone,
        LLM(folder / "model", draft=draft, tensor_parallel=2, **SMALL) as llm,
    ):
        found = audit(llm, prompts, False, [0.8], PARAMS, reference=alone)
        assert found.differing == 0
        for name in ("eagle", "lm", "early_exit", "lookup", "tree eagle", "tree lm"):
            assert found.drafted[name] > 0, name
        assert found.tokens["plain", 0.8] > 0  # plain decoding of two ranks, too
        assert llm.engine.scheduler.preemptions > 0
        whole, part = (one.engine.runner.store.keys[0] for one in (alone, llm))
        assert 2 * part.shape[1] == whole.shape[1] and part.shape[0] == whole.shape[0]


def generate_until_lost(llm: LLM) -> RankLost:
    with pytest.raises(RankLost) as caught:
        while True:
            llm.generate([[5, 6, 7]], SamplingParams(max_tokens=60, ignore_eos=True))
    return caught.value


@NEEDS_COMPILER
@NEEDS_CORES
def test_a_killed_rank_ends_the_engine_and_is_named(pair: LLM) -> None:
    """In the middle of answers; the error comes within seconds."""
    process = pair.ranks._processes[1]
    killer = threading.Timer(0.3, process.kill)
    killer.start()
    begun = time.monotonic()
    assert "rank 1 of 2" in str(error := generate_until_lost(pair)) and "SIGKILL" in str(error)
    assert time.monotonic() - begun < 15
    with pytest.raises(RankLost):
        pair.generate([[5]])


@NEEDS_COMPILER
@NEEDS_CORES
def test_a_rank_that_stands_still_is_given_up(pair: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine without requests notices, too."""
    stopped = threading.Event()
    failures: list[BaseException] = []
    pair.driver.on_failure = lambda error: (failures.append(error), stopped.set())
    monkeypatch.setattr(ranks, "SILENT_SECONDS", 3.0)
    os.kill(pair.ranks._processes[1].pid, signal.SIGSTOP)
    assert stopped.wait(30)
    assert "rank 1 of 2 (tensor parallel) did not answer for 3 s" in str(failures[0])


@NEEDS_COMPILER
@NEEDS_CORES
def test_a_rank_that_cannot_load_says_why(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = ranks.OtherRanks._start

    def elsewhere(self: Any, rank: int, said: dict[str, object]) -> None:
        start(self, rank, {**said, "model": str(folder / "nowhere")})

    monkeypatch.setattr(ranks.OtherRanks, "_start", elsewhere)
    with pytest.raises(RankLost, match=r"rank 1 of 2 .*failed: .*nowhere does not exist"):
        LLM(folder / "model", draft="lookup", tensor_parallel=2, **SMALL)


@NEEDS_COMPILER
@NEEDS_CORES
def test_closing_ends_every_process(folder: Path) -> None:
    llm = LLM(folder / "model", draft="lookup", tensor_parallel=2, **SMALL)
    process = llm.ranks._processes[1]
    assert process.poll() is None
    llm.close()
    assert process.poll() is not None


@pytest.mark.parametrize(
    ("size", "cores", "gpus", "options", "says"),
    [
        (3, 8, 0, {}, "3 is more than the 2 key-value heads that ranks can share here"),
        (2, 8, 0, {}, "2 is more than the 1 key-value heads"),  # that one of the layers has
        (2, 8, 8, {"device": "cuda"}, "2 does not divide the 3 key-value heads of this model; take 1, 3"),
        (2, 1, 0, {}, "2 is more than the cores of this machine; take at most 1"),
        (2, 8, 1, {"device": "cuda"}, "2 is more than the GPUs of this machine; take at most 1"),
        (2, 8, 0, {"kernels": "torch"}, "needs the C kernels"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, size: int, cores: int, gpus: int, options: Any, says: str
) -> None:
    monkeypatch.setattr(ranks, "usable_cores", lambda: cores)
    monkeypatch.setattr(ranks, "runs_on_gpu", lambda settings: settings.device == "cuda")
    monkeypatch.setattr(ranks.torch.cuda, "device_count", lambda: gpus)
    checkpoint = open_checkpoint(folder / "model")
    if "the 3 key" in says:
        checkpoint.config = tiny_config(heads=3, kv_heads=3)
    if "the 1 key" in says:
        checkpoint.config = tiny_config(specs=(LayerSpec(4, 2, 16, 48), LayerSpec(4, 1, 16, 48)))
    with pytest.raises(InvalidRequest, match=says) as caught:
        check_ranks(checkpoint, Settings(tensor_parallel=size, **options))
    assert caught.value.param == "tensor_parallel"


def test_other_architectures_run_in_one_process(folder: Path) -> None:
    checkpoint = open_checkpoint(folder / "model")
    checkpoint.config = None
    with pytest.raises(UnsupportedModel, match="leave out --tensor-parallel"):
        check_ranks(checkpoint, Settings(tensor_parallel=2))
