"""One model of the server's table: what endpoints that generate work with. No HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import invalid
from outrider.serve.backend import Backend
from outrider.serve.errors import ApiError
from outrider.serve.link import EventAddress, Start
from outrider.serve.metrics import Metrics
from outrider.serve.model import ServedModel
from outrider.serve.model_spec import ModelSpec
from outrider.serve.settings import FIRST_USE
from outrider.serve.wire import ResponsesRequest, Sampling, sampling_params, sent_as
from outrider.types import SamplingParams

if TYPE_CHECKING:
    from outrider.serve.traffic import TrafficKeeper  # numpy comes with it, for servers that keep some

LEAST_ANSWER, ANSWER_SHARE = (
    256,
    4,
)  # tokens, and the part of the context: answers whose request sets no length


class ModelService:
    def __init__(self, spec: ModelSpec, backend: Backend, metrics: Metrics) -> None:
        self.spec, self.settings = spec, spec.serve
        self.backend, self.metrics = backend, metrics
        self.traffic: TrafficKeeper | None = None  # where tokens are kept
        # Why the engine is not to be asked now: unloaded, loading (for a request), unloading. Else None.
        self.away: str | None = "unloaded" if self.settings.load == FIRST_USE else None
        self.users = 0  # requests that may still need the engine
        self.last_used = self.loaded_at = time.monotonic()
        self.wanted = asyncio.Event()  # a request waits for the model
        self.pressed_at: float | None = None  # when the first one came that is no line of a batch
        self._arrival: asyncio.Future[None] | None = None  # of the model that requests wait for

    @classmethod
    def of(cls, spec: ModelSpec) -> ModelService:
        serve = spec.serve
        logging = (serve.log_format, serve.log_level)
        at = serve.kv_events and EventAddress(
            serve.kv_events, serve.kv_events_replay, serve.kv_events_topic or ""
        )
        start = Start(spec.source, spec.draft, dataclasses.asdict(spec.settings), logging, at or None)
        metrics = Metrics(serve.price_per_hour)
        return cls(spec, Backend(start, serve, metrics, spec.name), metrics)

    @property
    def names(self) -> list[str]:
        """What the model may be called, first the name it is shown by."""
        return self.spec.names

    @property
    def state(self) -> str:
        return self.away or self.backend.state

    @property
    def usable(self) -> bool:
        """Takes requests now, or loads the model for one."""
        return self.backend.well if self.away is None else True

    async def loaded(self, background: bool) -> None:
        """Has the model loaded for a request. Raises if it cannot be."""
        if not background and self.pressed_at is None:
            self.pressed_at = time.monotonic()
        if self._arrival is None:
            self._arrival = asyncio.get_running_loop().create_future()
        self.wanted.set()
        await asyncio.shield(self._arrival)

    def arrived(self, problem: str = "") -> None:
        """The model was loaded, or it was not because of `problem`."""
        self.wanted.clear()
        self.pressed_at = None
        self.away = "unloaded" if problem else None
        self.last_used = self.loaded_at = time.monotonic()
        self.answer_waiting(problem)

    def answer_waiting(self, problem: str = "") -> None:
        """Lets the requests go on that wait for the model, or refuses them."""
        arrival, self._arrival = self._arrival, None
        if arrival is None:
            return
        if not problem:
            arrival.set_result(None)
            return
        text = f"the model {self.names[0]!r} could not be loaded: {problem}"
        arrival.set_exception(ApiError(503, text, code="load_failed", after=5))
        arrival.exception()  # marks it as retrieved: perhaps no request waits any more

    def may_unload(self, waited: float) -> bool:
        """Whether the model has to give its memory to one that was wanted `waited` seconds ago."""
        now, patience = time.monotonic(), self.settings.unload_after
        if self.away is not None or self.backend.state != "ready" or self.backend.queued > self.users:
            return False
        idle = not self.users and now - self.last_used >= patience
        return idle or (waited >= patience and now - self.loaded_at >= patience)

    @property
    def model(self) -> ServedModel:
        if self.backend.model is None or self.backend.state != "ready":
            raise ApiError(503, "the model is still being loaded", code="loading", after=2)
        return self.backend.model

    @property
    def defaults(self) -> SamplingParams:
        return self.model.sampling.under(self.spec.params, self.spec.given)

    def params_of(self, asked: Sampling, grammar: Mapping[str, Any] | None = None) -> SamplingParams:
        """The engine's parameters, once they are valid. Takes time that grows with the request."""
        params = sampling_params(asked, self.defaults, self.settings, grammar)
        if params.prediction:
            self.model.check_length(params.prediction, False, "prediction")
        return params

    @property
    def answer_tokens(self) -> int:
        """Longest answer of a request that sets no length. Small models loop: without a bound below the context, one
        forgotten field costs minutes.
        """
        longest = (self.backend.model or self.model).longest
        return min(longest, self.settings.max_tokens or max(LEAST_ANSWER, longest // ANSWER_SHARE))

    async def swap_draft(self, path: Path | None) -> None:
        """Draft with the weights in this folder from the next step on; None: with those before the last swap."""
        assert self.model  # or it is still being loaded, which is an error of its own
        await self.backend.swaps.swap(path, self.settings.request_timeout)

    def fitted(
        self,
        asked: Sampling | ResponsesRequest,
        prompt: list[int],
        params: SamplingParams,
        length: int | None,
    ) -> tuple[list[int], SamplingParams]:
        """A prompt and its parameters, once both fit the model: `length` tokens, or as many as the
        server allows where that is None."""
        cut, least = getattr(asked, "truncate_prompt_tokens", None), getattr(asked, "min_tokens", None)
        prompt = prompt[-cut:] if cut else prompt
        longest = self.model.longest
        room = longest - len(prompt)
        wanted = length if length is not None else max(1, min(room, self.answer_tokens))
        if room < 1 or wanted > room:
            raise ApiError(
                400,
                f"this model's maximum context length is {longest} tokens, but {len(prompt) + wanted} were asked "
                f"for: {len(prompt)} in the prompt and {wanted} for the answer; shorten one of them",
                param=sent_as("prompt" if room < 1 else "max_tokens", asked),
                code="context_length_exceeded",
            )
        if wanted < 1 and not getattr(asked, "echo", None):
            name = sent_as("max_tokens", asked) or "max_tokens"
            hint = ", or 0 together with echo" if hasattr(asked, "echo") else ""
            raise invalid(name, f"must be at least 1{hint}")
        least = min(params.min_tokens, wanted) if least is None else least
        return prompt, replace(params, max_tokens=max(1, wanted), min_tokens=least)
