"""The weights that an engine drafts with: replaces them while requests run, and rolls back.

Weights change between two steps, and the output does not depend on the draft. The caller's thread reads the files, the
engine's thread packs and copies them. The previous weights are kept on the host, so rolling back reads no files.

Weights are mapped into memory, and truncating a mapped file kills the process. A swap therefore reads a private copy of
the draft's files.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

from outrider.draft.drafters import Drafters
from outrider.draft.names import Part
from outrider.draft.reading import NetworkDrafter
from outrider.draft.table import DrafterSources, prepare_weights
from outrider.draft.weights import Weights, copy_of
from outrider.engine.driver import Driver
from outrider.errors import InvalidRequest, OutriderError
from outrider.load.heads import is_eagle

READ = (".safetensors", ".gguf", ".json", ".jinja")  # files of a draft


@dataclass(frozen=True, slots=True)
class DraftState:
    """The draft in use. Rolling back returns to `previous`."""

    drafter: str
    path: Path
    since: float  # seconds since 1970
    previous: Path | None = None


class LiveDraft:
    def __init__(self, parts: Seq[Part], drafters: Drafters, sources: DrafterSources) -> None:
        """Call it on the thread that builds the engine."""
        self.drafters, self.sources = drafters, sources
        self.states: dict[str, DraftState] = {}  # by drafter
        self._last: dict[str, Weights] = {}  # by drafter, of `previous`
        self._lock = threading.Lock()  # one exchange at a time
        networks = {"eagle", "lm"} & set(drafters.names)
        for part in parts:
            if part.kind == "model" and networks:  # not a paired draft that could not be used
                path = sources.find(part.text)
                name = "eagle" if is_eagle(path) else "lm"
                self.states[name] = DraftState(name, path, time.time())

    def swap(self, driver: Driver, path: Path) -> DraftState:
        """Drafts with the weights in this folder from the next step on. Raises if they do not fit the drafter."""
        with self._lock, _private_copy(path) as copy:
            state = self._state(copy)
            pack = prepare_weights(self.drafters[state.drafter], copy, self.sources)
            fresh = DraftState(state.drafter, path, time.time(), state.path)
            return self._exchange(driver, fresh, pack)

    def roll_back(self, driver: Driver) -> DraftState:
        """Drafts with the weights from before the last swap. A second call returns to the swapped ones."""
        with self._lock:
            latest = max(
                (s for name, s in self.states.items() if s.previous is not None and name in self.drafters),
                key=lambda state: state.since,
                default=None,
            )
            if latest is None or latest.previous is None:
                raise InvalidRequest("no draft was swapped, so there is nothing to roll back to", "draft")
            name, last = latest.drafter, self._last[latest.drafter]
            fresh = DraftState(name, latest.previous, time.time(), latest.path)
            return self._exchange(driver, fresh, lambda: last)

    def _exchange(self, driver: Driver, fresh: DraftState, pack: Callable[[], Weights]) -> DraftState:
        name = fresh.drafter
        drafter = self.drafters[name]
        assert isinstance(drafter, NetworkDrafter)

        def exchange() -> None:
            weights, last = pack(), copy_of(drafter.network)
            driver.engine.replace_weights(name, weights)
            self._last[name], self.states[name] = last, fresh

        driver.run(exchange, settled=True)
        return fresh

    def _state(self, path: Path) -> DraftState:
        """The draft that the one in `path` may replace."""
        name = "eagle" if is_eagle(path) else "lm"
        if name not in self.states or name not in self.drafters:  # never there, or released
            kind = {"eagle": "an EAGLE head", "lm": "a model"}[name]
            here = " and ".join(self.drafters.names)
            raise InvalidRequest(
                f"{path} is {kind}, and none drafts here ({here} do); start with one to replace it later",
                "path",
            )
        return self.states[name]


@contextlib.contextmanager
def _private_copy(draft: Path) -> Iterator[Path]:
    """A copy of a draft's files in a temporary folder. Errors name the original."""
    with tempfile.TemporaryDirectory(prefix="outrider-draft-") as place:
        copy = Path(place) / draft.name
        try:
            if draft.is_file():
                shutil.copyfile(draft, copy)
            else:
                copy.mkdir()
                for file in draft.iterdir():
                    if file.suffix in READ and file.is_file():  # no pipe, no device
                        shutil.copyfile(file, copy / file.name)
        except OSError as problem:
            raise OutriderError(f"{draft} cannot be copied to {place}: {problem.strerror}") from None
        try:
            yield copy
        except OutriderError as problem:
            problem.args = (str(problem).replace(str(copy), str(draft)),)
            raise
