"""What a caller in Python gets: an `Output` a prompt, with its choices and what they cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from outrider.types import FinishReason, Request, Sequence, StepDetail, TokenLogprob


@dataclass(slots=True)
class Stats:
    """What a choice cost: `tokens_per_step` is what speculation bought, 1.0 without it."""

    steps: int
    drafted: int
    accepted: int
    origins: list[str]
    details: list[StepDetail] = field(default_factory=list)  # step by step, where `explain` asked for them

    @property
    def reasons(self) -> list[str]:
        """Why each step was done as it was, where `explain` asked for it."""
        return [str(detail.reason) for detail in self.details]

    @property
    def tokens_per_step(self) -> float:
        return len(self.origins) / self.steps if self.steps else 0.0


@dataclass(slots=True)
class Choice:
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprob] | None
    seed: int
    stats: Stats


@dataclass(slots=True)
class Output:
    """The answer to one prompt. Its own fields are those of the first choice."""

    prompt_ids: list[int]
    cached_tokens: int  # of the prompt, found in the cache
    prompt_logprobs: list[TokenLogprob | None] | None = None  # None for the first token: nothing predicts it
    choices: list[Choice] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        return self.choices[0].logprobs

    @property
    def seed(self) -> int:
        return self.choices[0].seed

    @property
    def stats(self) -> Stats:
        return self.choices[0].stats

    @property
    def outputs(self) -> NoReturn:
        raise AttributeError(
            "an Output has no .outputs: .text is the first choice's, .choices has all (.choices[0].text)"
        )


def make_output(
    request: Request, choices: Iterable[Sequence], texts: Mapping[tuple[str, int], list[str]]
) -> Output:
    output = Output(list(request.prompt_ids), 0)
    for s in choices:
        if request.params.prompt_logprobs is not None and s.choice == 0:
            output.prompt_logprobs = s.prompt_logprobs
        assert s.finish_reason is not None  # every choice has had its last event
        output.cached_tokens = max(output.cached_tokens, s.reused if s.choice == 0 else 0)
        logprobs = s.logprobs if request.params.logprobs is not None else None
        stats = Stats(s.steps, s.drafted, s.accepted, list(s.origins), list(s.details))
        text = "".join(texts.get((request.id, s.choice), []))
        output.choices.append(Choice(text, s.output, s.finish_reason, logprobs, s.seed & (2**64 - 1), stats))
    return output
