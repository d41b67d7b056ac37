"""`/v1/live`: what the server does now, as JSON, for the page's charts and for any client that polls.

It reads the counters of metrics.py and asks the engine nothing. Counters only grow: a client takes differences.
"""

from __future__ import annotations

import os
import time

import msgspec
from starlette.responses import Response

from outrider.control.reasons import KINDS
from outrider.errors import InvalidRequest, brief
from outrider.serve.metrics import SECONDS, Metrics
from outrider.serve.model_service import ModelService
from outrider.serve.request import Reply, Request
from outrider.serve.routes import get
from outrider.serve.service import Service
from outrider.settings import family_seconds, others_seconds

QUERY = ("model",)


class LiveDecision(msgspec.Struct, kw_only=True):
    """How often the planner decided for this reason, what it means, and the latest one with its numbers."""

    count: int
    meaning: str
    latest: str | None


class LiveDrafter(msgspec.Struct, kw_only=True):
    """Drafts with a token at depth 1, 2, ..., and those accepted there. Recent rates against those of the card."""

    drafts: list[int]
    accepted: list[int]
    recent_acceptance: float | None
    card_acceptance: float | None
    recent_target_probability: float | None
    card_target_probability: float | None


class Live(msgspec.Struct, kw_only=True):
    time: float  # seconds since 1970
    uptime_seconds: float
    other_programs_seconds: (
        float | None
    )  # of processor time, since the machine's start; null where it is not known
    model: str
    models: list[str]  # that can be asked for with ?model=NAME
    ready: bool
    prepared: bool
    running: int
    waiting: int
    steps: int
    prompt_tokens: int
    generation_tokens: int
    tokens_per_second: float  # of recent steps that only decoded
    plain_tokens_per_second: float  # what plain decoding is measured to make of the same steps
    speedup: float  # since the start; 0: nothing was decoded yet
    recent_speedup: float
    tokens_per_step: float
    kv_cache_usage: float
    preemptions: int
    decisions: dict[str, LiveDecision]
    drafters: dict[str, LiveDrafter]
    token_seconds: list[float]  # upper bounds of the times between tokens that are counted next
    token_counts: list[int]  # one more: the last has no bound


async def live(request: Request) -> Response:
    table, given = request.service.table, request.query_params
    if unknown := sorted(set(given) - {*QUERY}):
        raise InvalidRequest(f"live: unknown field {brief(unknown[0])}; it takes a model", "model")
    model = table.choose(given.get("model"), request.key)
    return Reply(snapshot(request.service, model, [one.names[0] for one in table.allowed(request.key)]))


def snapshot(service: Service, model: ModelService, models: list[str]) -> Live:
    metrics, gauges, now = model.metrics, model.metrics.gauges, time.time()
    return Live(
        time=now,
        uptime_seconds=now - service.begun,
        other_programs_seconds=_others(service),
        model=model.names[0],
        models=models,
        ready=model.usable and not service.draining,
        prepared=bool(gauges["prepared"]),
        running=int(gauges["num_requests_running"]),
        waiting=int(gauges["num_requests_waiting"]),
        **{name: int(metrics.counters[name][()]) for name in ("steps", "prompt_tokens", "generation_tokens")},
        tokens_per_second=gauges["tokens_per_second"],
        plain_tokens_per_second=gauges["plain_tokens_per_second"],
        speedup=gauges["spec_decode_speedup"],
        recent_speedup=gauges["spec_decode_recent_speedup"],
        tokens_per_step=gauges["spec_decode_tokens_per_step"],
        kv_cache_usage=gauges["kv_cache_usage_perc"],
        preemptions=int(metrics.counters["num_preemptions"][()]),
        decisions=_decisions(metrics),
        drafters=_drafters(metrics),
        token_seconds=list(SECONDS),
        token_counts=list(metrics.histograms["inter_token_latency_seconds"].counts),
    )


def _others(service: Service) -> float | None:
    """Never less than before: the machine and its processes are counted in ticks that end at different times."""
    seconds = others_seconds(family_seconds(os.getpid()))
    if seconds is not None:
        seconds = service.others_seconds = max(service.others_seconds, seconds)
    return seconds


def _decisions(metrics: Metrics) -> dict[str, LiveDecision]:
    counts = {labels[0][1]: int(count) for labels, count in metrics.counters["planner_decisions"].items()}
    return {
        kind: LiveDecision(count=count, meaning=KINDS.get(kind, kind), latest=metrics.said.get(kind))
        for kind, count in counts.items()
    }


def _drafters(metrics: Metrics) -> dict[str, LiveDrafter]:
    drafts, accepted = (_by_depth(metrics, counter) for counter in ("drafts", "accepted"))
    rates = ("recent_acceptance", "card_acceptance", "recent_target_probability", "card_target_probability")
    known = {name for rate in rates for name in metrics.by_drafter[f"spec_decode_{rate}"]}
    found = {}
    for name in sorted(drafts.keys() | known):
        recent, card, probable, on_card = (
            metrics.by_drafter[f"spec_decode_{rate}"].get(name) for rate in rates
        )
        found[name] = LiveDrafter(
            drafts=drafts.get(name, []),
            accepted=accepted.get(name, []),
            recent_acceptance=recent,
            card_acceptance=card,
            recent_target_probability=probable,
            card_target_probability=on_card,
        )
    return found


def _by_depth(metrics: Metrics, counter: str) -> dict[str, list[int]]:
    levels: dict[str, list[int]] = {}
    for labels, count in metrics.counters[f"spec_decode_{counter}_by_position"].items():
        (_, drafter), _ = labels  # positions were counted from the first on, so they are in order
        levels.setdefault(drafter, []).append(int(count))
    return levels


ROUTES = (
    get("/v1/live", live, "What the server does now: counters, rates, acceptance, decisions.", Live, QUERY),
)
