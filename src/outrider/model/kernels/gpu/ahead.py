"""Kernels that are compiled before anybody launches them, several at a time.

While they are collected, a launch launches nothing: its kernel is put on a list, and threads compile what is on it,
first come first served. Most of their time they spend outside the interpreter, in LLVM, ptxas and the C compiler. A
launch whose kernel is being compiled waits for that one alone; one whose turn has not come is compiled by who launches
it.
"""

# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor

from outrider.model.kernels.gpu.recording import THREAD, Recorded

log = logging.getLogger("outrider.kernels")

LEFT_ALONE = 2  # cores: the engine's and one for everything else
LOOK_SECONDS = 0.5  # between two looks of a thread that is paused whether the interpreter leaves

Key = tuple[Any, ...]

_collecting: ContextVar[bool] = ContextVar("outrider_collecting", default=False)


@dataclass(frozen=True, slots=True)
class Like:
    """In a tensor's place, where nothing is read: what a kernel is compiled for."""

    dtype: torch.dtype
    pointer: int

    def data_ptr(self) -> int:
        return self.pointer


@dataclass(eq=False, slots=True)
class Job:
    key: Key
    compile: Callable[[], None]
    begun: bool = False
    done: threading.Event = field(default_factory=threading.Event)


class CompileAhead:
    """The list, and the threads that compile what is on it; they end with it."""

    def __init__(self, threads: int | None = None) -> None:
        self.most = threads or max(1, _cores() - LEFT_ALONE)
        self.jobs: dict[Key, Job] = {}  # waiting or begun
        self._seen: set[Key] = set()
        self._waiting: deque[Job] = deque()
        self._threads, self._paused = 0, False
        self._changed = threading.Condition()

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """In this thread, from here on, launches only have their kernels compiled, some time."""
        self.resume()
        token = _collecting.set(True)
        try:
            yield
        finally:
            _collecting.reset(token)

    def add(self, key: Key, compile_: Callable[[], None]) -> None:
        """Have something compiled, unless that was asked for before."""
        with self._changed:
            if key in self._seen:
                return
            self._seen.add(key)
            self.jobs[key] = job = Job(key, compile_)
            self._waiting.append(job)
            if self._threads < self.most:
                self._threads += 1
                threading.Thread(target=self._run, args=(_device(),), name=THREAD).start()
            self._changed.notify()

    def settle(self, key: Key) -> bool:
        """If that is being compiled, wait until it is, and say so; what is only waiting is left to who asks."""
        with self._changed:
            job = self.jobs.get(key)
            if job is None:
                return False
            if not job.begun:
                self._waiting.remove(job)
                del self.jobs[key]
                return False
        job.done.wait()
        return True

    def pause(self) -> None:
        """Begin nothing new: somebody is answered, who would feel it."""
        self._paused = True

    def resume(self) -> None:
        if self._paused:
            with self._changed:
                self._paused = False
                self._changed.notify_all()

    def drop(self) -> None:
        """Forget what is waiting. Whoever launches it compiles it."""
        with self._changed:
            for job in self._waiting:
                del self.jobs[job.key]
            self._waiting.clear()
            self._changed.notify_all()

    def _run(self, device: int | None) -> None:
        if device is not None:
            torch.cuda.set_device(device)
        while (job := self._next()) is not None:
            try:
                job.compile()
            except Exception as error:  # whoever launches it meets the same, and says so
                log.debug("compiling ahead failed: %r", error)
            with self._changed:
                del self.jobs[job.key]
            job.done.set()

    def _next(self) -> Job | None:
        """The first that waits. None: there is nothing more to do, or nobody to do it for."""
        with self._changed:
            while self._waiting and self._paused and threading.main_thread().is_alive():
                self._changed.wait(LOOK_SECONDS)
            if not self._waiting or not threading.main_thread().is_alive():
                self._threads -= 1
                return None
            job = self._waiting.popleft()
            job.begun = True
            return job


class Kernel:
    """A kernel that is launched as Triton's are: `kernel[grid](...)`."""

    def __init__(self, jit: Any) -> None:
        self.jit, self.__name__, self.__doc__ = jit, jit.__name__, jit.__doc__

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        if not AHEAD.jobs and not _collecting.get():
            return self.jit[grid]

        def launch(*given: Any, **options: Any) -> Any:
            if _collecting.get():
                return self._collect(given, options)
            Recorded.kernels += AHEAD.settle(self._key(given, options))
            return self.jit[grid](*given, **options)

        return launch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.jit, name)

    def _collect(self, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        jit, active = self.jit, triton.runtime.driver.active
        _ = jit.device_caches[active.get_current_device()]  # made here: threads must not each make their own
        alike = [_like(one) if isinstance(one, Tensor) else one for one in given]

        def compile_() -> None:
            made = jit.run(*alike, grid=(1,), warmup=True, **options)
            if made is not None and hasattr(active, "launcher_cls"):
                # Some releases of Triton have the C compiler make what launches a kernel. It stays on disk.
                active.launcher_cls(made.src, made.metadata)

        AHEAD.add(self._key(given, options), compile_)

    def _key(self, given: tuple[Any, ...], options: dict[str, Any]) -> Key:
        """What decides which kernel it is: of tensors the type and whether they are aligned, of numbers whether they
        are one or can be divided by 16.
        """
        kinds = [_kind(one, param) for one, param in zip(given, self.jit.params, strict=False)]
        return self.__name__, *kinds, *options.items()


def kernel(function: Any = None, **how: Any) -> Any:
    """As `triton.jit`, for kernels that can be compiled ahead."""
    if function is None:
        return lambda function: Kernel(triton.jit(function, **how))
    return Kernel(triton.jit(function))


def is_collecting() -> bool:
    """Whether what kernels would write stays as it was."""
    return _collecting.get()


def _like(tensor: Tensor) -> Like:
    return Like(tensor.dtype, tensor.data_ptr() % 16)


def _kind(given: Any, param: Any) -> Any:
    if isinstance(given, Tensor):
        return given.dtype, given.data_ptr() % 16 == 0
    if isinstance(given, bool) or not isinstance(given, int):
        return given if given is None or isinstance(given, bool) else type(given)
    wide = not -(2**31) <= given < 2**31
    return (wide,) if param.do_not_specialize else (wide, given == 1, given % 16 == 0)


def _device() -> int | None:
    return torch.cuda.current_device() if torch.cuda.is_available() and torch.cuda.is_initialized() else None


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


AHEAD = CompileAhead()
