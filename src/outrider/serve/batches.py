"""`/v1/batches`: many requests in a file, answered when no other request waits, as OpenAI's clients ask for it."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from outrider.errors import InvalidRequest
from outrider.serve.batch_run import HANDLERS
from outrider.serve.files import limit_of, page_of, queried, runner_of
from outrider.serve.replies import BatchList, BatchObject
from outrider.serve.request import Reply, Request
from outrider.serve.routes import get, post
from outrider.serve.service import owner_of

MAX_LIST = 100
MAX_METADATA, LONGEST_NAME, LONGEST_VALUE = 16, 64, 512  # entries, and characters of each


class BatchRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


async def create(request: Request) -> Response:
    runner = runner_of(request)
    asked = await request.read(BatchRequest, counted=True)
    if asked.endpoint not in HANDLERS:
        raise InvalidRequest(f"endpoint must be one of {', '.join(HANDLERS)}", "endpoint")
    if asked.completion_window != "24h":
        raise InvalidRequest("completion_window must be '24h'", "completion_window")
    named = asked.metadata or {}
    if len(named) > MAX_METADATA or any(
        len(n) > LONGEST_NAME or len(v) > LONGEST_VALUE for n, v in named.items()
    ):
        raise InvalidRequest(
            f"at most {MAX_METADATA} entries, of {LONGEST_NAME} and {LONGEST_VALUE} characters", "metadata"
        )
    owner = owner_of(request.key, None)
    made = await runner.call(runner.store.create, owner, asked.input_file_id, asked.endpoint, asked.metadata)
    runner.wake.set()
    return Reply(made)


async def list_batches(request: Request) -> Response:
    runner, query = runner_of(request), queried(request, "limit", "after")
    limit = limit_of(query, 20, MAX_LIST)
    owner = owner_of(request.key, None)
    return page_of(await runner.call(runner.store.batches, owner, query.get("after"), limit + 1), limit)


async def one_batch(request: Request) -> Response:
    runner = runner_of(request)
    return Reply(await runner.call(runner.store.batch, *_named(request)))


async def cancel(request: Request) -> Response:
    runner = runner_of(request)
    found = await runner.call(runner.store.cancel, *_named(request))
    runner.wake.set()
    return Reply(found)


def _named(request: Request) -> tuple[str, str]:
    return request.path_params["batch_id"], owner_of(request.key, None)


ROUTES = (
    post(
        "/v1/batches", create, BatchRequest, "Answer a file of requests, behind other requests.", BatchObject
    ),
    get("/v1/batches", list_batches, "Your batches.", BatchList, ("limit", "after")),
    get("/v1/batches/{batch_id}", one_batch, "One of them.", BatchObject),
    post("/v1/batches/{batch_id}/cancel", cancel, None, "Begin no further line of it.", BatchObject),
)
