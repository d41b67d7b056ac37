"""Shared by the measurements of the server: a server in processes of its own, and a client cheap enough to run beside
it on the same cores.

The client speaks just enough HTTP/1.1 for this project's server, on asyncio's streams. Unlike the client of
`outrider bench serve` it can read slowly and hang up in the middle of an answer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import psutil

from outrider.engine.certificate import certificate

DONE = b"[DONE]"
LINE = re.compile(r"^outrider:(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    return parser


def arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The script's own arguments; `flags` holds those after `--`, which are the server's."""
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    given = parser.parse_args(words[:end])
    given.flags = words[end + 1 :]
    return given


def deliver(file: Path | None, module: str, report: dict[str, Any]) -> None:
    """Writes the report with the certificate of `python -m module`, if a file is given."""
    if file is not None:
        file.write_text(json.dumps({"certificate": certificate(f"python -m {module}"), **report}))


def read_prompts(file: Path, most: int, longest: int = 1500) -> list[str]:
    """The first turns of `most` rows, spread evenly over a JSON-lines file; rows have `turns` or `prompt`."""
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    texts = [row["turns"][0] if "turns" in row else row["prompt"] for row in rows]
    texts = [text for text in texts if len(text) <= longest]
    if len(texts) < most:
        raise SystemExit(
            f"{file} has {len(texts)} prompts of at most {longest} characters; {most} are needed"
        )
    return [texts[i * len(texts) // most] for i in range(most)]


class Server:
    """`outrider serve` on a free port, as a context. `log` is what it printed."""

    def __init__(self, model: str, *flags: str, seconds: float = 300) -> None:
        command = [sys.executable, "-m", "outrider", "serve", model, "--port", "0", *flags]
        self.log: list[str] = []
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.host, self.port = self._address(seconds)
        except BaseException:
            self.process.kill()
            raise

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.append(line)

    def _address(self, seconds: float) -> tuple[str, int]:
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            for line in list(self.log):
                if found := re.match(r"ready\s+http://(.+):(\d+)/v1", line):
                    return found[1], int(found[2])
            time.sleep(0.05)
        raise SystemExit("the server did not start:\n" + "".join(self.log))

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()

    def engine(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        return next(child for child in children if "engine_process" in " ".join(child.cmdline()))

    def held(self) -> dict[str, float]:
        """Resident memory in MB by process; descriptors and threads of all the server's processes together."""
        own, engine = psutil.Process(self.process.pid), self.engine()
        family = [own, *own.children(recursive=True)]
        sizes = {process.pid: process.memory_info().rss / 2**20 for process in family}
        return {
            "memory of the API process": sizes.pop(own.pid),
            "memory of the engine": sizes.pop(engine.pid),
            "memory of other processes": sum(sizes.values()),
            "number of descriptors": sum(process.num_fds() for process in family),
            "number of threads": sum(process.num_threads() for process in family),
        }

    async def metrics(self) -> dict[str, float]:
        """Every series by name, labels summed over."""
        reply = await ask(self.host, self.port, "GET", "/metrics")
        totals: dict[str, float] = {}
        for name, value in LINE.findall(reply.body.decode()):
            totals[name] = totals.get(name, 0.0) + float(value)
        return totals


class Reply(msgspec.Struct):
    """An answer in one piece."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return msgspec.json.decode(self.body)


class Connection:
    """One connection, kept open between requests."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.status = 0
        self.headers: dict[str, str] = {}

    @classmethod
    async def open(cls, host: str, port: int, small: bool = False) -> Connection:
        """`small`: with small receive buffers, so that the server soon notices a client that does not read."""
        sock = socket.socket()
        if small:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (host, port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return cls(*await asyncio.open_connection(sock=sock, limit=2048 if small else 1 << 20))

    def send(self, method: str, path: str, body: Any = None) -> None:
        data = b"" if body is None else body if isinstance(body, bytes) else msgspec.json.encode(body)
        lines = [f"{method} {path} HTTP/1.1", "host: localhost", f"content-length: {len(data)}"]
        self.writer.write("\r\n".join([*lines, "content-type: application/json", "", ""]).encode() + data)

    async def head(self) -> int:
        """Status and headers of the answer."""
        line = await self.reader.readline()
        if not line:
            raise ConnectionError("the server hung up")
        self.status, self.headers = int(line.split()[1]), {}
        while (line := await self.reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            self.headers[name.lower()] = value.strip()
        return self.status

    async def parts(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        if "chunked" not in self.headers.get("transfer-encoding", ""):
            yield await self.reader.readexactly(int(self.headers.get("content-length", 0)))
            return
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            yield await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The events of a stream. Raises if the stream ends without [DONE] or an error."""
        partial, ended = b"", False
        async for part in self.parts():
            *whole, partial = (partial + part).split(b"\n\n")
            for event in whole:
                data = event.removeprefix(b"data: ")
                if data == DONE:
                    ended = True
                elif event.startswith(b"data: "):
                    said = msgspec.json.decode(data)
                    ended = ended or "error" in said
                    yield said
        if not ended:
            raise ConnectionError("the stream broke off")

    async def ask(self, method: str, path: str, body: Any = None) -> Reply:
        self.send(method, path, body)
        await self.head()
        return Reply(self.status, self.headers, b"".join([part async for part in self.parts()]))

    def close(self) -> None:
        self.writer.transport.abort()


async def ask(host: str, port: int, method: str, path: str, body: Any = None) -> Reply:
    """One request on a connection of its own."""
    connection = await Connection.open(host, port)
    with contextlib.closing(connection):
        return await connection.ask(method, path, body)
