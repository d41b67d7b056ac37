"""`/v1/draft`: which draft is in use, another one in its place, and the one before again. For those who run the server.

Who that is: a key marked `admin`; where there are no keys, programs of this machine. Drafts come from beneath the
folders that the server was started with, and from nowhere else.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any

import msgspec
from starlette.responses import Response

from outrider.errors import LONGEST_NAME
from outrider.serve.errors import ApiError
from outrider.serve.link import ServedDraft
from outrider.serve.model_service import ModelService
from outrider.serve.replies import DraftList
from outrider.serve.request import Reply, Request
from outrider.serve.routes import get, post

FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")  # sent by a proxy, for another client


class SwapRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    path: str
    model: str | None = None


class RollbackRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An empty object, or the model whose draft is meant."""

    model: str | None = None


async def show(request: Request) -> Response:
    check_admin(request)
    return Reply(_all(request))


async def swap(request: Request) -> Response:
    check_admin(request)
    asked = await request.read(SwapRequest)
    path = await request.in_pool(draft_beneath, asked.path, request.chosen.settings.draft_folders)
    try:
        await request.chosen.swap_draft(path)
    except ApiError as error:
        error.message, error.path = error.message.replace(str(path), "{path}"), asked.path
        raise
    return Reply(_all(request))


async def rollback(request: Request) -> Response:
    check_admin(request)
    await request.read(RollbackRequest)
    await request.chosen.swap_draft(None)
    return Reply(_all(request))


def check_admin(request: Request) -> None:
    if request.key is not None and not request.key.admin:
        raise ApiError(
            403,
            "this needs a key that is marked for it: outrider keys add NAME --admin, in the server's key file",
            code="not_admin",
        )
    if request.key is None and not (_is_local(request) and not any(h in request.headers for h in FORWARDED)):
        raise ApiError(
            403,
            "without keys only programs of the server's own machine may do this; give the server a key file",
            code="not_admin",
        )


def _is_local(request: Request) -> bool:
    try:
        address = ipaddress.ip_address(request.client.host if request.client else "")
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def draft_beneath(given: str, folders: tuple[str, ...]) -> Path:
    """The folder that is meant, links followed: one of a folder of drafts, by its name there or by its whole path."""
    if not folders:
        raise ApiError(
            403,
            "no draft can be swapped: start the server with --draft-folder DIR, the folder that holds drafts",
            code="not_allowed",
        )
    try:
        for folder in folders:
            within = Path(folder).expanduser().resolve()
            path = (within / given).resolve()
            if path != within and path.is_relative_to(within) and path.is_dir():
                return path
    except (OSError, ValueError, RuntimeError):  # a null byte, a circle of links
        pass
    raise ApiError(
        404,
        "there is no folder {path} beneath those that the server was started with (--draft-folder)",
        param="path",
        code="draft_not_found",
        path=given[:LONGEST_NAME],
    )


def _all(request: Request) -> dict[str, Any]:
    models = request.service.table.allowed(request.key)
    shown = [_one(model, draft) for model in models for draft in model.backend.swaps.drafts.values()]
    return {"object": "list", "data": shown}


def _one(model: ModelService, draft: ServedDraft) -> dict[str, Any]:
    swaps, by_drafter = model.backend.swaps, model.metrics.by_drafter
    card = swaps.cards.get(draft.drafter)
    recent = {}
    for name in ("acceptance", "target_probability"):  # alone, or merged with others
        known = by_drafter[f"spec_decode_recent_{name}"].items()
        recent[name] = next((value for one, value in known if draft.drafter in one.split("+")), None)
    return {
        "object": "draft",
        "model": model.names[0],
        **msgspec.to_builtins(draft),
        **recent,
        "card": None if card is None else card.as_json(),
    }


ROUTES = (
    get("/v1/draft", show, "The draft in use. For admin keys.", DraftList),
    post(
        "/v1/draft/swap",
        swap,
        SwapRequest,
        "Use another draft, from the next step on. For admin keys.",
        DraftList,
    ),
    post(
        "/v1/draft/rollback",
        rollback,
        RollbackRequest,
        "Use the draft before again. For admin keys.",
        DraftList,
    ),
)
