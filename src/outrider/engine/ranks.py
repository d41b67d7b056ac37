"""The processes of a tensor parallel engine: rank 0 starts the others, watches them, and tells them what to run.

Each of the others has a socket to rank 0. Rank 0 sends its start, then the calls of its model (model/parallel.py). The
other sends that it is ready, or why it failed, and every second that it lives. A rank whose socket closes, or that is
silent for SILENT_SECONDS, is lost, and the engine ends with an error that names it.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from outrider.engine.memory import runs_on_gpu
from outrider.errors import OutriderError, RankLost, UnsupportedModel, invalid
from outrider.load.checkpoint import Checkpoint
from outrider.model.parallel import Ranks
from outrider.settings import Settings, usable_cores

MODULE = "outrider.engine.rank_process"
PULSE_SECONDS = 1.0  # between two signs of life
SILENT_SECONDS = 20.0  # without one, after which a rank is lost
LEAVE_SECONDS = 5.0  # that a rank has to end once its socket is closed
REASON_SECONDS = 3.0  # until a rank that died is seen to be dead
LENGTH = 8  # bytes before a message that give its length


def check_ranks(checkpoint: Checkpoint, settings: Settings) -> None:
    """Raises if this model or machine does not allow `tensor_parallel`, before anything is loaded."""
    size, config = settings.tensor_parallel, checkpoint.config
    if config is None:
        raise UnsupportedModel(
            "a model run through transformers runs in one process; leave out --tensor-parallel"
        )
    if settings.kernels == "torch":
        raise invalid(
            "tensor_parallel", "needs the C kernels, whose bits do not depend on it; leave out --kernels"
        )
    on_gpu, kv_heads = runs_on_gpu(settings), min(spec.kv_heads for spec in config.specs)
    if kv_heads < size:
        raise invalid(
            "tensor_parallel", f"{size} is more than the {kv_heads} key-value heads that ranks can share here"
        )
    if on_gpu and kv_heads % size:  # the fullest GPU would decide how many tokens all can hold
        fitting = ", ".join(str(n) for n in range(1, kv_heads + 1) if kv_heads % n == 0)
        raise invalid(
            "tensor_parallel",
            f"{size} does not divide the {kv_heads} key-value heads of this model; take {fitting}",
        )
    there, what = usable_cores(), "cores"
    if on_gpu:
        there, what = torch.cuda.device_count(), "GPUs"
    if size > there:
        raise invalid(
            "tensor_parallel", f"{size} is more than the {what} of this machine; take at most {there}"
        )


class OtherRanks:
    """Ranks 1 to N - 1, as rank 0 sees them."""

    def __init__(self, model: Path, settings: Settings) -> None:
        """Starts them; they load their parts while rank 0 loads its own."""
        size = settings.tensor_parallel
        self.group = Ranks(0, size, self)
        self.lost: RankLost | None = None
        self.on_lost: Callable[[RankLost], None] | None = None
        self._ready: set[int] = set()
        self._closing = False
        self._changed = threading.Condition()
        self._folder = tempfile.TemporaryDirectory(prefix="outrider-ranks-")
        self._meeting = str(Path(self._folder.name) / "meeting")
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._watcher: threading.Thread | None = None
        try:
            for rank in range(1, size):
                self._start(
                    rank, {"model": str(model), "settings": asdict(settings), "meeting": self._meeting}
                )
        except OSError as problem:
            self.close()
            raise OutriderError(
                f"the processes of {size} ranks cannot be started: {problem.strerror}"
            ) from None
        self._watcher = threading.Thread(target=self._watch, name="outrider-ranks", daemon=True)
        self._watcher.start()

    def _start(self, rank: int, start: dict[str, object]) -> None:
        ours, theirs = socket.socketpair()
        self._sockets[rank] = ours
        with theirs:
            # -P: what lies in the working directory, a downloaded model's torch.py say, is not ours to run.
            command = [sys.executable, "-P", "-m", MODULE, str(theirs.fileno())]
            self._processes[rank] = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        send(ours, json.dumps({**start, "rank": rank}).encode())

    def meet(self, device: torch.device) -> None:
        """Waits until every rank has loaded its part, and connects them."""
        with self._changed:
            self._changed.wait_for(lambda: self.lost is not None or len(self._ready) == len(self._processes))
        if self.lost is not None:
            raise self.lost
        try:
            self.group.connect(dist.FileStore(self._meeting, self.group.size), device)
        except RuntimeError as error:
            raise self.reason(error) from error

    # ---------------------------------------------------------------------------------------- the channel

    def send(self, message: bytes) -> None:
        if self.lost is not None:
            raise self.lost
        try:
            for sock in self._sockets.values():
                send(sock, message)
        except OSError as error:
            raise self.reason(error) from error

    def reason(self, error: BaseException) -> BaseException:
        if isinstance(error, (RuntimeError, OSError)):
            with self._changed:
                self._changed.wait_for(lambda: self.lost is not None, REASON_SECONDS)
        return self.lost or error

    # -------------------------------------------------------------------------------------- the processes

    def _watch(self) -> None:
        seen: dict[int, float] = {}
        with selectors.DefaultSelector() as selector:
            for rank, sock in self._sockets.items():
                selector.register(sock, selectors.EVENT_READ, rank)
            while not self._closing and self.lost is None:
                for key, _ in selector.select(PULSE_SECONDS):
                    rank = key.data
                    seen[rank] = time.monotonic()
                    self._receive(rank)
                for rank, last in seen.items():
                    if time.monotonic() - last > SILENT_SECONDS:
                        self._processes[rank].kill()
                        self._lose(rank, f"did not answer for {SILENT_SECONDS:.0f} s")

    def _receive(self, rank: int) -> None:
        try:
            message = receive(self._sockets[rank])
        except OSError:
            message = None
        if message is None:
            self._lose(rank, self._end_of(rank))
        elif message:
            said = json.loads(message)
            if "failed" in said:
                self._lose(rank, f"failed: {said['failed']}")
            else:
                with self._changed:
                    self._ready.add(rank)
                    self._changed.notify_all()

    def _end_of(self, rank: int) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._processes[rank].wait(REASON_SECONDS)
            if code >= 0:
                return f"ended with status {code}"
            with contextlib.suppress(ValueError):
                return f"was ended by {signal.Signals(-code).name}"
        return "hung up"

    def _lose(self, rank: int, why: str) -> None:
        with self._changed:
            if self._closing or self.lost is not None:
                return
            self.lost = RankLost(f"rank {rank} of {self.group.size} (tensor parallel) {why}")
            self._changed.notify_all()
        self.group.abort()
        self._hang_up()  # the others end, too
        if self.on_lost:
            self.on_lost(self.lost)

    def close(self) -> None:
        """Ends the other ranks. Call it when no call is running."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._hang_up()
        until = time.monotonic() + LEAVE_SECONDS
        for process in self._processes.values():
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join()
        for sock in self._sockets.values():
            sock.close()
        self._folder.cleanup()

    def _hang_up(self) -> None:
        for sock in self._sockets.values():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def send(sock: socket.socket, message: bytes) -> None:
    sock.sendall(len(message).to_bytes(LENGTH, "little") + message)


def receive(sock: socket.socket) -> bytes | None:
    """The next message, None if the other side hung up."""
    head = _exactly(sock, LENGTH)
    return None if head is None else _exactly(sock, int.from_bytes(head, "little"))


def messages(sock: socket.socket) -> Iterator[bytes]:
    while (message := receive(sock)) is not None:
        yield message


def _exactly(sock: socket.socket, count: int) -> bytes | None:
    got = bytearray(count)
    view = memoryview(got)
    while view:
        some = sock.recv_into(view)
        if not some:
            return None
        view = view[some:]
    return bytes(got)
