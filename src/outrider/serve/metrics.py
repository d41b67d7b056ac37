"""Counters, gauges and histograms, written in the text form that Prometheus reads.

Names follow what dashboards and benchmark tools already look for. `--metrics-compat vllm` shows everything a
second time under that prefix. Only the event loop writes here, so there are no locks.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from outrider.serve.link import Drafted, End, Gauges, Step

PREFIX = "outrider:"
MAX_DEPTH_LABEL = 64

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

COUNTERS = {
    "prompt_tokens": "Prompt tokens of requests that were started.",
    "generation_tokens": "Tokens emitted.",
    "request_success": "Choices that ended, by finish reason.",
    "num_preemptions": "Sequences preempted: they gave their KV cache back to make room.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found there.",
    "admission_rejections": "Requests turned away, by reason.",
    "http_requests": "Answers, by route and status.",
    "client_disconnects": "Requests aborted because the client was gone.",
    "engine_restarts": "Times the engine was started again.",
    "spec_decode_num_drafts": "Drafts verified by the target.",
    "spec_decode_num_draft_tokens": "Draft tokens proposed.",
    "spec_decode_num_accepted_tokens": "Draft tokens accepted.",
    "spec_decode_num_accepted_tokens_per_pos": "Draft tokens accepted, by position in the draft.",
    "spec_decode_num_lossy_tokens": "Draft tokens accepted in a mode that is not exact.",
    "planner_decisions": "What the planner did with a sequence in a step, by reason.",
    "steps": "Passes of the target.",
    "graphs_captured": "CUDA graphs captured while requests waited.",
    "kernels_compiled": "Kernels compiled, or read from the cache of compiled ones, while requests waited.",
    "step_seconds": "Time spent in steps, by stage.",
    "decode_seconds": "Time of steps that only decoded.",
    "plain_decode_seconds": "What plain decoding is measured to take for the same tokens.",
    "traffic_kept": "Answers to marked keys that were kept.",
    "traffic_dropped": "Answers to marked keys that were not kept, by reason.",
}
GAUGES = {
    "num_requests_running": "Sequences that share steps now.",
    "num_requests_waiting": "Requests that wait.",
    "kv_cache_usage_perc": "Share of the KV cache that running sequences hold, 0 to 1.",
    "spec_decode_speedup": "plain_decode_seconds over decode_seconds since the start.",
    "engine_up": "1 while the engine takes requests.",
    "spec_decode_recent_acceptance": "Share of recent drafts whose first token was accepted, by drafter.",
    "spec_decode_card_acceptance": "The same as the draft's card has it, by drafter.",
    "spec_decode_recent_target_probability": "Mean probability that the target gave its own recent tokens, by drafter.",
    "spec_decode_card_target_probability": "The same as the draft's card has it, by drafter.",
    "traffic_keeping": "1 while tokens of marked keys are kept.",
    "traffic_bytes": "Bytes of kept tokens.",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": "From the request's arrival to its first token.",
    "inter_token_latency_seconds": "Between the arrivals of one choice's tokens; tokens of one step share it.",
    "request_time_per_output_token_seconds": "A choice's decode time over its tokens after the first.",
    "e2e_request_latency_seconds": "From a request's arrival to its end.",
    "request_queue_time_seconds": "From arrival to the first step.",
    "request_prefill_time_seconds": "From the first step to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
    "step_duration_seconds": "A whole step.",
}

LABELLED = frozenset(
    (
        *("request_success", "admission_rejections", "http_requests", "planner_decisions", "step_seconds"),
        *("spec_decode_num_accepted_tokens_per_pos", "traffic_dropped"),
    )
)
BY_DRAFTER = tuple(name for name in GAUGES if name.startswith(("spec_decode_recent", "spec_decode_card")))
TARGET_PROBABILITY = "spec_decode_recent_target_probability"
RECENT_DRAFTS = 2000  # an average over about so many: long enough that one odd request does not show
RECENT_TOKENS = 500  # of those that are looked at; one drafting step in some has a few

Labels = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    total: float = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect.bisect_left(SECONDS, value)] += times
        self.total += value * times


@dataclass(slots=True)
class RecentMean:
    """A mean that forgets: of about the last `memory`."""

    memory: int
    value: float = 0.0
    weight: float = 0.0

    def add(self, count: int, total: float) -> float:
        self.weight = min(self.weight + count, max(self.memory, count))
        self.value += (total - count * self.value) / self.weight
        return self.value


class Metrics:
    def __init__(self) -> None:
        self.counters: dict[str, dict[Labels, float]] = {name: {} for name in COUNTERS}
        self.gauges: dict[str, float] = dict.fromkeys((n for n in GAUGES if n not in BY_DRAFTER), 0.0)
        self.by_drafter: dict[str, dict[str, float]] = {name: {} for name in BY_DRAFTER}
        self._recent: dict[tuple[str, str], RecentMean] = {}
        self.histograms = {name: Histogram() for name in HISTOGRAMS}
        for name in COUNTERS:
            if name not in LABELLED:
                self.count(name, 0)  # a scraper that takes differences wants to see the zero
        self._seen = {"num_preemptions": 0, "prefix_cache_queries": 0, "prefix_cache_hits": 0}

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        series = self.counters[name]
        key = tuple(labels.items())
        series[key] = series.get(key, 0) + amount

    def observe(self, name: str, value: float, times: int = 1) -> None:
        self.histograms[name].add(value, times)

    def step(self, step: Step) -> None:
        self.count("steps", step.passes)
        self.count("graphs_captured", step.graphs_captured)
        self.count("kernels_compiled", step.kernels_compiled)
        self.count("generation_tokens", step.emitted)
        self.count("spec_decode_num_drafts", step.drafts)
        self.count("spec_decode_num_draft_tokens", step.drafted)
        self.count("spec_decode_num_accepted_tokens", step.accepted)
        self.count("spec_decode_num_lossy_tokens", step.lossy)
        for depth, held in enumerate(step.accepted_at[:MAX_DEPTH_LABEL]):
            self.count("spec_decode_num_accepted_tokens_per_pos", held, position=str(depth))
        for name, drafted in step.drafters.items():
            self.drafter(name, drafted)
        for reason, times in step.reasons.items():
            self.count("planner_decisions", times, reason=reason)
        staged = {
            "plan": step.plan_s,
            "draft": step.draft_s,
            "target": step.target_s,
            "verify": step.verify_s,
        }
        for stage, seconds in {**staged, "rest": step.total_s - sum(staged.values())}.items():
            self.count("step_seconds", seconds, stage=stage)
        self.observe("step_duration_seconds", step.total_s / step.passes, step.passes)
        if step.plain_s:
            self.count("decode_seconds", step.total_s)
            self.count("plain_decode_seconds", step.plain_s)
            spent = self.counters["decode_seconds"][()]
            self.gauges["spec_decode_speedup"] = self.counters["plain_decode_seconds"][()] / spent

    def drafter(self, name: str, drafted: Drafted) -> None:
        """What became of one drafter's drafts in a step."""
        for gauge, memory, count, total in (
            ("spec_decode_recent_acceptance", RECENT_DRAFTS, drafted.drafts, drafted.first_accepted),
            (TARGET_PROBABILITY, RECENT_TOKENS, drafted.predicted, drafted.probability),
        ):
            if count:
                recent = self._recent.setdefault((gauge, name), RecentMean(memory))
                self.by_drafter[gauge][name] = recent.add(count, total)

    def draft_in_use(self, name: str, acceptance: float | None, probability: float | None) -> None:
        """Another draft is in use: what its card says, where it has one. What is recent begins anew."""
        for key in [key for key in self._recent if name in key[1].split("+")]:
            del self._recent[key], self.by_drafter[key[0]][key[1]]
        for gauge, value in (
            ("spec_decode_card_acceptance", acceptance),
            ("spec_decode_card_target_probability", probability),
        ):
            self.by_drafter[gauge].pop(name, None)
            if value is not None:
                self.by_drafter[gauge][name] = value

    def traffic(self, keeping: bool, size: int, counts: Mapping[str, int]) -> None:
        self.gauges["traffic_keeping"], self.gauges["traffic_bytes"] = float(keeping), float(size)
        for reason, count in counts.items():
            if reason == "kept":
                self.counters["traffic_kept"][()] = count
            else:
                self.counters["traffic_dropped"][("reason", reason),] = count

    def fill(self, gauges: Gauges) -> None:
        self.gauges["num_requests_running"] = gauges.running
        self.gauges["kv_cache_usage_perc"] = gauges.cache_used
        totals = {
            "num_preemptions": gauges.preemptions,
            "prefix_cache_queries": gauges.prefix_queried,
            "prefix_cache_hits": gauges.prefix_found,
        }
        for name, total in totals.items():
            self.count(name, max(0, total - self._seen[name]))
            self._seen[name] = total

    def engine_started(self) -> None:
        """A fresh engine counts from zero again."""
        self._seen = dict.fromkeys(self._seen, 0)

    def finished(self, end: End, tokens: int, reason: str) -> None:
        self.count("request_success", finished_reason=reason)
        if not tokens:
            return
        self.observe("request_queue_time_seconds", end.queue_s)
        self.observe("request_prefill_time_seconds", end.prompt_s)
        self.observe("request_decode_time_seconds", end.decode_s)
        if tokens > 1:
            self.observe("request_time_per_output_token_seconds", end.decode_s / (tokens - 1))

    def text(self, model: str, prefixes: tuple[str, ...] = (PREFIX,)) -> str:
        constant = (("model_name", model),)
        return "".join(line + "\n" for prefix in prefixes for line in self._lines(prefix, constant))

    def _lines(self, prefix: str, constant: Labels) -> Iterator[str]:
        for name, series in self.counters.items():
            yield from _head(f"{prefix}{name}_total", "counter", COUNTERS[name])
            for labels, value in series.items():
                yield f"{prefix}{name}_total{_braces(constant + labels)} {_number(value)}"
        for name, value in self.gauges.items():
            yield from _head(prefix + name, "gauge", GAUGES[name])
            yield f"{prefix}{name}{_braces(constant)} {_number(value)}"
        for name, values in self.by_drafter.items():
            yield from _head(prefix + name, "gauge", GAUGES[name])
            for drafter, value in values.items():
                yield f"{prefix}{name}{_braces((*constant, ('drafter', drafter)))} {_number(value)}"
        for name, histogram in self.histograms.items():
            yield from _head(prefix + name, "histogram", HISTOGRAMS[name])
            so_far = 0
            for bound, count in zip((*map(str, SECONDS), "+Inf"), histogram.counts, strict=True):
                so_far += count
                yield f"{prefix}{name}_bucket{_braces((*constant, ('le', bound)))} {so_far}"
            yield f"{prefix}{name}_sum{_braces(constant)} {_number(histogram.total)}"
            yield f"{prefix}{name}_count{_braces(constant)} {so_far}"


def _head(name: str, kind: str, text: str) -> tuple[str, str]:
    return f"# HELP {name} {text}", f"# TYPE {name} {kind}"


def _braces(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))
