"""The ASGI application: the endpoints' routes, what stands before them, and how errors look."""

from __future__ import annotations

import difflib
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import Response

from outrider.errors import InvalidRequest
from outrider.serve import (
    about,
    batches,
    catalogue,
    chat,
    completions,
    draft,
    files,
    live,
    messages,
    page_files,
    responses,
    tokens,
)
from outrider.serve.batch_run import BatchRunner
from outrider.serve.errors import LONGEST_PATH, ApiError
from outrider.serve.host_check import HostCheck, KeyCheck, Recorder
from outrider.serve.not_served import not_served
from outrider.serve.request import refusal
from outrider.serve.service import Service

ROUTES = (
    *chat.ROUTES,
    *completions.ROUTES,
    *responses.ROUTES,
    *messages.ROUTES,
    *tokens.ROUTES,
    *draft.ROUTES,
    *live.ROUTES,
    *files.ROUTES,
    *batches.ROUTES,
    *catalogue.ROUTES,
    *page_files.ROUTES,
    *about.ROUTES,
)
PATHS = frozenset(route.path for route in ROUTES if not route.param_convertors)


class App(Starlette):
    def __init__(self, service: Service, batches: BatchRunner | None = None) -> None:
        """`batches`: where the server keeps files and batches."""
        super().__init__(
            routes=ROUTES,
            middleware=[
                Middleware(Recorder, service=service, paths=PATHS),
                Middleware(HostCheck, service=service),
                Middleware(KeyCheck, service=service),
            ],
            exception_handlers={ApiError: _refused, InvalidRequest: _refused, HTTPException: _unrouted},
        )
        self.router.redirect_slashes = False
        self.service, self.batches = service, batches


async def _refused(request: Any, error: Any) -> Response:
    return refusal(error, request.scope["request"])


async def _unrouted(request: Any, error: Any) -> Response:
    path = request.scope["path"]
    own = request.scope["request"]
    if error.status_code == 404:
        if why := not_served(path):
            return refusal(ApiError(404, why, code="not_supported"), own)
        wrong = ApiError(404, f"there is no {{path}}{_near(path)}", code="not_found", path=path)
        return refusal(wrong, own)
    takes = ", ".join(route.method for route in ROUTES if route.path_regex.match(path))
    response = refusal(ApiError(405, f"{{path}} takes {takes}", code="method_not_allowed", path=path), own)
    response.headers["allow"] = takes
    return response


def _near(path: str) -> str:
    if path in ("/completion", "/completions", "/infill", "/generate"):
        return "; use /v1/completions"
    if path.startswith("/v1/v1/"):
        return ": the client adds /v1 itself, so leave it out of the base URL"
    if f"/v1{path}" in PATHS:
        return f": did you mean /v1{path}? The base URL of clients ends in /v1"
    close = difflib.get_close_matches(path[:LONGEST_PATH], PATHS, n=1, cutoff=0.8)
    return f"; did you mean {close[0]}?" if close else "; GET / lists the routes"
