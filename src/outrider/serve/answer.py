"""From token ids to an answer: what every endpoint that generates does once it knows its prompts."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any

from starlette.responses import Response

from outrider.errors import InvalidRequest
from outrider.serve.call import AnswerOptions, Call, Dialect
from outrider.serve.errors import ApiError
from outrider.serve.events import EventStream
from outrider.serve.model import ServedModel
from outrider.serve.prediction import PredictionOverlap
from outrider.serve.request import Reply, Request
from outrider.serve.service import owner_of
from outrider.serve.settings import WEEK
from outrider.serve.stream import Pieces, Stream
from outrider.serve.wire import ResponsesRequest, Sampling, StreamOptions, sent_as, wants
from outrider.types import SamplingParams

MOST_SCORES = 2_000_000  # log-probabilities of one call; they take a few hundred megabytes


async def answer(
    request: Request,
    asked: Sampling | ResponsesRequest,
    prompts: list[tuple[list[int], SamplingParams]],
    prefix: str,
    make: Callable[[Call], Dialect],
) -> Response:
    """Run the prompts and write what comes in the dialect that `make` makes. `prefix`: of the answer's id."""
    _check_scores(prompts)
    chosen, settings = request.chosen, request.chosen.settings
    if request.key is not None:
        tokens = sum(len(prompt) + params.n * params.max_tokens for prompt, params in prompts)
        request.service.admit(request.key, tokens, chosen)
        request.reserved = tokens
    # A batch has a time limit of its own.
    timeout = WEEK if request.background else settings.request_timeout - request.waited
    deadline = asyncio.get_running_loop().time() + timeout
    try:
        owner = owner_of(request.key, getattr(asked, "cache_salt", None))
        client = owner_of(request.key, None) or (request.client.host if request.client else "")
        opened = chosen.backend.open(prompts, owner, client, deadline, request.background)
        stream = await request.while_there(opened)
    except ApiError as error:
        error.param = sent_as(error.param, asked)
        raise
    request.running = stream
    name = prefix + hashlib.sha256(f"{request.id} {stream.jobs[0].id}".encode()).hexdigest()[:24]
    options = _options(asked, settings.stream_padding)
    request.call = Call(
        name, chosen.model, chosen.names[0], stream.jobs, options, chosen.metrics, request.arrived
    )
    if text := stream.jobs[0].params.prediction:
        request.call.compare_with(await request.in_pool(_overlap, chosen.model, text))
    dialect = make(request.call)
    if asked.stream:
        return EventStream(dialect, stream, settings, deadline)
    return Reply(await request.while_there(_whole(dialect, stream, deadline)))


def _overlap(model: ServedModel, prediction: str) -> PredictionOverlap:
    return PredictionOverlap(model.tokenizer.encode(prediction, special=False))


async def _whole(dialect: Dialect, stream: Stream, deadline: float) -> dict[str, Any]:
    def receive(pieces: Pieces) -> None:
        for index, piece in pieces:
            dialect.feed(index, piece)

    await stream.follow(receive, deadline)
    return dialect.body()


def _options(asked: Sampling | ResponsesRequest, padding: bool) -> AnswerOptions:
    how = asked.stream_options or StreamOptions()
    return AnswerOptions(
        usage=bool(how.include_usage or how.continuous_usage_stats),
        running_usage=bool(how.continuous_usage_stats),
        padding=padding if how.include_obfuscation is None else how.include_obfuscation,
        stats=wants("stats", asked.speculative_decoding),
        steps=wants("steps", asked.speculative_decoding),
        token_ids=bool(getattr(asked, "return_token_ids", None)),
    )


def _check_scores(prompts: list[tuple[list[int], SamplingParams]]) -> None:
    """All log-probabilities of a call are held until it ends."""
    most = 0
    for prompt, params in prompts:
        if params.logprobs is not None:
            read = 0 if params.prompt_logprobs is None else len(prompt)
            most += (params.n * params.max_tokens + read) * (1 + params.logprobs)
    if most > MOST_SCORES:
        raise InvalidRequest(
            f"this could have {most} log-probabilities, and at most {MOST_SCORES} are given: ask for fewer prompts, "
            "tokens or alternatives",
            "logprobs",
        )
