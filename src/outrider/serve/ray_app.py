"""Replicas of models on Ray Serve, behind one address. Needs ray; imported by `outrider deploy` alone.

    client -> Ray's proxy -> Front -> Replica (chosen by PrefixRouter) -> its own server -> its engine

A replica is an actor with a whole server beneath it, so that it answers with the tokens of any single server. Front
checks keys and limits over all replicas. A request of which nothing was sent to the client is tried on another replica
if its own dies; a stream that has begun ends with an error event.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.request_router import RequestRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from outrider.errors import InvalidRequest, OutriderError
from outrider.serve.deploy_settings import DeployPlan, DeploySettings
from outrider.serve.errors import ApiError, from_invalid
from outrider.serve.keys import Key, Keyring, Limiter
from outrider.serve.limits import read_json
from outrider.serve.model_spec import ModelSpec, by_name
from outrider.serve.model_table import choose_position
from outrider.serve.replica import Headers, ReplicaServer
from outrider.serve.replica_route import merged_metrics, prefix_of, ranking
from outrider.serve.settings import ServeSettings

log = logging.getLogger(__name__)

RETRY_SECONDS = 30.0  # a request of which nothing was sent is tried again for so long
RETRY_PAUSE = 0.25  # seconds, times the number of the try
# Codes of a server that cannot take requests now, where another can.
ELSEWHERE = frozenset({"engine_lost", "lost", "loading", "draining", "failed", "stalled", "queue_full"})
UPSCALE_SECONDS, DOWNSCALE_SECONDS = (
    5.0,
    60.0,
)  # how long load must have changed: starting a replica takes seconds
HEALTH_PERIOD, HEALTH_TIMEOUT = 2.0, 10.0  # seconds


class PrefixRouter(RequestRouter):
    """Sends requests with the same prefix to the same replica, and to the next one if that takes no more.

    Hashes of prefix and replica decide. Nothing is remembered, and a replica that comes or goes moves only its own
    conversations.
    """

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        prefix, attempt = "", 0
        if pending_request is not None and len(pending_request.args) >= 2:
            prefix, attempt = pending_request.args[:2]
        ranked = ranking(prefix, attempt, {one.replica_id.unique_id: one for one in candidate_replicas})
        return [[one] for one in ranked]


class Replica:
    """One replica of one model."""

    async def __init__(self, spec: ModelSpec, settings: ServeSettings) -> None:  # type: ignore[misc]  # Ray awaits it
        self.server = ReplicaServer(spec, settings)
        self.name = serve.get_replica_context().replica_id.unique_id
        await self.server.start()

    async def ask(
        self, prefix: str, attempt: int, method: str, path: str, headers: Headers, body: bytes
    ) -> AsyncIterator[Any]:
        """`prefix` and `attempt` are for the router."""
        async for part in self.server.ask(method, path, headers, body):
            yield part

    async def metrics(self) -> tuple[str, str]:
        _, text = await self.server.get("/metrics")
        return self.name, text.decode()

    async def check_health(self) -> None:
        status, body = await self.server.get("/health")
        if status != 200:
            raise RuntimeError(f"the server of a replica is not well: {body[:200]!r}")

    def __del__(self) -> None:
        self.server.stop()


class Front:
    """The address of all models."""

    def __init__(self, table: Sequence[ModelSpec], settings: ServeSettings, *handles: Any) -> None:
        self.table, self.settings, self.handles = table, settings, handles
        self.positions = by_name(table)
        self.keys, self.limiter = Keyring.of(settings), Limiter()

    async def __call__(self, request: Request) -> Response:
        try:
            return await self._answer(request)
        except (ApiError, InvalidRequest) as error:
            return _refusal(error, request.url.path)

    async def _answer(self, request: Request) -> Response:
        path = request.url.path
        if path in ("/health", "/ping"):
            return await self._health()
        key = self.keys.check(request.headers.get("authorization"), request.headers.get("x-api-key"))
        if key is None:
            raise ApiError(401, "a valid API key is needed", code="invalid_api_key")
        if path == "/metrics":
            return Response(await self._metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")
        if path == "/v1/models":
            return await self._models(request, key)
        body = await request.body()
        if len(body) > self.settings.max_body_bytes:
            raise ApiError(
                413, f"the body has more than {self.settings.max_body_bytes} bytes", code="body_too_large"
            )
        asked = read_json(body) if body else {}
        fields = asked if isinstance(asked, dict) else {}
        named = fields.get("model") or request.query_params.get("model")
        name = named if isinstance(named, str) else None
        handle = self.handles[
            choose_position(self.table, self.positions, name, None if self.keys.open else key)
        ]
        return await self._limited(request, handle, key, prefix_of(key, fields), body)

    async def _limited(self, request: Request, handle: Any, key: Key, prefix: str, body: bytes) -> Response:
        """Counts a request against its key over all replicas. Tokens are counted by each replica."""
        if request.method != "POST":
            return await self._proxied(request, handle, prefix, body, lambda: None)
        refusal = self.limiter.count(key) or self.limiter.admit(key, 0)
        if refusal is not None:
            raise ApiError(429, refusal.reason, code="rate_limit_exceeded", after=refusal.seconds)
        try:
            return await self._proxied(request, handle, prefix, body, lambda: self.limiter.done(key))
        except BaseException:
            self.limiter.done(key)
            raise

    async def _proxied(self, request: Request, handle: Any, prefix: str, body: bytes, ended: Any) -> Response:
        """The answer of a replica, tried again elsewhere while nothing of it was sent. Calls `ended` at its end."""
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        question = (request.method, target, list(request.headers.raw), body)
        until = asyncio.get_running_loop().time() + RETRY_SECONDS
        for attempt in range(1 << 16):
            try:
                status, headers, parts = await _begun(handle, prefix, attempt, question)
                streams = any(name == b"content-type" and b"event-stream" in value for name, value in headers)
                if streams and status == 200:
                    return _with_headers(_Stream(_events(parts, request.url.path), status, ended), headers)
                whole = b"".join([part async for part in parts])
            except (
                RayError,
                serve.exceptions.RayServeException,
                ConnectionError,
                StopAsyncIteration,
            ) as problem:
                log.warning("a replica did not answer: %s", str(problem)[:200])
                lost = ApiError(503, "no replica answers now; try again", code="engine_lost", after=5)
                status, headers, whole = 503, [], json.dumps(lost.body()).encode()
            if not (status == 503 and _code(whole) in ELSEWHERE) or asyncio.get_running_loop().time() > until:
                ended()
                return _with_headers(Response(whole, status), headers)
            await asyncio.sleep(min(2.0, RETRY_PAUSE * attempt))
        raise AssertionError

    async def _health(self) -> Response:
        """200 while every model has a replica that takes requests."""
        for spec, handle in zip(self.table, self.handles, strict=True):
            status, _, parts = await _begun(handle, spec.name, 0, ("GET", "/health", [], b""))
            whole = b"".join([part async for part in parts])
            if status != 200:
                return Response(whole, status, media_type="application/json")
        return Response(b'{"status":"ok"}', media_type="application/json")

    async def _models(self, request: Request, key: Key) -> Response:
        data: list[Any] = []
        for spec, handle in zip(self.table, self.handles, strict=True):
            if self.keys.open or key.allows(spec.names):
                question = ("GET", "/v1/models", list(request.headers.raw), b"")
                _, _, parts = await _begun(handle, spec.name, 0, question)
                data += json.loads(b"".join([part async for part in parts])).get("data", [])
        return Response(json.dumps({"object": "list", "data": data}), media_type="application/json")

    async def _metrics(self) -> str:
        found: list[tuple[str, str]] = []
        for handle in self.handles:
            found += await handle.broadcast("metrics").results_async()
        return merged_metrics(found)


async def _begun(
    handle: Any, prefix: str, attempt: int, question: tuple[str, str, Headers, bytes]
) -> tuple[int, Headers, AsyncIterator[bytes]]:
    """Status, headers and body of a replica's answer, once its first part is there."""
    parts = aiter(handle.options(stream=True).ask.remote(prefix, attempt, *question))
    status, headers = await anext(parts)
    return status, headers, parts


class _Stream(StreamingResponse):
    """Calls `ended` at its end, also where the client hung up before anything was sent."""

    def __init__(self, events: AsyncIterator[bytes], status: int, ended: Callable[[], None]) -> None:
        super().__init__(events, status)
        self._ended = ended

    async def __call__(self, *scope: Any) -> None:
        try:
            await super().__call__(*scope)
        finally:
            self._ended()


async def _events(parts: AsyncIterator[bytes], path: str) -> AsyncIterator[bytes]:
    """A stream as it comes. If its replica dies, the client gets an error event: part of the answer is sent, and
    another replica would begin anew.
    """
    try:
        async for part in parts:
            yield part
    except (RayError, serve.exceptions.RayServeException, ConnectionError) as problem:
        log.warning("a replica was lost within a stream: %s", str(problem)[:200])
        error = ApiError(
            503, "the replica that answered was lost; send the request again", code="replica_lost"
        )
        yield _error_event(error, path)


def _error_event(error: ApiError, path: str) -> bytes:
    """As the clients of the route know it."""
    if path.startswith("/v1/messages"):
        return b"event: error\ndata: " + json.dumps(error.anthropic_body()).encode() + b"\n\n"
    body = {**error.body()["error"], "type": "error"} if path.startswith("/v1/responses") else error.body()
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def _with_headers(response: Response, headers: Headers) -> Response:
    kept = [(name, value) for name, value in headers if name != b"content-length"]
    own = [pair for pair in response.raw_headers if pair[0] == b"content-length"]
    response.raw_headers = [*kept, *own] if headers else response.raw_headers
    return response


def _refusal(error: ApiError | InvalidRequest, path: str) -> Response:
    known = from_invalid(error) if isinstance(error, InvalidRequest) else error
    body = known.anthropic_body() if path.startswith("/v1/messages") else known.body()
    return Response(json.dumps(body), known.status, known.headers(), media_type="application/json")


def _code(body: bytes) -> str | None:
    try:
        found = json.loads(body)
        return str(found["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return None


def application(plan: DeployPlan) -> Any:
    """The Ray Serve application of a plan."""
    handles = [
        serve.deployment(Replica)
        .options(name=f"model-{position}-{spec.name}".replace("/", "_"), **_replica_options(how, plan.serve))
        .bind(spec, plan.serve)
        for position, (spec, how) in enumerate(plan.models)
    ]
    front = serve.deployment(Front).options(
        name="front",
        num_replicas=1,  # it counts what keys use
        max_ongoing_requests=plan.serve.max_connections,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=plan.serve.drain_seconds,
    )
    return front.bind(plan.table, plan.serve, *handles)


def _replica_options(how: DeploySettings, settings: ServeSettings) -> dict[str, Any]:
    options: dict[str, Any] = {
        "max_ongoing_requests": how.replica_requests,
        "ray_actor_options": {"num_cpus": how.replica_cpus, "num_gpus": how.replica_gpus},
        "request_router_config": RequestRouterConfig(request_router_class=PrefixRouter),
        "graceful_shutdown_timeout_s": settings.drain_seconds + HEALTH_TIMEOUT,
        "health_check_period_s": HEALTH_PERIOD,
        "health_check_timeout_s": HEALTH_TIMEOUT,
    }
    if how.max_replicas == how.min_replicas:
        return {**options, "num_replicas": how.min_replicas}
    scaling = AutoscalingConfig(
        min_replicas=how.min_replicas,
        max_replicas=how.max_replicas,
        target_ongoing_requests=how.target_requests,
        upscale_delay_s=UPSCALE_SECONDS,
        downscale_delay_s=DOWNSCALE_SECONDS,
        look_back_period_s=UPSCALE_SECONDS,
    )
    return {**options, "autoscaling_config": scaling}


def run_application(app: Any, settings: ServeSettings) -> None:
    """Serves on this cluster until it is asked to stop; without a cluster, on one of this machine alone."""
    serve.start(http_options={"host": settings.host, "port": settings.port})
    try:
        serve.run(app, name="outrider", route_prefix="/")
    except RuntimeError as problem:
        raise OutriderError(f"{problem} The lines above say why.") from None


def stop() -> None:
    """Ends the application; running requests may end first."""
    serve.shutdown()
