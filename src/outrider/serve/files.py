"""`/v1/files`: what batches read and write, as OpenAI's clients upload and fetch it. Each key sees its own files."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import FileResponse, Response

from outrider.errors import InvalidRequest, suggest
from outrider.serve.batch_run import BatchRunner
from outrider.serve.batch_store import INPUT, OUTPUT
from outrider.serve.errors import ApiError
from outrider.serve.multipart import FormReader, boundary_of
from outrider.serve.replies import DeletedFile, FileList, FileObject
from outrider.serve.request import ClientGone, Reply, Request
from outrider.serve.routes import delete, get, post
from outrider.serve.service import owner_of

MAX_LIST = 10_000
LIST_QUERY = ("limit", "after", "order", "purpose")
WRITE = 1 << 20  # bytes that are written at once


def runner_of(request: Request) -> BatchRunner:
    runner: BatchRunner | None = request.app.batches
    if runner is None:
        raise ApiError(
            404,
            "this server keeps no files and batches; start it with --batch-folder DIR",
            code="not_supported",
        )
    if request.key is not None:
        request.service.count(request.key)
    return runner


def queried(request: Request, *known: str) -> dict[str, str]:
    """The query's parameters, of which each must be known and given once."""
    given = request.query_params
    for name in given:
        if name not in known:
            raise InvalidRequest(f"no parameter {name[:60]!r} here{suggest(name, known)}", name[:60])
    if len(given.multi_items()) != len(given):
        raise InvalidRequest("a parameter is given twice", next(iter(given)))
    return dict(given)


def limit_of(query: dict[str, str], usual: int, most: int) -> int:
    text = query.get("limit", str(usual))
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= most):
        raise InvalidRequest(f"limit must be a whole number from 1 to {most}", "limit")
    return int(text)


def page_of(found: list[Any], limit: int) -> Reply:
    """A page of a list, of which one more than `limit` was looked for."""
    data = found[:limit]
    ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return Reply({"object": "list", "data": data, **ends, "has_more": len(found) > limit})


async def upload(request: Request) -> Response:
    runner = runner_of(request)
    boundary = boundary_of(request.headers.get("content-type", ""))
    name, file = await runner.call(runner.store.open_file)
    try:
        with file:
            form = await _received(request, runner, boundary, file)
        _check(form)
        owner = owner_of(request.key, None)
        kept = runner.call(runner.store.keep_file, name, owner, form.filename or "", INPUT)
        return Reply(await asyncio.shield(kept))
    except BaseException:
        runner.store.drop_content(name)
        raise


async def _received(request: Request, runner: BatchRunner, boundary: bytes, file: Any) -> FormReader:
    """Reads the form and writes its file, no faster than other large bodies are read."""
    settings, store, waiting, size = request.service.settings, runner.store, bytearray(), 0
    form = FormReader(boundary, waiting.extend)
    more = True
    while more:
        try:
            message = await asyncio.wait_for(request.receive(), settings.body_timeout)
        except TimeoutError:
            raise ApiError(408, "the body did not go on in time", code="body_timeout") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk, more = message.get("body", b""), message.get("more_body", False)
        size += len(chunk)
        if store.used + size > store.most_bytes:
            raise ApiError(
                413, f"no room: the server keeps {store.most_bytes} bytes of files, and {store.used} are in use; "
                "delete some", code="storage_full",
            )  # fmt: skip
        form.feed(chunk)
        if len(waiting) >= WRITE or not more:
            await runner.call(file.write, bytes(waiting))
            waiting.clear()
        if more and (pause := request.service.intake.take(len(chunk))):
            await asyncio.sleep(pause)
    request.read_whole()
    form.finish()
    return form


def _check(form: FormReader) -> None:
    if form.filename is None:
        raise InvalidRequest("the form has no part named 'file'", "file")
    purpose = form.fields.pop("purpose", None)
    if purpose != INPUT:
        raise InvalidRequest("purpose must be 'batch': files are for batches here", "purpose")
    if form.fields:
        name = next(iter(form.fields))[:60]
        raise InvalidRequest(f"{name!r} is not done here: files stay until they are deleted", name)


async def list_files(request: Request) -> Response:
    runner, query = runner_of(request), queried(request, *LIST_QUERY)
    limit, order = limit_of(query, MAX_LIST, MAX_LIST), query.get("order", "desc")
    if order not in ("asc", "desc") or query.get("purpose", INPUT) not in (INPUT, OUTPUT):
        raise InvalidRequest(f"order is asc or desc, purpose is {INPUT} or {OUTPUT}", "order")
    owner, purpose, after = owner_of(request.key, None), query.get("purpose"), query.get("after")
    return page_of(
        await runner.call(runner.store.files, owner, purpose, after, limit + 1, order == "asc"), limit
    )


async def one_file(request: Request) -> Response:
    runner = runner_of(request)
    return Reply(await runner.call(runner.store.file, *_named(request)))


async def content(request: Request) -> Response:
    runner = runner_of(request)
    found = await runner.call(runner.store.file, *_named(request))
    return FileResponse(runner.store.folder / found["id"], media_type="application/jsonl")


async def delete_file(request: Request) -> Response:
    runner = runner_of(request)
    await runner.call(runner.store.delete_file, *_named(request))
    return Reply({"id": request.path_params["file_id"], "object": "file", "deleted": True})


def _named(request: Request) -> tuple[str, str]:
    return request.path_params["file_id"], owner_of(request.key, None)


ROUTES = (
    post("/v1/files", upload, None, "Upload a file of requests, as a form.", FileObject, ("file", "purpose")),
    get("/v1/files", list_files, "Your files.", FileList, LIST_QUERY),
    get("/v1/files/{file_id}", one_file, "One of them.", FileObject),
    delete("/v1/files/{file_id}", delete_file, "Delete it.", DeletedFile),
    get("/v1/files/{file_id}/content", content, "Its content."),
)
