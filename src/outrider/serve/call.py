"""One API call while it is answered: what came back so far, choice by choice, and the reports made of it.

Dialects (chat.py, completions.py, responses.py) say how that looks on the wire. They are fed the same pieces
whether the client streams or not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol

from outrider import __version__
from outrider.load.tokenizer import MARK
from outrider.serve.errors import ApiError
from outrider.serve.harmony import Reader, ThoughtCount
from outrider.serve.link import End, Piece, Score
from outrider.serve.metrics import Metrics
from outrider.serve.model import ServedModel
from outrider.serve.prediction import PredictionOverlap
from outrider.serve.steps import StepWriter
from outrider.serve.stream import Job
from outrider.serve.tool_text import Piece as Part
from outrider.serve.tool_text import Text

MOST_LOGGED = 20_000  # characters of a prompt or an answer
FINGERPRINT = f"outrider-{__version__}"


@dataclass(slots=True)
class AnswerOptions:
    """What the client wants in its answer beside the text."""

    usage: bool = False  # at the end of a stream
    running_usage: bool = False  # in every event of a stream
    padding: bool = False
    stats: bool = False
    steps: bool = False
    token_ids: bool = False

    @property
    def plain(self) -> bool:
        """Whether events of a stream may differ in their text alone."""
        return not (self.running_usage or self.padding or self.steps)


@dataclass(slots=True)
class Choice:
    index: int
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    finish_reason: str | None = None
    end: End | None = None
    last: float = 0.0  # when its latest tokens came
    overlap: PredictionOverlap | None = None  # where there is a prediction
    reasons: list[str] = field(default_factory=list)  # the planner's, of every step, where asked for
    writer: StepWriter | None = None  # where steps are asked for
    thoughts: ThoughtCount | None = None  # where the model thinks in a channel


class Dialect(Protocol):
    """How an answer is written: events for a stream, a body for those who wait. Fed the same pieces for both."""

    call: Call

    def begin(self) -> list[dict[str, Any]]: ...
    def feed(self, prompt: int, piece: Piece) -> Seq[dict[str, Any] | bytes]:
        """Events; those that are bytes are written as they are."""
        ...

    def finish(self) -> list[dict[str, Any]]: ...
    def body(self) -> dict[str, Any]: ...


class Call:
    def __init__(
        self,
        name: str,
        model: ServedModel,
        shown: str,
        jobs: list[Job],
        options: AnswerOptions,
        metrics: Metrics,
        arrived: float,
    ) -> None:
        self.id, self.model, self.shown, self.jobs, self.options = name, model, shown, jobs, options
        self.metrics, self.arrived = metrics, arrived
        self.created = int(time.time())
        self.first = 0.0
        n = jobs[0].params.n
        self.choices = [[Choice(p * n + i) for i in range(n)] for p in range(len(jobs))]
        self.flat = [choice for choices in self.choices for choice in choices]
        self.prompt_scores: list[list[Score | None]] = [[] for _ in jobs]
        if options.steps:
            for job, choices in zip(jobs, self.choices, strict=True):
                for choice in choices:
                    choice.writer = StepWriter(model, job.prompt[-1] if job.prompt else -1)

    def compare_with(self, prediction: PredictionOverlap) -> None:
        """Count in each choice how much of the prediction comes true. Call before the first piece."""
        for choice in self.flat:
            choice.overlap = prediction.again()
            if choice.writer is not None:
                choice.writer.prediction = prediction.tokens

    def count_thoughts(self) -> None:
        """Call before the first piece of an answer in channels."""
        for choice in self.flat if self.model.tool_format.channels else ():
            choice.thoughts = ThoughtCount(self.model.tokenizer)

    def take(self, prompt: int, piece: Piece) -> Choice:
        """Add a piece to its choice. One that ended badly is an error."""
        if piece.finish_reason == "error":
            problem = piece.end.problem if piece.end else None
            raise ApiError(400, problem or "the answer failed", param="response_format")
        if piece.finish_reason == "abort":
            raise ApiError(503, "the request was aborted", code="aborted", after=1)
        choice = self.choices[prompt][piece.choice]
        choice.text.append(piece.text)
        choice.token_ids.extend(piece.token_ids)
        if choice.thoughts is not None:
            choice.thoughts.feed(piece.token_ids)
        if piece.detail is not None:
            choice.reasons.append(piece.detail.reason)
            if choice.writer is not None:
                choice.writer.add(piece.token_ids, piece.detail)
        if choice.overlap:
            choice.overlap.feed(piece.token_ids)
        if piece.scores:
            choice.scores.extend(piece.scores)
        if piece.prompt_scores is not None:
            self.prompt_scores[prompt] = piece.prompt_scores
        now = time.perf_counter()
        if piece.token_ids:
            self._clock(choice, now, len(piece.token_ids))
        if piece.finish_reason:
            choice.finish_reason, choice.end = piece.finish_reason, piece.end
            if piece.end is not None:
                self.metrics.finished(piece.end, len(choice.token_ids), piece.finish_reason)
            if all(c.finish_reason for c in self.flat):
                self.metrics.observe("e2e_request_latency_seconds", now - self.arrived)
        return choice

    def _clock(self, choice: Choice, now: float, tokens: int) -> None:
        if choice.last:
            self.metrics.observe("inter_token_latency_seconds", (now - choice.last) / tokens, tokens)
        choice.last = now
        if not self.first:
            self.first = now
            self.metrics.observe("time_to_first_token_seconds", now - self.arrived)

    def exact_answers(self) -> Iterator[tuple[list[int], list[int], float]]:
        """Prompts and answers that ended by themselves, and their temperature. None that were not decoded exactly."""
        for job, choices in zip(self.jobs, self.choices, strict=True):
            for choice in choices:
                ended = choice.finish_reason in ("stop", "length") and choice.token_ids
                if ended and job.params.speculation.mode != "lossy":
                    yield job.prompt, choice.token_ids, job.params.temperature

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.shown,
            "system_fingerprint": FINGERPRINT,
        }

    @property
    def seed(self) -> int:
        return self.jobs[0].seed

    @property
    def _mode(self) -> str:
        return self.jobs[0].params.speculation.mode

    def usage(self) -> dict[str, Any]:
        prompt = sum(len(job.prompt) for job in self.jobs)
        written = sum(len(c.token_ids) for c in self.flat)
        accepted, rejected = self._predicted()
        return {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {"cached_tokens": self._cached},
            "completion_tokens_details": {
                "reasoning_tokens": sum(c.thoughts.tokens for c in self.flat if c.thoughts),
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": rejected,
            },
        }

    @property
    def _cached(self) -> int:
        """Prompt tokens that were found in the cache; the first choice of a prompt read it."""
        return sum(own[0].end.cached for own in self.choices if own[0].end)

    def _predicted(self) -> tuple[int, int]:
        """Tokens of the user's prediction that came true, over all choices, and those that did not."""
        overlaps = [choice.overlap for choice in self.flat if choice.overlap]
        held = sum(each.held for each in overlaps)
        return held, sum(each.size for each in overlaps) - held

    def extras(self) -> dict[str, Any]:
        return {"seed": self.seed, "timings": self._timings(), "metrics": self._metrics()}

    def _timings(self) -> dict[str, Any]:
        ends = [c.end for c in self.flat if c.end]
        prompt_ms = 1000 * sum(own[0].end.prompt_s for own in self.choices if own[0].end)
        decode_ms = 1000 * max((end.decode_s for end in ends), default=0.0)
        cached = self._cached
        read = sum(len(job.prompt) for job in self.jobs) - cached
        written = sum(len(c.token_ids) for c in self.flat)
        return {
            "cache_n": cached,
            "prompt_n": read,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": _over(prompt_ms, read),
            "prompt_per_second": _over(1000 * read, prompt_ms),
            "predicted_n": written,
            "predicted_ms": decode_ms,
            "predicted_per_token_ms": _over(decode_ms, written),
            "predicted_per_second": _over(1000 * written, decode_ms),
            "draft_n": sum(end.drafted for end in ends),
            "draft_n_accepted": sum(end.accepted for end in ends),
        }

    def _metrics(self) -> dict[str, Any]:
        first = self.flat[0]
        end = first.end
        written = len(first.token_ids)
        return {
            "time_to_first_token_ms": 1000 * (self.first - self.arrived) if self.first else None,
            "queue_time_ms": 1000 * end.queue_s if end else None,
            "generation_time_ms": 1000 * end.decode_s if end else None,
            "mean_itl_ms": _over(1000 * end.decode_s, written - 1) if end else None,
            "tokens_per_second": _over(written - 1, end.decode_s) if end else None,
            "speculative_decoding": self._speculation(first) if end and len(self.flat) == 1 else None,
            "lossy": self._mode == "lossy",  # said also where the report is left out
        }

    def _speculation(self, choice: Choice) -> dict[str, Any]:
        """In the shape that vLLM writes and benchmark tools read, and the mode it was done in."""
        end = choice.end
        assert end is not None
        accepted = [held for _, held in end.draft_counts]
        drafted = sum(nodes for nodes, _ in end.draft_counts)
        report = {
            "mean_acceptance_length": 1 + _over(sum(accepted), len(accepted)),
            "draft_acceptance_rate": _over(sum(accepted), drafted),
            "acceptance_histogram": [accepted.count(k) for k in range(end.deepest + 1)],
            "num_spec_steps": len(accepted),
            "num_accepted_draft_tokens": sum(accepted),
            "num_draft_tokens": drafted,
            "num_spec_tokens": end.deepest,
            "steps": end.steps,
            "mode": self._mode,
            "lossy": self._mode == "lossy",
        }
        if self.options.stats:
            report["per_step_accepted"] = accepted
            report["per_step_drafted"] = [nodes for nodes, _ in end.draft_counts]
        if choice.reasons:
            report["per_step_reasons"] = choice.reasons
        return report

    def facts(self) -> dict[str, Any]:
        """The line of the log: sizes, speed and what speculation brought. Times are the server's, of all choices."""
        usage, ends = self.usage(), [choice.end for choice in self.flat if choice.end]
        facts = {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
        facts |= {"choices": len(self.flat)}
        if self.first:
            facts["first_token_ms"] = round(1000 * (self.first - self.arrived), 1)
        spent = max(choice.last for choice in self.flat) - self.first
        if self.first and spent > 0:
            facts["tokens_per_s"] = round((facts["completion_tokens"] - len(self.flat)) / spent, 1)
        if ends:
            facts |= {"accepted": sum(e.accepted for e in ends), "drafted": sum(e.drafted for e in ends)}
            facts["finish"] = ",".join(sorted({c.finish_reason for c in self.flat if c.finish_reason}))
        return facts

    def said(self) -> dict[str, Any]:
        """Texts of prompts and answers, for --log-prompts."""
        return {
            "prompt": [self.model.tokenizer.decode(job.prompt)[:MOST_LOGGED] for job in self.jobs],
            "answer": ["".join(choice.text).replace(MARK, "")[:MOST_LOGGED] for choice in self.flat],
        }

    def choice_extras(self, choice: Choice, sent: int = 0) -> dict[str, Any]:
        """`sent`: how many of its steps are in events before this one."""
        extras = self.fresh_steps(choice, sent)
        if self.options.token_ids:
            extras["token_ids"] = choice.token_ids
        if self.options.stats and choice.end is not None:
            extras["token_origins"] = choice.end.origins[: len(choice.token_ids)]
        if len(self.jobs) > 1:  # each prompt has its own
            extras["seed"] = self.jobs[choice.index // len(self.choices[0])].seed
        return extras

    def fresh_steps(self, choice: Choice, sent: int) -> dict[str, Any]:
        return {} if choice.writer is None else {"steps": choice.writer.steps[sent:]}

    def scored_tokens(self, scores: Seq[Score]) -> list[dict[str, Any]]:
        """Log-probabilities as chat and Responses write them."""
        return [
            {
                **self._scored(score.token, score.logprob),
                "top_logprobs": [self._scored(token, logprob) for token, logprob in score.rivals],
            }
            for score in scores
        ]

    def _scored(self, token: int, logprob: float) -> dict[str, Any]:
        text, data = self.model.token_text(token)
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": data}


def parts_of(piece: Piece, reader: Reader | None) -> list[Part]:
    """A piece's text, split into thoughts, words and calls where there are channels or tools."""
    if reader is None:
        return [Text(piece.text)] if piece.text else []
    return [*reader.feed(piece.text), *(reader.finish() if piece.finish_reason else ())]


def _over(amount: float, by: float) -> float:
    return amount / by if by > 0 else 0.0
