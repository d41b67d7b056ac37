"""A server in a process of its own, asked over loopback: what a replica of a model consists of.

`python -m outrider.serve.replica` reads a model and settings as msgpack from its stdin, which its parent wrote, and
serves them until it is stopped or its parent dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import re
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import IO

import h11
import msgspec

from outrider.errors import OutriderError
from outrider.load.child import PR_SET_PDEATHSIG
from outrider.serve.model_spec import ModelSpec
from outrider.serve.settings import ServeSettings

Headers = Sequence[tuple[bytes, bytes]]
CHUNK = 64 << 10
STOP_SECONDS = 10.0  # beyond the time for draining
# Of one connection, which the replica makes anew. What it accepts must come as it is.
HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"host", b"transfer-encoding", b"content-length", b"upgrade"}
)


class ReplicaServer:
    def __init__(self, spec: ModelSpec, serve: ServeSettings) -> None:
        """`serve`: as the address in front has it. This server listens on loopback, and drains as long."""
        self.spec = replace(spec, serve=replace(spec.serve, load="start"))
        self.serve = replace(serve, host="127.0.0.1", port=0, allowed_hosts=("*",))
        self.port, self._own = 0, secrets.token_urlsafe(32)
        if serve.api_keys or serve.key_file:
            self.serve = replace(self.serve, api_keys=(*serve.api_keys, self._own))
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Returns once the model is loaded. Raises if it cannot be."""
        command = [sys.executable, "-P", "-m", "outrider.serve.replica"]
        # On this thread, which lives as long as the replica: the process ends with the thread that started it.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(msgspec.msgpack.encode((self.spec, self.serve)))
        self._process.stdin.close()
        self.port = await asyncio.to_thread(_port_of, self._process.stdout)
        threading.Thread(target=_pass_on, args=(self._process.stdout,), daemon=True).start()
        while (await self.get("/health"))[0] != 200:
            await asyncio.sleep(0.1)
            self.check_alive()

    def check_alive(self) -> None:
        if self._process is None or self._process.poll() is not None:
            raise OutriderError(f"the server of {self.spec.name} has ended; its log says why")

    def stop(self) -> None:
        """Lets running requests end, as SIGTERM does with any server."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(self.serve.drain_seconds + STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()

    async def get(self, path: str) -> tuple[int, bytes]:
        bearer = (b"authorization", b"Bearer " + self._own.encode())
        parts = [part async for part in self.ask("GET", path, [bearer], b"")]
        (status, _), *body = parts
        assert isinstance(status, int)
        return status, b"".join(part for part in body if isinstance(part, bytes))

    async def ask(
        self, method: str, path: str, headers: Headers, body: bytes
    ) -> AsyncIterator[tuple[int, Headers] | bytes]:
        """Status and headers of the answer, then its bytes as they come. Closing it ends the request."""
        self.check_alive()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            wire = h11.Connection(h11.CLIENT)
            kept = [(name, value) for name, value in headers if name.lower() not in HOP_BY_HOP]
            own = [(b"host", b"127.0.0.1"), (b"connection", b"close"), (b"content-length", b"%d" % len(body))]
            for event in (
                h11.Request(method=method, target=path, headers=[*kept, *own]),
                h11.Data(body),
                h11.EndOfMessage(),
            ):
                writer.write(wire.send(event) or b"")
            async for part in _received(wire, reader):
                yield part
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def _received(
    wire: h11.Connection, reader: asyncio.StreamReader
) -> AsyncIterator[tuple[int, Headers] | bytes]:
    while True:
        event = wire.next_event()
        if event is h11.NEED_DATA:
            wire.receive_data(await reader.read(CHUNK))
        elif isinstance(event, h11.Response):
            kept = [(name, value) for name, value in event.headers if name not in HOP_BY_HOP]
            yield event.status_code, kept
        elif isinstance(event, h11.Data):
            yield bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            return
        elif isinstance(event, h11.ConnectionClosed):
            raise ConnectionError("the server ended its answer early")


def _port_of(out: IO[bytes]) -> int:
    """From the line that says where it listens."""
    for line in out:
        if found := re.search(rb"listening on http://127\.0\.0\.1:(\d+)", line):
            return int(found[1])
    raise OutriderError("the server ended before it listened; its log says why")


def _pass_on(out: IO[bytes]) -> None:
    for line in out:
        print(line.decode(errors="replace"), end="", file=sys.stderr)


def main() -> int:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    spec, serve = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=tuple[ModelSpec, ServeSettings])
    from outrider.serve.server import run_server

    try:
        return run_server([spec], serve)
    except OutriderError as problem:
        print(f"error: {problem}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
