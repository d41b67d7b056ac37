"""The engine's process as it begins: what it does so that nothing holds up the steps."""

from __future__ import annotations

import gc
import socket
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.serve import engine_process
from outrider.serve.link import Start, pack
from outrider.settings import Settings


@pytest.fixture
def interpreter() -> Iterator[None]:
    """As it was, afterwards."""
    interval, frozen = sys.getswitchinterval(), gc.get_freeze_count()
    yield
    sys.setswitchinterval(interval)
    if gc.get_freeze_count() != frozen:
        gc.unfreeze()


def test_what_is_loaded_is_not_looked_at_again_while_steps_run(
    interpreter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    loaded = [[] for _ in range(1000)]  # what a collector would look at

    class Engine:
        def __init__(self, sock: socket.socket, llm: Any) -> None:
            done.append("made")

        def run(self) -> None:
            assert gc.get_freeze_count() > len(loaded)
            assert sys.getswitchinterval() <= 0.001
            done.append("ran")

    llm = SimpleNamespace(prepare=lambda wait: done.append("prepared"), close=lambda: done.append("closed"))
    llm.engine = SimpleNamespace(table=SimpleNamespace(prefix=SimpleNamespace()))
    for name, what in (
        ("become_child", lambda: None),
        ("set_up_logging", lambda *given: None),
        ("LLM", lambda *given, **options: llm),
        ("EngineProcess", Engine),
        ("signal", SimpleNamespace(alarm=lambda seconds: None)),
    ):
        monkeypatch.setattr(engine_process, name, what)
    ours, theirs = socket.socketpair()
    with ours:
        settings = {name: getattr(Settings(), name) for name in Settings.__dataclass_fields__}
        ours.sendall(pack(Start("tiny", "none", settings, ("text", "info"))))
        assert engine_process.main(theirs.detach()) == 0
    assert done == ["prepared", "made", "ran", "closed"]
