"""`/v1/pairs`: drafts made for a target, with their cards. `/v1/what-if`: what drafting would bring, from numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from outrider.errors import InvalidRequest
from outrider.load.pairs import list_pairs
from outrider.serve.request import Reply, Request
from outrider.serve.routes import get
from outrider.settings import cache_folder

PRICE = "price_per_hour"
QUERY = ("acceptance", "depth", "cost", "batch", "rows", "experts", "dense", "tok_s", PRICE)


class PairReply(msgspec.Struct, kw_only=True):
    name: str
    source: str  # shipped, added, or named by OUTRIDER_PAIRS
    in_use: bool
    ratio: float | None  # the target's parameters over the draft's
    accept_rate: float | None
    effective_accept_rate: float | None
    tokens_per_step: float | None
    expected_speedup: float | None
    speedup: float | None
    card: dict[str, Any]


class PairsReply(msgspec.Struct, kw_only=True):
    object: str
    data: list[PairReply]


class WhatIfRow(msgspec.Struct, kw_only=True):
    """At the depth asked for, else at the best one. Prices are there where `price_per_hour` was given."""

    batch: int
    depth: int
    tokens_per_step: float
    speedup: float
    step: float  # its time against a plain one
    break_even: float | None  # acceptance, equal at every depth
    best_depth: int  # 0: no draft is best
    best_speedup: float
    by_depth: list[float]  # speed-ups of depth 1, 2, ...
    plain_per_million: float | msgspec.UnsetType = msgspec.UNSET
    per_million: float | msgspec.UnsetType = msgspec.UNSET
    saving: float | msgspec.UnsetType = msgspec.UNSET


class WhatIfReply(msgspec.Struct, kw_only=True):
    object: str
    data: list[WhatIfRow]


async def pairs(request: Request) -> Response:
    loaded = [model.backend.model for model in request.service.table.models]
    used = {model.plan.get("pair") for model in loaded if model}
    found, _ = await request.service.pool.run(list_pairs, cache_folder())
    shown = [{**pair.as_json(), "in_use": pair.name in used} for pair in found]
    return Reply({"object": "list", "data": shown})


async def what_if(request: Request) -> Response:
    given = request.query_params.multi_items()
    if len(given) != len(request.query_params):
        raise InvalidRequest("what-if: a field is given twice", "what_if")
    return Reply({"object": "list", "data": await request.service.pool.run(_answer, dict(given))})


def _answer(given: Mapping[str, str]) -> list[dict[str, Any]]:
    from outrider.draft.what_if import WhatIf, number  # numpy comes with it, on the first such request

    numbers = {name: value for name, value in given.items() if name != PRICE}
    return WhatIf.of_fields(numbers).answer(number(given[PRICE], PRICE) if PRICE in given else None)


ROUTES = (
    get("/v1/pairs", pairs, "Drafts that are paired with a model, with their cards.", PairsReply),
    get("/v1/what-if", what_if, "What drafting would bring, from numbers alone.", WhatIfReply, QUERY),
)
