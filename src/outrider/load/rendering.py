"""Processes that render chat templates (template_process.py), from the parent's side. Any thread may ask.

One process is enough until a render takes long: then another one is started, up to `MOST`. A process that exceeds its
limits is ended, and the next render starts a new one. A process leaves when its parent closes the socket or dies.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from outrider.errors import OutriderError, invalid
from outrider.load.child import ITS_OWN_DOING

MOST = max(2, min(4, os.cpu_count() or 2))  # processes
PATIENCE = 0.05  # seconds to wait for a process that renders before another one is started
START_SECONDS = 60.0
TRIES = 2  # of a render, in case another program ended the process
_LENGTH = struct.Struct("!I")


class Failed(Exception):
    """Why a template was not rendered."""


class Renderers:
    def __init__(self, limits: Mapping[str, Any]) -> None:
        """`limits` are for template_process.py: `characters`, `memory` in bytes, `seconds`, and the `mark`."""
        self._limits = json.dumps(limits).encode()
        self._longest = 4 * int(limits["characters"]) + 1  # bytes of an answer
        self._memory = int(limits["memory"])
        self._reset()
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._forget)

    def _reset(self) -> None:
        self._change = threading.Condition()
        self._idle: list[_Renderer] = []
        self._all: set[_Renderer] = set()

    def prepare(self) -> None:
        """Start a process if there is none, without waiting for it."""
        with self._change:
            if not self._all:
                self._idle.append(self._started())

    def render(self, source: str, variables: Mapping[str, Any], seconds: float) -> str:
        """The text. Raises Failed with the template's problem, InvalidRequest for variables that are no JSON."""
        body = _encoded({"source": source, "variables": variables})
        for _ in range(TRIES):
            if (answer := self._ask(body, seconds)) is not None:
                text = answer[1:].decode("utf-8", "surrogatepass")
                if answer[:1] != b"=":
                    raise Failed(text)
                return text
        raise OutriderError(f"the process that renders chat templates ended {TRIES} times; try again")

    def _ask(self, body: bytes, seconds: float) -> bytes | None:
        """What a process answers; None if another program ended it."""
        renderer = self._take()
        keep = False
        try:
            renderer.await_start(self._limits)
            answer = renderer.ask(body, seconds, self._longest)
            if answer[:1] == b"#":
                raise Failed(f"it takes more than {self._memory >> 20} MB of memory")
            keep = True
            return answer
        except TimeoutError:
            raise Failed(f"it ran longer than {seconds:g} s") from None
        except OSError:
            if renderer.end(gone=True) in ITS_OWN_DOING:
                raise Failed("it is too deep, or takes too much memory") from None
            return None
        finally:
            self._give_back(renderer, keep)

    def _take(self) -> _Renderer:
        with self._change:
            if self._all:
                self._change.wait_for(lambda: self._idle, PATIENCE)
            self._change.wait_for(lambda: self._idle or len(self._all) < MOST)
            return self._idle.pop() if self._idle else self._started()

    def _give_back(self, renderer: _Renderer, keep: bool) -> None:
        if not keep:
            renderer.end()
        with self._change:
            if not keep:
                self._all.discard(renderer)
            elif renderer in self._all:
                self._idle.append(renderer)
            self._change.notify()

    def _started(self) -> _Renderer:
        try:
            renderer = _Renderer()
        except OSError as problem:
            raise OutriderError(
                f"no process can be started to render the chat template in: {problem}"
            ) from None
        self._all.add(renderer)
        return renderer

    def close(self) -> None:
        with self._change:
            every, self._all, self._idle = self._all, set(), []
        for renderer in every:
            renderer.end()

    def _forget(self) -> None:
        """In a forked process: they are the parent's, and a descriptor kept here would keep them alive."""
        for renderer in self._all:
            renderer.disown()
        self._reset()


class _Renderer:
    def __init__(self) -> None:
        self._sock, theirs = socket.socketpair()
        self._ready = False
        command = [sys.executable, "-P", "-m", "outrider.load.template_process", str(theirs.fileno())]
        quiet = subprocess.DEVNULL
        with theirs:
            try:
                self._process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], stdin=quiet, stdout=quiet, stderr=quiet
                )
            except BaseException:
                self._sock.close()
                raise

    def await_start(self, limits: bytes) -> None:
        if not self._ready:
            try:
                self.ask(limits, START_SECONDS, 1)
            except TimeoutError:
                raise ConnectionError(f"it did not start within {START_SECONDS:g} s") from None
            self._ready = True

    def ask(self, body: bytes, seconds: float, longest: int) -> bytes:
        """Raises TimeoutError when the answer takes longer, another OSError when the process is gone."""
        deadline = time.monotonic() + seconds
        self._sock.settimeout(seconds)
        self._sock.sendall(_LENGTH.pack(len(body)) + body)
        return self._receive(deadline, longest)

    def _receive(self, deadline: float, longest: int) -> bytes:
        (size,) = _LENGTH.unpack(self._exactly(_LENGTH.size, deadline))
        if not 0 < size <= longest:
            raise ConnectionError(f"a message of {size} bytes cannot be right")
        return self._exactly(size, deadline)

    def _exactly(self, size: int, deadline: float) -> bytes:
        found = bytearray()
        while len(found) < size:
            self._sock.settimeout(max(deadline - time.monotonic(), 1e-3))
            part = self._sock.recv(min(size - len(found), 1 << 20))
            if not part:
                raise ConnectionError("it is gone")
            found += part
        return bytes(found)

    def end(self, gone: bool = False) -> int:
        """Its exit code. `gone`: it leaves by itself, and its own exit code is wanted."""
        self._sock.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            if gone:
                return self._process.wait(1.0)
        self._process.kill()
        return self._process.wait()

    def disown(self) -> None:
        self._sock.close()
        self._process.returncode = 0  # else it would be waited for


def _encoded(asked: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(asked, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as problem:
        raise invalid("messages", f"must be JSON for the chat template: {problem}") from None
    return text.encode("utf-8", "surrogatepass")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON")
