"""Errors as OpenAI's clients know them: a status, and `{"error": {"message", "type", "param", "code"}}`.

On the routes of Anthropic's Messages they look as its clients expect: the same fields, other types, more around them.
"""

from __future__ import annotations

import math
from typing import Any

from outrider.errors import InvalidRequest
from outrider.serve.limits import clean_error, clean_line

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
LONGEST_PATH = 120  # characters of one that are repeated
LONGEST_LOGGED = 300  # characters of a reason in the log
RETRY = frozenset({408, 409, 429, 503, 504})  # what may go better next time


class ApiError(Exception):
    """An answer with an error status. `after`: seconds until it may try again."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        after: float | None = None,
        path: str | None = None,
    ) -> None:
        """`path`: of this server, written where the message says {path}; other paths are hidden from clients."""
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.after, self.path = after, path

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error")
        message = clean_error(self.message)
        if self.path is not None:
            message = message.replace("{path}", clean_line(self.path)[:LONGEST_PATH])
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def facts(self) -> dict[str, str]:
        """The reason for the log: as the client gets it, and no longer than a line should be."""
        said = {"error": self.body()["error"]["message"], "code": self.code, "param": self.param}
        return {name: clean_line(text)[:LONGEST_LOGGED] for name, text in said.items() if text}

    def anthropic_body(self, request_id: str | None = None) -> dict[str, Any]:
        inner = self.body()["error"]
        inner["type"] = ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        return {"type": "error", "error": inner, **({"request_id": request_id} if request_id else {})}

    def headers(self) -> dict[str, str]:
        """Hints that OpenAI's clients read before they try again."""
        headers = {"x-should-retry": "true" if self.status in RETRY else "false"}
        if self.status == 431:
            headers["connection"] = "close"  # a client that sends such headers is not waited for
        if self.after is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.after)))
            headers["retry-after-ms"] = str(max(1, math.ceil(self.after * 1000)))
        return headers


def from_invalid(error: InvalidRequest) -> ApiError:
    code = "context_length_exceeded" if "maximum context length" in str(error) else None
    return ApiError(400, str(error), param=error.param, code=code)
