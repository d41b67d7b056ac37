"""How an endpoint is declared: its path, the function that answers, and what the OpenAPI document says of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from outrider.serve.request import Request

Handler = Callable[[Request], Awaitable[Response]]
Body = type[msgspec.Struct] | None


class Endpoint(Route):
    """A route whose handler is given the request that host_check.py began, with its id and its key."""

    def __init__(
        self,
        method: str,
        path: str,
        handler: Handler,
        summary: str,
        body: Body = None,
        reply: Body = None,
        query: tuple[str, ...] = (),
        form: tuple[str, ...] = (),
    ) -> None:
        """`reply`: the answer's shape, where it is JSON and always the same. `query`: names of its parameters. `form`:
        fields of a body that is a form; `file` is bytes.
        """
        super().__init__(path, handler, methods=[method])
        self.method, self.handler, self.summary, self.body, self.reply = method, handler, summary, body, reply
        self.query, self.form = query, form
        self.app = self._answer

    __hash__ = object.__hash__  # Starlette's has none

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self.handler(scope["request"])
        await response(scope, receive, send)


def get(
    path: str, handler: Handler, summary: str, reply: Body = None, query: tuple[str, ...] = ()
) -> Endpoint:
    return Endpoint("GET", path, handler, summary, None, reply, query)


def delete(path: str, handler: Handler, summary: str, reply: Body = None) -> Endpoint:
    return Endpoint("DELETE", path, handler, summary, None, reply)


def post(
    path: str, handler: Handler, body: Body, summary: str, reply: Body = None, form: tuple[str, ...] = ()
) -> Endpoint:
    return Endpoint("POST", path, handler, summary, body, reply, form=form)
