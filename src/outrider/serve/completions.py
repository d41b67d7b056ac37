"""`/v1/completions`: plain text continued. Prompts are texts or token ids, one or many."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from starlette.responses import Response

from outrider.errors import InvalidRequest, invalid
from outrider.serve.answer import answer
from outrider.serve.call import Call, Choice
from outrider.serve.link import Piece, Score
from outrider.serve.model import ServedModel
from outrider.serve.model_service import ModelService
from outrider.serve.replies import Completion
from outrider.serve.request import Request
from outrider.serve.routes import post
from outrider.serve.text_event import TextEvent
from outrider.serve.wire import CompletionRequest
from outrider.types import SamplingParams

DEFAULT_LENGTH = 16  # what OpenAI writes here by default
MAX_PROMPTS = 256  # of one call
MOST_ANSWERS = 1024  # of one call; each is looked at whenever another ends


async def answer_completion(request: Request) -> Response:
    asked = await request.read(CompletionRequest, prompts=MAX_PROMPTS)
    fitted = await request.in_pool(_prepared, request.chosen, asked)
    echo, scored, silent = bool(asked.echo), asked.logprobs is not None, asked.max_tokens == 0
    return await answer(request, asked, fitted, "cmpl-", lambda call: Completions(call, echo, scored, silent))


def _prepared(service: ModelService, asked: CompletionRequest) -> list[tuple[list[int], SamplingParams]]:
    """Parameters are checked once for each prompt, with the length that it leaves."""
    params, settings = service.params_of(asked), service.settings
    if asked.logprobs is not None:
        params = replace(
            params, logprobs=asked.logprobs, prompt_logprobs=asked.logprobs if asked.echo else None
        )
    cut = asked.truncate_prompt_tokens is not None
    prompts = read_prompts(asked.prompt, service.model, cut)
    if len(prompts) * params.n > MOST_ANSWERS:
        raise invalid("n", f"times the number of prompts may be at most {MOST_ANSWERS}")
    if (
        len(prompts) * len(params.prediction or "") > settings.max_body_bytes
    ):  # each takes a copy to the engine
        raise InvalidRequest(f"the prediction is too long for {len(prompts)} prompts at once", "prediction")
    length = settings.max_tokens or DEFAULT_LENGTH if asked.max_tokens is None else asked.max_tokens
    return [service.fitted(asked, prompt, params, length) for prompt in prompts]


def read_prompts(prompt: Any, model: ServedModel, cut: bool = False) -> list[list[int]]:
    """Token ids of each prompt: a text, a list of texts, token ids, or a list of lists of them."""
    many = [prompt] if isinstance(prompt, str) or (prompt and type(prompt[0]) is int) else prompt
    if not many:
        raise invalid("prompt", "must not be empty")
    if len(many) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt: {len(many)} given, at most {MAX_PROMPTS} are allowed", "prompt")
    return [_ids(one, model, i, cut) for i, one in enumerate(many)]


def _ids(one: Any, model: ServedModel, i: int, cut: bool) -> list[int]:
    if isinstance(one, str):
        return model.text_ids(one, cut)
    if not isinstance(one, list) or not all(type(token) is int for token in one):
        raise InvalidRequest("prompt must be texts or lists of token ids, not a mixture", f"prompt[{i}]")
    known = model.tokenizer.vocab_size
    if bad := [token for token in one if not 0 <= token < known]:
        raise InvalidRequest(f"token id {bad[0]} is outside the vocabulary of {known}", f"prompt[{i}]")
    return one


class Completions:
    kind = "text_completion"

    def __init__(self, call: Call, echo: bool, scored: bool, silent: bool) -> None:
        """`silent`: no tokens were asked for, only the prompt back; the one that was made is not shown."""
        self.call, self.echo, self.scored, self.silent = call, echo, scored, silent
        self.echoed: set[int] = set()  # choices whose prompt has been sent
        self.offsets: dict[int, int] = {}
        self.plain = call.options.plain and not (echo or scored or silent)
        self.texts: dict[int, TextEvent] = {}  # of choices that have text
        self.sent_steps = [0] * len(call.flat)

    def begin(self) -> list[dict[str, Any]]:
        return []

    def feed(self, prompt: int, piece: Piece) -> list[dict[str, Any] | bytes]:
        choice = self.call.take(prompt, piece)
        if self.plain and piece.text and not piece.finish_reason:
            if (made := self.texts.get(choice.index)) is None:
                made = TextEvent(lambda text: self._event(self._shown(choice, text, None, None)))
                self.texts[choice.index] = made
            return [made.of(piece.text)]
        if self.silent:
            piece.text, piece.scores, choice.text, choice.token_ids, choice.scores = "", None, [], [], []
            choice.writer = None
        text, scores = piece.text, list[Score | None](piece.scores or ())
        if self.echo and choice.index not in self.echoed:
            self.echoed.add(choice.index)
            text, scores = self._prompt(prompt) + text, self.call.prompt_scores[prompt] + scores
        if not (text or scores or piece.finish_reason):
            return []
        logprobs = self._logprobs(choice.index, scores) if self.scored else None
        event, sent = self._event(self._shown(choice, text, logprobs, self._reason(choice))), self.sent_steps
        event["choices"][0] |= self.call.fresh_steps(choice, sent[choice.index])
        if piece.finish_reason:
            event["choices"][0] |= self.call.choice_extras(choice, sent[choice.index])
            if not self.call.options.usage and all(c.finish_reason for c in self.call.flat):
                event |= self.call.extras()
        sent[choice.index] = len(choice.writer.steps) if choice.writer else 0
        return [event]

    def finish(self) -> list[dict[str, Any]]:
        if not self.call.options.usage:
            return []
        return [
            {**self.call.head(self.kind), "choices": [], "usage": self.call.usage(), **self.call.extras()}
        ]

    def body(self) -> dict[str, Any]:
        self.offsets.clear()
        choices = [self._whole(p, choice) for p, own in enumerate(self.call.choices) for choice in own]
        usage = self.call.usage()
        return {**self.call.head(self.kind), "choices": choices, "usage": usage, **self.call.extras()}

    def _whole(self, prompt: int, choice: Choice) -> dict[str, Any]:
        text, scores = "".join(choice.text), list[Score | None](choice.scores)
        if self.echo:
            text, scores = self._prompt(prompt) + text, self.call.prompt_scores[prompt] + scores
        logprobs = self._logprobs(choice.index, scores) if self.scored else None
        shown = self._shown(choice, text, logprobs, self._reason(choice))
        return {**shown, **self.call.choice_extras(choice)}

    def _event(self, choice: dict[str, Any]) -> dict[str, Any]:
        event = {**self.call.head(self.kind), "choices": [choice]}
        if self.call.options.usage:
            event["usage"] = self.call.usage() if self.call.options.running_usage else None
        return event

    def _reason(self, choice: Choice) -> str | None:
        return "length" if self.silent and choice.finish_reason else choice.finish_reason

    def _shown(self, choice: Choice, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _prompt(self, prompt: int) -> str:
        return self.call.model.tokenizer.decode(self.call.jobs[prompt].prompt)

    def _logprobs(self, index: int, scores: list[Score | None]) -> dict[str, Any]:
        """Four lists side by side; the first token of a prompt has no log-probability."""
        shown: dict[str, list[Any]] = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []
        }  # fmt: skip
        model = self.call.model
        for score in scores:
            first = self.call.jobs[index // len(self.call.choices[0])].prompt[0]
            token = first if score is None else score.token
            text, _ = model.token_text(token)
            shown["tokens"].append(text)
            shown["token_logprobs"].append(None if score is None else score.logprob)
            shown["top_logprobs"].append(
                None if score is None else {model.token_text(t)[0]: p for t, p in score.rivals}
            )
            shown["text_offset"].append(self.offsets.get(index, 0))
            self.offsets[index] = self.offsets.get(index, 0) + len(text)
        return shown


ROUTES = (post("/v1/completions", answer_completion, CompletionRequest, "Continue texts.", Completion),)
