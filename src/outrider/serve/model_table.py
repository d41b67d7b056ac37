"""The models of a server: which one a request means, when each is loaded, and when it gives its memory to another.

A model is loaded with the server or for the first request that names it. Where two do not fit together, a model is
unloaded once it has been idle for its `unload_after`, or once a request for another has waited that long: then its own
requests end first, and new ones wait until it is loaded again. No request is dropped for it. A line of a batch waits
until the other model is idle.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence

from outrider.errors import LONGEST_NAME
from outrider.serve.errors import ApiError
from outrider.serve.keys import Key
from outrider.serve.model_room import ModelRoom
from outrider.serve.model_service import ModelService
from outrider.serve.model_spec import ModelSpec, by_name
from outrider.serve.stream import too_late

log = logging.getLogger(__name__)

POLL_SECONDS = 0.02  # between looks at models that may give up their memory
BACKGROUND_WAIT = 5.0  # seconds that a line of a batch waits for its model
BYTES_PER_TOKEN = 4  # of a request whose model's tokenizer is not loaded


class ModelTable:
    def __init__(self, models: Sequence[ModelService], room: ModelRoom | None = None) -> None:
        """`room`: what each model takes of the memory; None: all of them fit."""
        self.models, self.room = models, room
        self._positions = by_name([model.spec for model in models])
        self._loading = asyncio.Lock()  # one model at a time waits for memory
        self._stopping = False

    @property
    def first(self) -> ModelService:
        """The model of requests that name none."""
        return self.models[0]

    @property
    def jobs(self) -> int:
        """Requests at the engines."""
        return sum(len(model.backend.jobs) for model in self.models)

    @property
    def problem(self) -> str:
        """Why the server cannot go on."""
        failed = [model for model in self.models if model.backend.problem]
        named = len(self.models) > 1
        return "; ".join(f"{m.names[0]}: {m.backend.problem}" if named else m.backend.problem for m in failed)

    @property
    def unwell(self) -> ModelService | None:
        """A model because of which the server is not ready: one that has not been loaded since the start, else any if
        no model takes requests.
        """
        new = [m for m in self.models if m.backend.model is None and m.away is None]
        if new or not any(m.usable for m in self.models):
            return (new or self.models)[0]
        return None

    @property
    def most_bytes(self) -> int | None:
        """Bytes of the longest text that fits a model; None where that is not known of all of them."""
        most = [None if m.backend.model is None else m.backend.model.most_bytes for m in self.models]
        return max(filter(None, most)) if all(most) else None

    def allowed(self, key: Key | None) -> list[ModelService]:
        return [model for model in self.models if key is None or key.allows(model.names)]

    def choose(self, name: str | None, key: Key | None) -> ModelService:
        """The model of this name; of requests that name none, the first that their key may use."""
        return self.models[choose_position([m.spec for m in self.models], self._positions, name, key)]

    async def enter(self, model: ModelService, size: int, background: bool = False) -> None:
        """Counts a request of `size` bytes among the users of its model, once that is loaded."""
        if model.away is not None:
            await self._wait(model, 1 + size // BYTES_PER_TOKEN, background)
        model.users += 1

    def leave(self, model: ModelService) -> None:
        model.users -= 1
        model.last_used = time.monotonic()

    async def _wait(self, model: ModelService, tokens: int, background: bool) -> None:
        backend, timeout = model.backend, model.settings.request_timeout
        if background:  # its batch tries again, and others go on meanwhile
            tokens, timeout = 0, BACKGROUND_WAIT
        else:
            backend.refuse_when_full(1, tokens)
        backend.count_queued(int(not background), tokens)
        try:
            async with asyncio.timeout(timeout):
                while model.away is not None:
                    await model.loaded(background)
        except TimeoutError:
            if background:
                raise ApiError(503, "the model is not loaded yet", code="loading", after=1) from None
            raise too_late() from None
        finally:
            backend.count_queued(-int(not background), -tokens)

    async def run(self) -> bool:
        """Keeps the engines running until asked to stop. False: the server cannot go on."""
        tasks = {asyncio.create_task(self._keep(model)): model for model in self.models}
        pending = set(tasks)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            failed = [tasks[task] for task in done if not task.result()]
            if failed and (not pending or any(model.backend.model is None for model in failed)):
                self.stop()
                await asyncio.gather(*pending)
                return False
        return True

    def stop(self) -> None:
        """Have the engines leave; `run` returns when they have."""
        self._stopping = True
        for model in self.models:
            model.wanted.set()
            model.backend.stop()
            model.answer_waiting("the server is shutting down")

    async def wait_idle(self, seconds: float) -> None:
        """Waits for all requests to end, at most so long."""
        await asyncio.gather(*(model.backend.wait_idle(seconds) for model in self.models))

    def fail_all(self, error: ApiError) -> None:
        for model in self.models:
            model.backend.fail_all(error)

    def begin_draining(self) -> None:
        for model in self.models:
            model.backend.last_life = True

    async def _keep(self, model: ModelService) -> bool:
        """Runs the model's engine while it is wanted. False: it cannot be kept running."""
        backend = model.backend
        while not self._stopping:
            running = await self._load(model) if model.away else asyncio.create_task(backend.run())
            if running is None:
                continue
            if not await running:
                model.away = None  # it is failed, and holds no memory
                return False
            if model.away is None:  # it was not unloaded: the server stops
                break
            model.away = "unloaded"
            log.info("model unloaded", extra={"facts": {"model": model.names[0]}})
        return True

    async def _load(self, model: ModelService) -> asyncio.Task[bool] | None:
        """Loads the model for the requests that wait. Returns its running engine, or None."""
        await model.wanted.wait()
        model.away = "loading"
        async with self._loading:
            if not await self._make_room(model) or self._stopping:
                return None
            log.info("loading a model", extra={"facts": {"model": model.names[0]}})
            running = asyncio.create_task(model.backend.run())
            ready = asyncio.create_task(model.backend.ready.wait())
            await asyncio.wait((running, ready), return_when=asyncio.FIRST_COMPLETED)
            ready.cancel()
        loaded = not running.done()
        model.arrived("" if loaded else model.backend.problem or "the engine stopped")
        return running if loaded else None

    async def _make_room(self, model: ModelService) -> bool:
        """False: a model that a request waits for goes before this one, which only lines of batches wait for."""
        while self.room is not None and not self._stopping:
            others = [m for m in self.models if m is not model and m.backend.state != "failed"]
            holding = [m for m in others if m.away in (None, "unloading")]
            if not self.room.lacking([model.spec, *(m.spec for m in holding)], model.spec):
                break
            waited = 0.0 if model.pressed_at is None else time.monotonic() - model.pressed_at
            able = [m for m in holding if m.may_unload(waited) and self.room.shared(model.spec, m.spec)]
            if able:
                await self._unload(min(able, key=lambda m: (m.users, m.last_used)))
            else:
                await asyncio.sleep(POLL_SECONDS)
                if model.pressed_at is None and any(m.pressed_at is not None for m in others):
                    return False
        return True

    async def _unload(self, model: ModelService) -> None:
        """Lets the model's requests end; new ones wait until it is loaded again."""
        model.away = "unloading"
        while model.users and not self._stopping:
            await asyncio.sleep(POLL_SECONDS)
        model.backend.stop()
        while model.away == "unloading" and not self._stopping:
            await asyncio.sleep(POLL_SECONDS)


def choose_position(
    table: Sequence[ModelSpec], positions: Mapping[str, int], name: str | None, key: Key | None
) -> int:
    """The position of the model that a request means."""
    allowed = [i for i, spec in enumerate(table) if key is None or key.allows(spec.names)]
    if name is None and allowed:
        return allowed[0]
    position = None if name is None else positions.get(name)
    if position is None or position not in allowed:
        raise _not_served(name, position is not None, [table[i].names[0] for i in allowed])
    return position


def _not_served(name: str | None, known: bool, names: list[str]) -> ApiError:
    served = ", ".join(map(repr, names)) or "no model"
    if known or name is None:
        which = f"the model {name!r}" if name is not None else "any model of this server"
        text = f"this key may not use {which}; it may use {served}"
        return ApiError(403, text, param="model", code="model_not_allowed")
    verb = "is" if len(names) == 1 else "are"
    text = f"the model {name[:LONGEST_NAME]!r} is not served here; {served} {verb}"
    return ApiError(404, text, param="model", code="model_not_found")
