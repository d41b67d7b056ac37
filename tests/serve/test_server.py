"""The server from outside: that it starts, answers, and says who it is."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import shutil
from pathlib import Path

import pytest

from outrider.engine.placement import Memory
from outrider.serve.backend import Backend
from outrider.serve.link import Ready, Start
from outrider.serve.metrics import Metrics
from outrider.serve.server import _card
from outrider.serve.settings import ServeSettings
from tests.load.tiny import byte_level_backend, vocabulary
from tests.serve.conftest import Served, start_server


def test_it_answers(served: Served) -> None:
    reply = served.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    )
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["finish_reason"] in ("length", "stop")


def test_the_models_sampling_is_the_default_below_flags_and_requests(
    tiny_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_folder, tmp_path / "own")
    said = {"temperature": 0.25, "top_p": 0.5, "top_k": 40, "repetition_penalty": "no"}
    (tmp_path / "own" / "generation_config.json").write_text(json.dumps(said))
    server = start_server(tmp_path / "own", "--top-p", "0.75")
    try:
        asked = {"input": "hi", "max_output_tokens": 2}
        answer = server.post("/v1/responses", asked).json()
        assert (answer["temperature"], answer["top_p"]) == (0.25, 0.75)
        answer = server.post("/v1/responses", {**asked, "temperature": 1, "top_p": 1}).json()
        assert (answer["temperature"], answer["top_p"]) == (1, 1)
        assert server.printed("repetition_penalty must be a number")
    finally:
        assert server.stop() == 0


@pytest.mark.parametrize("memory", [None, Memory(3 << 30, 1 << 30, 6 << 30, 6144, 2 << 30)])
def test_where_memory_goes_is_shown_and_on_a_gpu_logged(
    memory: Memory | None, caplog: pytest.LogCaptureFixture
) -> None:
    shown = None if memory is None else dataclasses.asdict(memory)
    plan = {"device": "cuda", "weights": "int8", "parameters": 7, "max_sequences": 9, "memory": shown}
    sizes = {"weight_bytes": 5 << 20, "cache_bytes": 1 << 30, "cache_tokens": 1000}
    ready = Ready(
        tokenizer=byte_level_backend().to_str(), bos_id=None, eos_ids=[0], add_bos=None, template=None, family="llama",
        vocab=len(vocabulary()), context=256, cache_tokens=1000, cache_block=16, drafter="lm", plan={**plan, **sizes},
    )  # fmt: skip
    backend = Backend(Start("tiny", "tiny", {}, ("text", "info")), ServeSettings(), Metrics())

    async def obey() -> None:
        await backend._handle(ready)
        assert backend.grammars is not None
        await backend.grammars.close()  # at once, while its first process is being started

    with caplog.at_level(logging.INFO, "outrider"):
        asyncio.run(obey())
    assert [(r.message, r.facts) for r in caplog.records] == ([] if memory is None else [("memory", shown)])
    assert backend.model is not None
    [line] = [line for line in _card(backend.model, "", 64).splitlines() if "memory" in line]
    plain = "5 MiB weights, 1.0 GiB cache for 1000 tokens"
    told = plain if memory is None else memory.describe()
    assert line == f"memory    {told}, 9 sequences at once"
    backend.model.plan["pair"] = "mine"
    assert "drafter   lm (the pair mine: outrider pairs show mine)" in _card(backend.model, "", 64)
