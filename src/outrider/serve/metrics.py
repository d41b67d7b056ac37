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

# Sixteen a decade from 1 ms to 1 s: neighbours differ by 15 %, so that a p99 that grew by so much is seen.
FINE = tuple(float(f"{10 ** (k / 16 - 3):.3g}") for k in range(48))
SECONDS = (*FINE, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

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
    "spec_decode_num_draft_positions": "Positions drafted for: several tokens of a tree may stand for one.",
    "spec_decode_drafts_by_position": "Drafts with a token at a position, by drafter.",
    "spec_decode_accepted_by_position": "Those of them in which it was accepted, by drafter.",
    "spec_decode_num_lossy_tokens": "Draft tokens accepted in a mode that is not exact.",
    "planner_decisions": "What the planner did with a sequence in a step, by reason.",
    "steps": "Passes of the target.",
    "graphs_captured": "CUDA graphs captured while requests waited.",
    "kernels_compiled": "Kernels compiled, or read from the cache of compiled ones, while requests waited.",
    "step_seconds": "Time spent in steps, by stage.",
    "decode_seconds": "Time of decoding: a step counts once for each sequence that waits for its next token.",
    "plain_decode_seconds": "What plain decoding is measured to take for the same tokens.",
    "batch_lines": "Lines of batches that were answered, by status.",
    "traffic_kept": "Answers to marked keys that were kept.",
    "traffic_dropped": "Answers to marked keys that were not kept, by reason.",
}
CACHE_CONFIG = "cache_config_info"
GAUGES = {
    "num_requests_running": "Sequences that share steps now.",
    "num_requests_waiting": "Requests that wait.",
    "kv_cache_usage_perc": "Share of the KV cache that running sequences hold, 0 to 1.",
    "spec_decode_speedup": "plain_decode_seconds over decode_seconds since the start.",
    "spec_decode_recent_speedup": "The same of about the last 500 steps.",
    "tokens_per_second": "Tokens per second of recent steps that only decoded.",
    "plain_tokens_per_second": "What plain decoding is measured to make of the same steps: the number to beat.",
    "spec_decode_tokens_per_step": "Tokens that recent drafting steps brought a sequence.",
    "spec_decode_break_even_tokens": "Tokens that they had to bring it to be worth their time.",
    "spec_decode_effective_acceptance": "Share of recently drafted positions that were right.",
    "spec_decode_node_acceptance": "Share of recently drafted tokens that were accepted.",
    "price_per_hour": "What an hour of this machine costs, as the operator says.",
    "cost_per_million_tokens": "What a million tokens cost, by the time spent in steps.",
    "engine_up": "1 while the engine takes requests.",
    "prepared": "1 once every step is captured and measured; before, some drafts are not used yet.",
    "spec_decode_recent_acceptance": "Share of recent drafts whose first token was accepted, by drafter.",
    "spec_decode_card_acceptance": "The same as the draft's card has it, by drafter.",
    "spec_decode_recent_target_probability": "Mean probability that the target gave its own recent tokens, by drafter.",
    "spec_decode_card_target_probability": "The same as the draft's card has it, by drafter.",
    "spec_decode_unpaid_draft_cache_tokens": "Tokens of KV cache that a draft which never paid takes the memory of.",
    CACHE_CONFIG: "1, with the size of the KV cache as labels: blocks, and tokens of a block.",
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
        *("spec_decode_drafts_by_position", "spec_decode_accepted_by_position"),
    )
)
UNPAID = "spec_decode_unpaid_draft_cache_tokens"
BY_DRAFTER = (
    "spec_decode_recent_acceptance",
    "spec_decode_card_acceptance",
    "spec_decode_recent_target_probability",
    "spec_decode_card_target_probability",
    UNPAID,
)
PRICED = ("price_per_hour", "cost_per_million_tokens")
TARGET_PROBABILITY = "spec_decode_recent_target_probability"
RECENT_DRAFTS = 2000  # drafts in the moving average: enough to smooth out a single odd request
RECENT_STEPS = 500  # of those with something to say
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
    """A moving mean over about the last `memory` values."""

    memory: int
    value: float = 0.0
    weight: float = 0.0

    def add(self, count: int, total: float) -> float:
        self.weight = min(self.weight + count, max(self.memory, count))
        self.value += (total - count * self.value) / self.weight
        return self.value


@dataclass(slots=True)
class RecentRatio:
    """The ratio of two moving sums over about the last RECENT_STEPS steps."""

    above: float = 0.0
    below: float = 0.0

    def add(self, above: float, below: float) -> float:
        keep = 1 - 1 / RECENT_STEPS
        self.above, self.below = keep * self.above + above, keep * self.below + below
        return self.above / self.below if self.below else 0.0


class Metrics:
    def __init__(self, price_per_hour: float | None = None) -> None:
        self.price = price_per_hour
        self.counters: dict[str, dict[Labels, float]] = {name: {} for name in COUNTERS}
        left_out = (*BY_DRAFTER, CACHE_CONFIG, *(() if price_per_hour is not None else PRICED))
        self.gauges: dict[str, float] = dict.fromkeys((n for n in GAUGES if n not in left_out), 0.0)
        if price_per_hour is not None:
            self.gauges["price_per_hour"] = price_per_hour
        self._ratios: dict[str, RecentRatio] = {}
        self.by_drafter: dict[str, dict[str, float]] = {name: {} for name in BY_DRAFTER}
        self._recent: dict[tuple[str, str], RecentMean] = {}
        self._cache: Labels = ()  # of CACHE_CONFIG, once an engine is there
        self.said: dict[str, str] = {}  # by kind of reason, the latest with its numbers
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
        self.count("spec_decode_num_draft_positions", step.positions)
        self.count("spec_decode_num_accepted_tokens", step.accepted)
        self.count("spec_decode_num_lossy_tokens", step.lossy)
        for depth, held in enumerate(step.accepted_at[:MAX_DEPTH_LABEL]):
            self.count("spec_decode_num_accepted_tokens_per_pos", held, position=str(depth))
        for name, drafted in step.drafters.items():
            self.drafter(name, drafted)
        for reason, times in step.reasons.items():
            self.count("planner_decisions", times, reason=reason)
        self.said |= step.said
        staged = {
            "plan": step.plan_s,
            "draft": step.draft_s,
            "target": step.target_s,
            "verify": step.verify_s,
        }
        for stage, seconds in {**staged, "other": step.total_s - sum(staged.values())}.items():
            self.count("step_seconds", seconds, stage=stage)
        self.observe("step_duration_seconds", step.total_s / step.passes, step.passes)
        if step.plain_s:
            self._decoded(step)
        if step.drafted:
            self._ratio("spec_decode_effective_acceptance", step.accepted, step.positions)
            self._ratio("spec_decode_node_acceptance", step.accepted, step.drafted)
        if self.price is not None and (tokens := self.counters["generation_tokens"][()]):
            spent = sum(self.counters["step_seconds"].values())
            self.gauges["cost_per_million_tokens"] = self.price / 3600 * spent / tokens * 1e6

    def _decoded(self, step: Step) -> None:
        """A step beside what plain decoding takes for its tokens. It counts once for everyone who waits for them, so
        that the speed-up is that of a request's tokens: when others have ended, a step serves few.
        """
        spent, plain = step.answering * step.total_s, step.answering * step.plain_s
        self.count("decode_seconds", spent)
        self.count("plain_decode_seconds", plain)
        total = self.counters["decode_seconds"][()]
        self.gauges["spec_decode_speedup"] = self.counters["plain_decode_seconds"][()] / total
        self._ratio("spec_decode_recent_speedup", plain, spent)
        if step.known != step.sequences:
            return
        self._ratio("tokens_per_second", step.emitted, step.total_s)
        self._ratio("plain_tokens_per_second", step.emitted, step.plain_s)
        if step.drafted:
            each = step.emitted / step.sequences
            self._ratio("spec_decode_tokens_per_step", each, 1)
            self._ratio("spec_decode_break_even_tokens", each * step.total_s / step.plain_s, 1)

    def _ratio(self, name: str, above: float, below: float) -> None:
        self.gauges[name] = self._ratios.setdefault(name, RecentRatio()).add(above, below)

    def drafter(self, name: str, drafted: Drafted) -> None:
        for counter, levels in (("drafts", drafted.reached), ("accepted", drafted.accepted)):
            for depth, times in enumerate(levels[:MAX_DEPTH_LABEL]):
                self.count(f"spec_decode_{counter}_by_position", times, drafter=name, position=str(depth))
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
        self.by_drafter[UNPAID] = dict(gauges.unpaid)
        totals = {
            "num_preemptions": gauges.preemptions,
            "prefix_cache_queries": gauges.prefix_queried,
            "prefix_cache_hits": gauges.prefix_found,
        }
        for name, total in totals.items():
            self.count(name, max(0, total - self._seen[name]))
            self._seen[name] = total

    def cache_config(self, block: int, blocks: int) -> None:
        """The labels have the names that endpoint pickers look for, on every device."""
        self._cache = (("block_size", str(block)), ("num_gpu_blocks", str(blocks)))

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
        return metrics_text({model: self}, prefixes)

    def families(self, prefix: str, model: str) -> Iterator[tuple[str, list[str]]]:
        """Head and samples of every metric."""
        constant = (("model_name", model),)
        for name, series in self.counters.items():
            full = f"{prefix}{name}_total"
            samples = [
                f"{full}{_braces(constant + labels)} {_number(value)}" for labels, value in series.items()
            ]
            yield _head(full, "counter", COUNTERS[name]), samples
        for name, value in self.gauges.items():
            sample = f"{prefix}{name}{_braces(constant)} {_number(value)}"
            yield _head(prefix + name, "gauge", GAUGES[name]), [sample]
        if self._cache:
            sample = f"{prefix}{CACHE_CONFIG}{_braces(constant + self._cache)} 1"
            yield _head(prefix + CACHE_CONFIG, "gauge", GAUGES[CACHE_CONFIG]), [sample]
        for name, values in self.by_drafter.items():
            labelled = [((*constant, ("drafter", drafter)), value) for drafter, value in values.items()]
            samples = [f"{prefix}{name}{_braces(labels)} {_number(value)}" for labels, value in labelled]
            yield _head(prefix + name, "gauge", GAUGES[name]), samples
        for name, histogram in self.histograms.items():
            head = _head(prefix + name, "histogram", HISTOGRAMS[name])
            yield head, [*_buckets(prefix + name, histogram, constant)]


def metrics_text(models: Mapping[str, Metrics], prefixes: tuple[str, ...]) -> str:
    """What Prometheus reads, of all models: it wants the samples of one metric together."""
    merged: dict[str, list[str]] = {}
    for prefix in prefixes:
        for model, metrics in models.items():
            for head, samples in metrics.families(prefix, model):
                merged.setdefault(head, []).extend(samples)
    return "".join(f"{line}\n" for head, samples in merged.items() for line in (head, *samples))


def _buckets(name: str, histogram: Histogram, constant: Labels) -> Iterator[str]:
    so_far = 0
    for bound, count in zip((*map(str, SECONDS), "+Inf"), histogram.counts, strict=True):
        so_far += count
        yield f"{name}_bucket{_braces((*constant, ('le', bound)))} {so_far}"
    yield f"{name}_sum{_braces(constant)} {_number(histogram.total)}"
    yield f"{name}_count{_braces(constant)} {so_far}"


def _head(name: str, kind: str, text: str) -> str:
    return f"# HELP {name} {text}\n# TYPE {name} {kind}"


def _braces(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))
