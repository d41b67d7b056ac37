"""What every endpoint works with: the engine, the settings, the keys and what is counted. No HTTP."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.errors import invalid
from outrider.serve.backend import Backend
from outrider.serve.errors import ApiError
from outrider.serve.intake import Intake, Pool
from outrider.serve.keys import Key, Keyring, Limiter, Refusal
from outrider.serve.metrics import Metrics
from outrider.serve.model import ServedModel, shown_name
from outrider.serve.settings import ServeSettings
from outrider.serve.wire import ResponsesRequest, Sampling, sampling_params, sent_as
from outrider.types import SamplingParams

if TYPE_CHECKING:
    from outrider.serve.call import Call
    from outrider.serve.traffic import TrafficKeeper  # numpy comes with it, for servers that keep some

LEAST_ANSWER, ANSWER_SHARE = (
    256,
    4,
)  # tokens, and the part of the context: answers whose request sets no length


class Service:
    def __init__(
        self,
        backend: Backend,
        settings: ServeSettings,
        defaults: SamplingParams,
        keys: Keyring,
        metrics: Metrics,
        given: Collection[str] = (),
    ) -> None:
        """`given`: which of `defaults` the operator set; the others yield to the model's own."""
        self.backend, self.settings = backend, settings
        self._defaults, self._given = defaults, given
        self.keys, self.metrics = keys, metrics
        self.limiter = Limiter()
        self.intake = Intake()
        self.pool = Pool(settings.max_queued_requests, metrics)
        self.traffic: TrafficKeeper | None = None  # where tokens are kept
        self.draining = False
        self.begun = time.time()

    @property
    def names(self) -> list[str]:
        """What the model may be called, first the name it is shown by."""
        own = self.backend.start.model
        return list(dict.fromkeys(filter(None, (self.settings.served_name, shown_name(own), own))))

    @property
    def model(self) -> ServedModel:
        if self.backend.model is None or self.backend.state != "ready":
            raise ApiError(503, "the model is still being loaded", code="loading", after=2)
        return self.backend.model

    @property
    def defaults(self) -> SamplingParams:
        return self.model.sampling.under(self._defaults, self._given)

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

    def count(self, key: Key) -> None:
        """Count a request against its key, before anything is done for it; or refuse it."""
        self._refuse(self.limiter.count(key))

    def admit(self, key: Key, tokens: int) -> None:
        """Reserves `tokens` for a counted request, or refuses it."""
        self._refuse(self.limiter.admit(key, tokens))

    def _refuse(self, refusal: Refusal | None) -> None:
        if refusal is not None:
            self.metrics.count("admission_rejections", reason="key_limit")
            status, after = (400, None) if refusal.final else (429, refusal.seconds)
            raise ApiError(status, refusal.reason, code="rate_limit_exceeded", after=after)

    def keep_traffic(self, key: Key, call: Call) -> None:
        """Hand over what a marked key was served, if the server keeps any of it."""
        if self.traffic is not None and key.keep_traffic:
            for answer in call.exact_answers():
                self.traffic.keep(key.name, *answer)

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


def owner_of(key: Key | None, salt: str | None) -> str:
    """Whose cache entries a request may use: its key's, and of those only the ones with the same salt."""
    owner = key.owner if key else ""
    return f"{owner}:{hashlib.sha256(salt.encode()).hexdigest()}" if salt else owner
