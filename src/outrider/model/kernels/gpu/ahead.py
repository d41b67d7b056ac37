"""Compiles kernels ahead of their first launch, several at a time.

While kernels are collected, a launch only puts its kernel on a list. Threads compile the list in order; most of their
time is spent outside the interpreter, in LLVM, ptxas and the C compiler. A launch whose kernel is being compiled waits
for that kernel alone. A launch whose kernel is still on the list compiles it itself.
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
from triton.tools.tensor_descriptor import TensorDescriptor

from outrider.model.kernels.gpu.recording import THREAD, Recorded

log = logging.getLogger("outrider.kernels")

LEFT_ALONE = 2  # cores for the engine and for everything else
LOOK_SECONDS = 0.5  # how often a paused thread checks whether the interpreter exits

Key = tuple[Any, ...]

_collecting: ContextVar[bool] = ContextVar("outrider_collecting", default=False)


@dataclass(frozen=True, slots=True)
class Like:
    """Stands for a tensor while kernels are collected: it has what compilation depends on, and no data."""

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
    """The list of kernels, and the threads that compile it and end with it."""

    def __init__(self, threads: int | None = None) -> None:
        self.most = threads or max(1, _cores() - LEFT_ALONE)
        self.jobs: dict[Key, Job] = {}  # waiting or begun
        self._seen: set[Key] = set()
        self._waiting: deque[Job] = deque()
        self._threads, self._paused = 0, False
        self._changed = threading.Condition()

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """From now on, launches of this thread only put their kernels on the list."""
        self.resume()
        token = _collecting.set(True)
        try:
            yield
        finally:
            _collecting.reset(token)

    def add(self, key: Key, compile_: Callable[[], None]) -> None:
        """Puts a kernel on the list, unless it was there before."""
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
        """Waits if the kernel is being compiled. Takes one that is only listed off the list and returns False."""
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
        """Starts no further compilation: it would slow down running requests."""
        self._paused = True

    def resume(self) -> None:
        if self._paused:
            with self._changed:
                self._paused = False
                self._changed.notify_all()

    def drop(self) -> None:
        """Clears the list. Kernels that were on it are compiled at their launch."""
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
            except Exception as error:  # the launch raises the same error and reports it
                log.debug("compiling ahead failed: %r", error)
            with self._changed:
                del self.jobs[job.key]
            job.done.set()

    def _next(self) -> Job | None:
        """The first kernel on the list. None: the list is empty, or the interpreter exits."""
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
    """A kernel with Triton's launch syntax: `kernel[grid](...)`."""

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
        """The key of a specialised kernel: dtypes, alignment, and whether numbers are 1 or divisible by 16."""
        kinds = [_kind(one, param) for one, param in zip(given, self.jit.params, strict=False)]
        return self.__name__, *kinds, *options.items()


def kernel(function: Any = None, **how: Any) -> Any:
    """As `triton.jit`, for kernels that can be compiled ahead."""
    if function is None:
        return lambda function: Kernel(triton.jit(function, **how))
    return Kernel(triton.jit(function))


def is_collecting() -> bool:
    """Whether kernels are collected, so that their outputs stay unwritten."""
    return _collecting.get()


def _like(tensor: Tensor) -> Like:
    return Like(tensor.dtype, tensor.data_ptr() % 16)


def _kind(given: Any, param: Any) -> Any:
    if isinstance(given, TensorDescriptor):
        return given.base.dtype, *given.block_shape
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
