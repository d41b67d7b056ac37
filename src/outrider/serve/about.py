"""What the server says of itself: its models, its health, its version, its metrics and its routes."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from outrider import __version__
from outrider.serve.errors import ApiError
from outrider.serve.metrics import PREFIX, UNPAID, metrics_text
from outrider.serve.model_service import ModelService
from outrider.serve.openapi import document
from outrider.serve.page_files import page_file
from outrider.serve.replies import Health, ModelCard, ModelList, Routes, Version
from outrider.serve.request import Reply, Request
from outrider.serve.routes import Endpoint, get
from outrider.serve.service import Service


async def models(request: Request) -> Response:
    """Answers also while models are being loaded."""
    cards = [
        _model_card(request.service, model, name)
        for model in request.service.table.allowed(request.key)
        for name in model.spec.shown_names
    ]
    return Reply({"object": "list", "data": cards})


async def one_model(request: Request) -> Response:
    name = request.path_params["model"]
    return Reply(_model_card(request.service, request.service.table.choose(name, request.key), name))


def _model_card(service: Service, served: ModelService, name: str) -> dict[str, Any]:
    model = served.backend.model
    return {
        "id": name,
        "object": "model",
        "created": int(service.begun),
        "owned_by": "outrider",
        "max_model_len": model.longest if model else None,
        "default_max_tokens": served.answer_tokens if model else None,
        "drafter": model.drafter if model else None,
        "drafters": model.drafters if model else [],
        "chat": bool(model and model.template),
        "state": served.state,
        "progress": served.backend.progress,
        "problem": served.backend.problem or None,
    }


async def health(request: Request) -> Response:
    service = request.service
    if service.draining:
        return _unwell("draining")
    models = service.table.models
    if unwell := service.table.unwell:
        return _unwell("stalled" if unwell.state == "ready" else unwell.state)
    running = [model.metrics for model in models if model.away is None]
    found = {"status": "ok", "prepared": all(metrics.gauges["prepared"] for metrics in running)}
    states = {"models": {model.names[0]: model.state for model in models}} if len(models) > 1 else {}
    unpaid = {drafter: size for model in models for drafter, size in model.metrics.by_drafter[UNPAID].items()}
    return Reply({**found, **states, **({"drafts_that_do_not_pay": unpaid} if unpaid else {})})


def _unwell(state: str) -> Reply:
    error = ApiError(503, f"not ready: {state}", code=state, after=1)
    return Reply({"status": state, **error.body()}, 503, error.headers())


async def version(request: Request) -> Response:
    return Reply({"version": __version__})


async def metrics(request: Request) -> Response:
    service = request.service
    for model in service.table.models:
        if (traffic := model.traffic) is not None:
            model.metrics.traffic(traffic.keeping, traffic.bytes, traffic.counts)
    prefixes = (PREFIX, "vllm:") if service.settings.metrics_compat == "vllm" else (PREFIX,)
    text = metrics_text({model.names[0]: model.metrics for model in service.table.models}, prefixes)
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
