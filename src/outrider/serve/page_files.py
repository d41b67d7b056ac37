"""The page for browsers: `/` and `/docs`, and the files in `page/` that they load. Everything it shows comes of the
API, with the key that the user types in; the files themselves are the same for everybody and need none.

Scripts and styles come from this server alone, and none stands in a page itself: what a model writes cannot run.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from starlette.responses import Response

from outrider.serve.errors import ApiError
from outrider.serve.request import Request
from outrider.serve.routes import get

FOLDER = Path(__file__).parent / "page"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "img", "connect")),
        *(f"{kind} 'none'" for kind in ("base-uri", "form-action", "frame-ancestors")),
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
    "vary": "accept",
}


@cache
def contents(name: str) -> tuple[bytes, str] | None:
    """A file of the page and its tag; None if there is no such file."""
    known = {file.name: file for file in FOLDER.iterdir() if file.suffix in KINDS}
    if name not in known:
        return None
    data = known[name].read_bytes()
    return data, f'"{hashlib.sha256(data).hexdigest()[:16]}"'


def page_file(request: Request, name: str) -> Response:
    found = contents(name)
    if found is None:
        raise ApiError(404, "the page has no such file", code="not_found")
    data, tag = found
    headers = {**HEADERS, "etag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(data, headers=headers, media_type=KINDS[Path(name).suffix])


async def one_file(request: Request) -> Response:
    return page_file(request, request.path_params["file"])


async def docs(request: Request) -> Response:
    return page_file(request, "docs.html")


ROUTES = (
    get("/docs", docs, "The API for people to read, made from /openapi.json."),
    get("/page/{file}", one_file, "A file that the page loads."),
)
