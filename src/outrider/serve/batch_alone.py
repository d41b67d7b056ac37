"""`outrider batch`: a file of requests answered without a server, by the same routes, engine process and store."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from outrider.errors import InvalidRequest, OutriderError
from outrider.serve.batch_run import HANDLERS, BatchRunner
from outrider.serve.batch_store import ACTIVE, INPUT, BatchStore
from outrider.serve.keys import Keyring
from outrider.serve.model_service import ModelService
from outrider.serve.model_spec import ModelSpec, shown_name
from outrider.serve.model_table import ModelTable
from outrider.serve.service import Service
from outrider.serve.settings import ServeSettings
from outrider.settings import Settings

YEARS = 10 * 365 * 86_400  # seconds: this batch does not expire
LOOK = 0.2  # seconds between two looks at how far it is
BYTES = 1 << 40  # the store's bound: the disk is the user's own
MANY = 1 << 20  # lines at once: as many as the engine takes sequences
SHOWN = 5  # wrong lines in an error

Report = Callable[[dict[str, int]], None]


def run_batch(
    file: Path, out: Path, model: str, draft: str, settings: Settings, report: Report
) -> dict[str, int]:
    """Answers the requests in `file` and writes `out`, in the same order. Returns how many were answered and refused.
    What is done stays in a folder beside `out` until all is, and a second run goes on from there.
    """
    folder = out.with_name(f"{out.name}.batch")
    if out.exists():
        raise InvalidRequest(f"{out} exists; delete it or name another with -o", "out")
    endpoint = _endpoint(file)
    store = BatchStore(folder, BYTES)
    try:
        body = _begun(store, file, endpoint, model)
        serve = ServeSettings(batch_sequences=MANY, log_level="warning")
        spec = ModelSpec(shown_name(model), model, draft, settings=settings, serve=serve)
        service = Service(ModelTable([ModelService.of(spec)]), serve, Keyring())
        body = asyncio.run(_finished(service, store, body["id"], report))
        _write(store, body, file, out)
    finally:
        store.close()
    shutil.rmtree(folder)
    counts: dict[str, int] = body["request_counts"]
    return counts


def _begun(store: BatchStore, file: Path, endpoint: str, model: str) -> dict[str, Any]:
    """The batch of an earlier run over this file and model, or a new one whose lines are checked."""
    with file.open("rb") as content:
        marks = {"file": hashlib.file_digest(content, "sha256").hexdigest(), "model": model}
        if known := store.batches("", None, 1):
            if known[0]["metadata"] != marks:
                raise InvalidRequest(
                    f"{store.folder} holds answers of another file or model; delete it to begin anew", "out"
                )
            return known[0]
        content.seek(0)
        name, copy = store.open_file()
        with copy:
            shutil.copyfileobj(content, copy)
    store.keep_file(name, "", file.name, INPUT)
    body = store.create("", name, endpoint, marks, YEARS)
    store.validate(body)
    if body["errors"]:
        shutil.rmtree(store.folder)
        found = [f"line {one['line']}: {one['message']}" for one in body["errors"]["data"][:SHOWN]]
        raise InvalidRequest(f"{file} is no file of requests\n" + "\n".join(found), "file")
    return body


def _endpoint(file: Path) -> str:
    """Of the first line; the others must have the same."""
    try:
        with file.open("rb") as content:
            endpoint = msgspec.json.decode(content.readline())["url"]
    except OSError as problem:
        raise InvalidRequest(f"{file} cannot be read: {problem.strerror}", "file") from None
    except (msgspec.MsgspecError, KeyError, TypeError, UnicodeDecodeError):
        endpoint = None
    if endpoint not in HANDLERS:
        raise InvalidRequest(
            "the first line must be a request as JSON with custom_id, method, body and a url of "
            f"{', '.join(HANDLERS)}",
            "file",
        )
    return str(endpoint)


async def _finished(service: Service, store: BatchStore, name: str, report: Report) -> dict[str, Any]:
    table, runner = service.table, BatchRunner(service, store)
    engine, run = asyncio.create_task(table.run()), asyncio.create_task(runner.run())
    try:
        while (body := await runner.call(store.batch, name, ""))["status"] in ACTIVE:
            report(body["request_counts"])
            if engine.done() or run.done():
                raise OutriderError(table.problem or "the engine stopped")
            await asyncio.wait((engine, run), timeout=LOOK, return_when=asyncio.FIRST_COMPLETED)
    finally:
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        table.stop()
        await asyncio.gather(engine, return_exceptions=True)
    return body


def _write(store: BatchStore, body: dict[str, Any], file: Path, out: Path) -> None:
    """Answers and errors in the order of the requests. `out` is there when it is whole."""
    found: dict[str, bytes] = {}
    for name in filter(None, (body["output_file_id"], body["error_file_id"])):
        with (store.folder / name).open("rb") as content:
            found |= {msgspec.json.decode(line)["custom_id"]: line for line in content}
    part = store.folder / "whole"
    with file.open("rb") as asked, part.open("wb") as whole:
        lines = (msgspec.json.decode(line)["custom_id"] for line in asked if line.strip())
        whole.writelines(found[name] for name in lines)
    os.replace(part, out)
