"""What every request passes on its way in and out: it is recorded; its host, its page's origin and its key are
checked. Plain ASGI, so that a stream of events passes through untouched.
"""

from __future__ import annotations

import logging
import time

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.errors import LONGEST_NAME
from outrider.serve.errors import ApiError
from outrider.serve.request import ClientGone, Request, refusal
from outrider.serve.service import Service

log = logging.getLogger(__name__)

OPEN = frozenset({"/health", "/ping"})  # need no key: monitors have none
PAGES = frozenset({"/", "/docs"})  # nor do these in a browser: the page asks for a key itself
QUIET = OPEN | {"/v1/live"}  # asked for again and again: logged only for those who debug
# Of a page of an allowed origin; the last three are what Anthropic's SDK sends from a browser.
ALLOWED_HEADERS = (
    *("authorization", "content-type", "x-request-id", "x-api-key"),
    *("anthropic-version", "anthropic-beta", "anthropic-dangerous-direct-browser-access"),
)
MAX_HEADER_BYTES = 64 << 10
ONCE = frozenset({b"authorization", b"content-length", b"content-type", b"host", b"origin", b"x-api-key"})


class Recorder:
    """Begins a request and ends it: an id for it, a line of the log, a count, and what it held given back."""

    def __init__(self, app: ASGIApp, service: Service, paths: frozenset[str]) -> None:
        self.app, self.service, self.paths = app, service, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"].endswith("/") and scope["path"][:-1] in self.paths:
            scope["path"] = scope["path"][:-1]
        request = scope["request"] = Request(scope, receive, self.service)
        status = 499  # the client was gone before an answer began

        async def mark(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = [(b"x-request-id", request.id.encode()), (b"x-content-type-options", b"nosniff")]
                if request.for_anthropic:
                    own.append((b"request-id", request.id.encode()))
                message["headers"] = [*message["headers"], *own]
                # What is left of an unread body would be taken for a request; a server that leaves wants no more.
                if request.unread or self.service.draining:
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        try:
            await self.app(scope, receive, mark)
        except ClientGone:
            request.metrics.count("client_disconnects")
            request.facts["error"] = "the client hung up"
        except Exception:
            log.exception("a request failed", extra={"facts": {"id": request.id, "path": request.path}})
            begun, status = status != 499, 500
            if not begun:
                await refusal(_unexpected(), request)(scope, receive, mark)
        finally:
            request.settle()
            self._record(request, status)

    def _record(self, request: Request, status: int) -> None:
        route = request.path if request.path in self.paths else "other"
        request.metrics.count("http_requests", route=route, status=str(status))
        facts = {
            "method": request.method,
            "path": request.path[:200],
            "status": status,
            "ms": round(1000 * (time.perf_counter() - request.arrived), 1),
            "id": request.id,
            "peer": request.client.host if request.client else "",
            **({"key": request.key.name} if request.key else {}),
            **request.facts,
        }
        level = logging.DEBUG if request.path in QUIET else logging.INFO
        log.log(level, "request", extra={"facts": facts})


def _unexpected() -> ApiError:
    return ApiError(500, "something went wrong here; the server's log has more", code="internal_error")


class HostCheck:
    """Refuses other hosts and pages of other origins. Where the operator allows an origin, its pages may also read."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.settings = app, service.settings
        self.shared = CORSMiddleware(
            app,
            allow_origins=service.settings.cors_origins,
            allow_methods=("GET", "POST", "DELETE", "OPTIONS"),
            allow_headers=ALLOWED_HEADERS,
            expose_headers=("x-request-id", "request-id", "retry-after"),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request: Request = scope["request"]
        origin, host = request.headers.get("origin"), request.headers.get("host")
        if wrong := _wrong_headers(scope["headers"]):
            await refusal(wrong, request)(scope, receive, send)
        elif not self.settings.accepts_host(host):
            await refusal(_other_host(host or ""), request)(scope, receive, send)
        elif origin is not None and self.shared.is_allowed_origin(origin):
            await self._share(request, scope, receive, send)
        elif not self._accepts_origin(request, origin):
            await refusal(_other_origin(origin or ""), request)(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _share(self, request: Request, scope: Scope, receive: Receive, send: Send) -> None:
        if request.method == "OPTIONS" and "access-control-request-method" in request.headers:
            response = self.shared.preflight_response(request.headers)
            if response.status_code >= 400:
                request.facts["error"] = bytes(response.body).decode()
            await response(scope, receive, send)
        else:
            await self.shared(scope, receive, send)

    def _accepts_origin(self, request: Request, origin: str | None) -> bool:
        """A browser says which page asks. Another site's page could not read the answer, but it could have a
        local server without keys work for nothing.
        """
        if origin is None or request.method in ("GET", "HEAD"):
            return True
        same = origin.partition("://")[2] == request.headers.get("host")
        return same or any(name in request.headers for name in ("authorization", "x-api-key"))


def _wrong_headers(headers: list[tuple[bytes, bytes]]) -> ApiError | None:
    """Headers that are too long, or of which two would be a riddle: which one counts?"""
    if sum(len(name) + len(value) + 4 for name, value in headers) > MAX_HEADER_BYTES:
        return ApiError(
            431, f"the headers are longer than {MAX_HEADER_BYTES} bytes", code="headers_too_large"
        )
    seen: set[bytes] = set()
    for name, _ in headers:
        if name in ONCE:
            if name in seen:
                return ApiError(
                    400, f"two {name.decode()} headers were sent; send one", code="duplicate_header"
                )
            seen.add(name)
    if b"content-length" in seen and any(name == b"transfer-encoding" for name, _ in headers):
        return ApiError(
            400, "content-length and transfer-encoding were sent; send one of them", code="duplicate_header"
        )  # a proxy may go by the other one, and take part of this body for a request
    return None


def _other_host(host: str) -> ApiError:
    name = host[:LONGEST_NAME].rpartition(":")[0] or host[:LONGEST_NAME]
    method = f"start the server with --allowed-host {name}" if name else "send a Host header"
    return ApiError(
        403, f"the host {name!r} is not served here; to serve it, {method}", code="host_not_allowed"
    )


def _other_origin(origin: str) -> ApiError:
    said = origin[:LONGEST_NAME]
    return ApiError(
        403, f"pages of {said} are not served; to serve them, start the server with --cors-origin {said}",
        code="origin_not_allowed",
    )  # fmt: skip


def _needs_no_key(request: Request) -> bool:
    path = request.path
    return path in OPEN or path.startswith("/page/") or (path in PAGES and request.from_browser)


class KeyCheck:
    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request: Request = scope["request"]
        keys = self.service.keys
        if not (keys.open or _needs_no_key(request)):
            request.key = keys.check(request.headers.get("authorization"), request.headers.get("x-api-key"))
            if request.key is None:
                wrong = ApiError(401, "a valid API key is needed", code="invalid_api_key")
                await refusal(wrong, request)(scope, receive, send)
                return
        await self.app(scope, receive, send)
