"""What the server says of itself: its models, its health, its version, its metrics and its routes."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from outrider import __version__
from outrider.errors import LONGEST_NAME
from outrider.serve.errors import ApiError
from outrider.serve.metrics import PREFIX, UNPAID
from outrider.serve.openapi import document
from outrider.serve.page_files import page_file
from outrider.serve.replies import Health, ModelCard, ModelList, Routes, Version
from outrider.serve.request import Reply, Request
from outrider.serve.routes import Endpoint, get
from outrider.serve.service import Service


async def models(request: Request) -> Response:
    """Answers also while the model is being loaded."""
    service = request.service
    shown = service.names[:2] if service.settings.served_name else service.names[:1]
    return Reply({"object": "list", "data": [_model_card(service, name) for name in shown]})


async def one_model(request: Request) -> Response:
    name = request.path_params["model"]
    if name not in request.service.names:
        raise ApiError(
            404,
            f"the model {name[:LONGEST_NAME]!r} is not served here",
            param="model",
            code="model_not_found",
        )
    return Reply(_model_card(request.service, name))


def _model_card(service: Service, name: str) -> dict[str, Any]:
    model = service.backend.model
    return {
        "id": name,
        "object": "model",
        "created": int(service.begun),
        "owned_by": "outrider",
        "max_model_len": model.longest if model else None,
        "default_max_tokens": service.answer_tokens if model else None,
        "drafter": model.drafter if model else None,
        "drafters": model.drafters if model else [],
        "chat": bool(model and model.template),
    }


async def health(request: Request) -> Response:
    service = request.service
    if service.draining:
        return _unwell("draining")
    if not service.backend.well:
        return _unwell("stalled" if service.backend.state == "ready" else service.backend.state)
    metrics = service.metrics
    found = {"status": "ok", "prepared": bool(metrics.gauges["prepared"])}
    unpaid = metrics.by_drafter[UNPAID]
    return Reply({**found, **({"drafts_that_do_not_pay": unpaid} if unpaid else {})})


def _unwell(state: str) -> Reply:
    error = ApiError(503, f"not ready: {state}", code=state, after=1)
    return Reply({"status": state, **error.body()}, 503, error.headers())


async def version(request: Request) -> Response:
    return Reply({"version": __version__})


async def metrics(request: Request) -> Response:
    service = request.service
    if (traffic := service.traffic) is not None:
        service.metrics.traffic(traffic.keeping, traffic.bytes, traffic.counts)
    prefixes = (PREFIX, "vllm:") if service.settings.metrics_compat == "vllm" else (PREFIX,)
    text = service.metrics.text(service.names[0], prefixes)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def openapi(request: Request) -> Response:
    return Reply(document(_routes(request)))


async def root(request: Request) -> Response:
    if request.from_browser:
        return page_file(request, "index.html")
    plain = sorted(route.path for route in _routes(request) if not route.param_convertors)
    return Reply({"name": "outrider", "version": __version__, "routes": plain})


def _routes(request: Request) -> tuple[Endpoint, ...]:
    return tuple(request.app.routes)


ROUTES = (
    get("/v1/models", models, "What is served.", ModelList),
    get("/v1/models/{model:path}", one_model, "One of them.", ModelCard),
    get("/health", health, "200 when requests are taken, else 503.", Health),
    get("/ping", health, "The same.", Health),
    get("/version", version, "The version.", Version),
    get("/metrics", metrics, "Counters for Prometheus."),
    get("/openapi.json", openapi, "This document."),
    get("/", root, "The routes; in a browser, the page.", Routes),
)
