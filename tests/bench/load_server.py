"""A server on loopback that says what it is asked to say, when it is asked to: for tests of the load generator.

    python -m tests.bench.load_server --port 8199 --first 0.1 --gap 0.02

serves until it is stopped, with waits of half to one and a half times these seconds: for load generators to agree on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Pause = Callable[[int], Awaitable[None]]  # before event so-and-so


@dataclass
class Script:
    """How it behaves."""

    tokens: int | None = 5  # of an answer; None: as many as are asked for
    per_event: int = 1
    usage: bool = True
    cache: bool = False  # a token a word, and a prefix cache that forgets nothing
    ids: bool = False  # events list their tokens
    framing: str = "chunked"  # or length, close
    status: int = 200
    said: str = "no"  # of an error
    fail_every: int = 0  # every so-manieth request has the status 503
    breaks: int | None = None  # hang up after so many events
    error_at: int | None = None  # an error event in that place
    whole: bool = False  # not streamed
    tokenize: bool = True
    key: str | None = None
    models: bool = True
    hang_up_idle: bool = False  # close the connection after each answer, unannounced
    pause: Pause | None = None


@dataclass
class Seen:
    """A request as the server saw it; times by the clock that all processes share."""

    path: str
    body: dict[str, Any]
    at: float
    connection: int
    sent: list[float] = field(default_factory=list)


class LoadServer:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.seen: list[Seen] = []
        self.connections = 0
        self.most = 0  # answers at once
        self.running = 0
        self.cached: set[tuple[str, ...]] = set()  # prompts with their answers, and every prefix of them
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def asked(self) -> list[Seen]:
        return [one for one in self.seen if one.path.endswith("completions")]

    async def start(self, port: int = 0) -> asyncio.Server:
        server = await asyncio.start_server(self._connection, "127.0.0.1", port)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = head.strip().split("\r\n")
                headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
                data = await reader.readexactly(int(headers["content-length"]))
                path = first.split()[1]
                seen = Seen(path, json.loads(data) if data else {}, time.perf_counter(), number)
                self.seen.append(seen)
                self.running += 1
                self.most = max(self.most, self.running)
                try:
                    going = await self._answer(seen, headers, writer)
                finally:
                    self.running -= 1
                if not going:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    async def _answer(self, seen: Seen, headers: dict[str, str], writer: asyncio.StreamWriter) -> bool:
        script = self.script
        if script.key is not None and headers.get("authorization") != f"Bearer {script.key}":
            return self._plain(writer, 401, {"error": {"message": "a key is needed"}})
        if seen.path == "/v1/models" and script.models:
            return self._plain(writer, 200, {"data": [{"id": "tiny"}]})
        if seen.path == "/tokenize" and script.tokenize:
            return self._plain(writer, 200, {"count": len(seen.body["prompt"].split())})
        if not seen.path.endswith("completions"):
            return self._plain(writer, 404, {"detail": "Not Found"})
        failing = script.fail_every and len(self.asked) % script.fail_every == 0
        if script.status != 200 or failing:
            return self._plain(writer, 503 if failing else script.status, {"error": {"message": script.said}})
        if script.whole:
            return self._plain(writer, 200, {"choices": [{"text": "all"}]})
        going = await self._stream(seen, writer)
        return going and not script.hang_up_idle

    def _plain(self, writer: asyncio.StreamWriter, status: int, body: Any) -> bool:
        data = json.dumps(body).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        return True

    async def _stream(self, seen: Seen, writer: asyncio.StreamWriter) -> bool:
        script = self.script
        framing = {"chunked": "transfer-encoding: chunked\r\n", "close": "connection: close\r\n"}
        events = [event async for event in self._events(seen)] if script.framing == "length" else None
        size = (
            f"content-length: {sum(map(len, events))}\r\n" if events is not None else framing[script.framing]
        )
        writer.write(
            f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n{size}\r\n".encode()
        )
        number = 0
        async for event in self._events(seen):
            if script.breaks is not None and number == script.breaks:
                writer.transport.abort()
                return False
            if script.pause is not None:
                await script.pause(number)
            seen.sent.append(time.perf_counter())
            writer.write(b"%x\r\n%s\r\n" % (len(event), event) if script.framing == "chunked" else event)
            await writer.drain()
            number += 1
        if script.framing == "chunked":
            writer.write(b"0\r\n\r\n")
        return script.framing != "close"

    async def _events(self, seen: Seen) -> AsyncIterator[bytes]:
        script, chat = self.script, "messages" in seen.body
        left = seen.body.get("max_tokens", 5) if script.tokens is None else script.tokens
        total = left
        if chat:
            yield _event(choices=[{"delta": {"role": "assistant", "content": ""}}])
        number = 0
        while left:
            if number == script.error_at:
                yield _event(error={"message": "it broke"})
                return
            count = min(left, script.per_event)
            left -= count
            choice: dict[str, Any] = {"delta": {"content": "x"}} if chat else {"text": "x"}
            choice |= {"token_ids": [7] * count} if script.ids else {}
            yield _event(choices=[{**choice, "finish_reason": None if left else "length"}])
            number += 1
        if script.usage:
            usage = self._prompt(seen, total) if script.cache else {"prompt_tokens": 3}
            yield _event(choices=[], usage={**usage, "completion_tokens": total})
        yield b"data: [DONE]\n\n"

    def _prompt(self, seen: Seen, answer: int) -> dict[str, Any]:
        words = tuple(" ".join(one["content"] for one in seen.body["messages"]).split())
        hit = max((n for n in range(len(words) + 1) if words[:n] in self.cached), default=0)
        said = (*words, "x" * answer)
        self.cached |= {said[:n] for n in range(len(said) + 1)}
        return {"prompt_tokens": len(words), "prompt_tokens_details": {"cached_tokens": hit}}


def _event(**body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


@contextmanager
def serving(**script: Any) -> Iterator[LoadServer]:
    """In a thread of its own, with its own event loop."""
    server = LoadServer(Script(**script))
    loop = asyncio.new_event_loop()
    started = loop.run_until_complete(server.start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(_stop(started), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def _stop(server: asyncio.Server) -> None:
    server.close()
    mine = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in mine:
        task.cancel()
    await asyncio.gather(*mine, return_exceptions=True)


async def paced(port: int, first: float, gap: float) -> None:
    chance = random.Random(0)

    async def pause(number: int) -> None:
        await asyncio.sleep((gap if number else first) * chance.uniform(0.5, 1.5))

    server = LoadServer(Script(tokens=None, pause=pause))
    async with await server.start(port) as started:
        print(f"listening on {server.url}", flush=True)
        await started.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=8199)
    parser.add_argument("--first", type=float, default=0.1, help="seconds to the first event, on average")
    parser.add_argument("--gap", type=float, default=0.02, help="seconds between events")
    asyncio.run(paced(**vars(parser.parse_args())))
