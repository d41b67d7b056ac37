"""A batch's runner on a full disk, and models that requests and batches want in turn."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.serve import batch_run, batch_store, model_table
from outrider.serve.batch_run import BatchRunner
from outrider.serve.batch_store import INPUT, BatchStore
from outrider.serve.errors import ApiError
from outrider.serve.model_room import ModelRoom
from outrider.serve.model_service import ModelService
from outrider.serve.model_spec import ModelSpec
from outrider.serve.model_table import ModelTable
from outrider.serve.request import Reply
from outrider.serve.settings import ServeSettings

COMPLETIONS = "/v1/completions"


def upload(store: BatchStore, content: bytes) -> str:
    name, file = store.open_file()
    with file:
        file.write(content)
    store.keep_file(name, "", "in.jsonl", INPUT)
    return name


def lines(count: int) -> bytes:
    one = {"method": "POST", "url": COMPLETIONS, "body": {"prompt": "a"}}
    return b"".join(json.dumps({**one, "custom_id": f"n{i}"}).encode() + b"\n" for i in range(count))


@pytest.fixture
def store(tmp_path: Path) -> BatchStore:
    return BatchStore(tmp_path / "kept", 1 << 30)


class Runner(BatchRunner):
    """Answers at once."""

    most = 4
    _others_wait = False

    async def _answer(self, batch: Any, body: bytes) -> Any:
        metrics = SimpleNamespace(count=lambda *args, **labels: None)
        return SimpleNamespace(id="r", metrics=metrics), Reply({"text": "b"})


@pytest.mark.parametrize("failing", ["record", "active", "finalize"])
def test_a_full_disk_loses_no_line(store: BatchStore, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    """What fails is tried again: every line has one answer."""
    monkeypatch.setattr(batch_run, "HOLD", 0.02)
    whole, failed = getattr(store, failing), []

    def often(*args: Any) -> Any:
        if len(failed) < 3:
            failed.append(args)
            raise sqlite3.OperationalError("database or disk is full")
        return whole(*args)

    monkeypatch.setattr(store, failing, often)
    body = store.create("", upload(store, lines(9)), COMPLETIONS, None)

    async def finish() -> dict[str, Any]:
        runner = Runner(SimpleNamespace(draining=False), store)  # type: ignore[arg-type]
        task = asyncio.create_task(runner.run())
        try:
            async with asyncio.timeout(20):
                while (found := store.batch(body["id"], ""))["status"] != "completed":
                    assert not task.done()
                    runner.wake.set()
                    await asyncio.sleep(0.02)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return found

    found = asyncio.run(finish())
    assert found["request_counts"] == {"total": 9, "completed": 9, "failed": 0} and len(failed) == 3
    content = (store.folder / found["output_file_id"]).read_text().splitlines()
    assert [json.loads(one)["custom_id"] for one in content] == [f"n{i}" for i in range(9)]


def test_a_line_without_end_is_not_read_whole(store: BatchStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_store, "MAX_LINE_BYTES", 1000)
    body = store.create("", upload(store, lines(2) + b'{"a": "' + b"b" * 5000), COMPLETIONS, None)
    store.validate(body)
    assert body["status"] == "failed"
    assert body["errors"]["data"][0] | {"code": ""} == {
        "code": "", "message": "it is longer than 1000 bytes", "line": 3, "param": None,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------- models in turn


class Engine:
    """Stands for a backend: loaded at once, until it is stopped."""

    problem, model, last_life = "", object(), False

    def __init__(self) -> None:
        self.state, self.queued, self.jobs = "loading", 0, {}
        self.ready, self.stopped = asyncio.Event(), asyncio.Event()

    async def run(self) -> bool:
        self.state = "ready"
        self.stopped.clear()
        self.ready.set()
        await self.stopped.wait()
        self.state = "stopped"
        return True

    def stop(self) -> None:
        self.ready.clear()
        self.stopped.set()

    def refuse_when_full(self, requests: int, tokens: int) -> None:
        pass

    def count_queued(self, requests: int, tokens: int) -> None:
        self.queued += requests


def table_of(names: str, patience: float) -> ModelTable:
    """Models of which one fits."""
    serve = ServeSettings(load="first use", unload_after=patience)
    specs = [ModelSpec(name, name, serve=serve) for name in names]
    services = [ModelService(spec, Engine(), None) for spec in specs]  # type: ignore[arg-type]
    return ModelTable(services, ModelRoom(dict.fromkeys(names, ("cpu", 1, 0)), {"cpu": 1}))


def test_a_batch_waits_until_a_model_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not take the memory of a model that is used, and holds up no request for a third."""
    monkeypatch.setattr(model_table, "BACKGROUND_WAIT", 0.3)

    async def scenario() -> None:
        table = table_of("abc", 0.1)
        a, b, c = table.models
        running = asyncio.create_task(table.run())
        await table.enter(a, 1)
        with pytest.raises(ApiError) as refused:  # the batch tries again later
            await table.enter(b, 1, background=True)
        assert (refused.value.status, refused.value.code, a.state, b.backend.queued) == (
            503,
            "loading",
            "ready",
            0,
        )
        waiting = asyncio.create_task(table.enter(c, 1))
        await asyncio.sleep(0.3)  # longer than the patience: `a` may go once its request has ended
        assert a.state == "unloading" and not waiting.done()
        table.leave(a)
        async with asyncio.timeout(5):
            await waiting
        assert c.state == "ready" and b.state == "loading"
        table.leave(c)
        async with asyncio.timeout(5):
            await table.enter(b, 1, background=True)
        table.stop()
        assert await running

    asyncio.run(scenario())


def test_a_model_that_failed_holds_no_memory() -> None:
    async def scenario() -> None:
        table = table_of("ab", 0.0)
        a, b = table.models
        running = asyncio.create_task(table.run())
        await table.enter(a, 1)

        async def gives_up() -> bool:
            return False

        a.backend.state, a.backend.run = "failed", gives_up  # type: ignore[method-assign]
        async with asyncio.timeout(5):
            await table.enter(b, 1)
        table.stop()
        await running

    asyncio.run(scenario())
