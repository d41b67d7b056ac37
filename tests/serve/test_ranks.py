"""A server whose model two processes share: the answers of one process, and back after a rank is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from outrider.settings import usable_cores
from tests.model.families import NEEDS_COMPILER
from tests.serve.conftest import Served, wait_for
from tests.serve.test_lifecycle import SHORT, Talk

pytestmark = [
    NEEDS_COMPILER,
    pytest.mark.skipif(usable_cores() < 2, reason="one core cannot run two ranks"),
]
ASKED = {**SHORT, "max_tokens": 12, "temperature": 0.8}


def rank_of(server: Served) -> psutil.Process:
    [rank] = server.engine().children()
    assert "rank_process" in " ".join(rank.cmdline())
    return rank


def test_a_lost_rank_ends_streams_and_the_server_comes_back(
    served: Served, tiny_folder: Path, start: Callable[..., Served]
) -> None:
    expected = served.post("/v1/completions", ASKED).json()["choices"][0]["text"]
    server = start(tiny_folder, "--tensor-parallel", "2")
    assert server.post("/v1/completions", ASKED).json()["choices"][0]["text"] == expected
    talk, engine = Talk(server, max_tokens=1900).begun(), server.engine()
    rank_of(server).kill()
    assert talk.end().error["code"] == "engine_lost"
    assert server.printed("rank 1 of 2 (tensor parallel) was ended by SIGKILL")
    wait_for(lambda: server.metric("engine_restarts_total") == 1 and not engine.is_running())
    server.wait_ready()
    assert server.post("/v1/completions", ASKED).json()["choices"][0]["text"] == expected
    rank_of(server).kill()  # while no request runs
    wait_for(lambda: server.metric("engine_restarts_total") == 2)
    server.wait_ready()
    assert server.post("/v1/completions", ASKED).json()["choices"][0]["text"] == expected
