"""What one hostile client costs everyone else: first tokens and `/health` while the server is attacked, against quiet.

    python -m bench.serve_attacks smollm2-135m [--only TEXT] [--rounds 5] [--json OUT.json] [-- SERVER FLAGS]

Attackers run in a process of their own, at low priority: in earnest they would be on another machine. The rounds of
chats take turns, one without attackers and one with them. It ends within about three minutes. `--only "one request"`:
what a single request of up to 8 MB costs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing as mp
import os
import selectors
import socket
import statistics
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from bench.serving import Connection, Server, arguments, ask, birth_certificate

CHAT = "/v1/chat/completions"
DIGITS = json.dumps({"messages": [{"role": "user", "content": "7" * 7_900_000}]}).encode()
CLIENTS, TRICKLING, SENDING = 8, 500, 20
TIMEOUT = 3.0  # seconds the server gives headers and bodies here
LONGEST = 60.0  # seconds any one attack may take
TARGETS = {"digits_ms": 100, "later_ms": 20, "health_p99_ms": 300, "health_worst_ms": 250}
BLOCK = b'{"type":"text","text":"%b"},' % (b"a" * 24)
SIZE = 8_200_000  # bytes of one request

_numbers = itertools.count()


def single_requests() -> dict[str, bytes]:
    """Attacks of one request, by name, as they are sent."""

    def chat(fields: bytes, path: str = CHAT, content: bytes = b'"hi"') -> bytes:
        body = b'{"messages":[{"role":"user","content":%b}],"max_tokens":1%b}' % (content, fields)
        return head(len(body), path) + body

    def long(unit: bytes) -> bytes:
        return chat(b',"user":' + unit * (SIZE // len(unit)))

    blocks = b"[" + BLOCK * (SIZE // len(BLOCK)) + BLOCK[:-1] + b"]"
    small = b'{"prompt":"hi","max_tokens":1}' + b" " * 100_000
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in small) + b"0\r\n\r\n"
    chunked = head(0, "/v1/completions").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    return {
        "a tree of 10,000 levels": chat(b',"speculative_decoding":{"tree":[%b2]}' % (b"2," * 9_999)),
        "names": chat(b',"metadata":{%b}' % b",".join(b'"%d":0' % i for i in range(SIZE // 11))),
        "quotes": long(b'"'),
        "spaces": long(b" "),
        "closing brackets": long(b"]"),
        "100 KB in chunks of one byte": chunked + chunks,
        "blocks of 24 letters, /v1/messages": chat(b"", "/v1/messages", blocks),
        "the same, count_tokens": chat(b"", "/v1/messages/count_tokens", blocks),
    }


def head(length: int, path: str = CHAT) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json")
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


# ----------------------------------------------------------------------------------------------- attackers


def digits_in_a_loop(host: str, port: int, on: Any, stop: Any) -> None:
    """Eight clients, each sending eight megabytes of digits again as soon as it is refused, while `on` is set."""
    os.nice(19)

    def client() -> None:
        while not stop.is_set():
            if on.wait(0.1):
                with contextlib.suppress(OSError), socket.create_connection((host, port), 5) as sock:
                    with contextlib.suppress(OSError):
                        sock.sendall(head(len(DIGITS)) + DIGITS)
                    sock.recv(65536)

    threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def hold(host: str, port: int, count: int, begin: bytes, more: bytes, pause: float, result: Any) -> None:
    """Connections that begin a request and go on sending; `result`: seconds until the server closed the last."""
    os.nice(19)
    watch = selectors.DefaultSelector()
    for _ in range(count):
        sock = socket.create_connection((host, port), 10)
        sock.sendall(begin)
        sock.setblocking(False)
        watch.register(sock, selectors.EVENT_WRITE | selectors.EVENT_READ)
    began = time.monotonic()
    while watch.get_map() and time.monotonic() - began < LONGEST:
        for key, _ in watch.select(0):
            sock = key.fileobj  # type: ignore[assignment]
            try:
                with contextlib.suppress(BlockingIOError):
                    sock.recv(65536)
                with contextlib.suppress(BlockingIOError):
                    sock.send(more)
            except OSError:
                watch.unregister(sock)
                sock.close()
        time.sleep(pause)
    result.value = -1.0 if watch.get_map() else time.monotonic() - began


# ----------------------------------------------------------------------------------------------- measuring


@contextlib.asynccontextmanager
async def health(server: Server) -> AsyncIterator[list[float]]:
    """Seconds that `/health` took, asked on fresh connections while the context lasts."""
    taken: list[float] = []

    async def watch() -> None:
        while True:
            began = time.perf_counter()
            reply = await ask(server.host, server.port, "GET", "/health")
            taken.append(time.perf_counter() - began if reply.status == 200 else LONGEST)
            await asyncio.sleep(0.02)

    task = asyncio.create_task(watch())
    try:
        yield taken
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def p99(taken: list[float]) -> float:
    return sorted(taken)[int(0.99 * (len(taken) - 1))]


async def first_token(server: Server) -> float:
    """Seconds to a chat's first text, on a connection of its own and with a prompt of its own."""
    question = f"{next(_numbers)}: name a colour."
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 2,
        "temperature": 0,
        "stream": True,
    }
    connection = await Connection.open(server.host, server.port)
    with contextlib.closing(connection):
        began = time.perf_counter()
        connection.send("POST", CHAT, body)
        await connection.head()
        seconds = 0.0
        async for event in connection.events():
            if not seconds and event["choices"][0]["delta"].get("content"):
                seconds = time.perf_counter() - began
        return seconds or time.perf_counter() - began


async def alone(server: Server, raw: bytes) -> dict[str, float]:
    async with health(server) as watched:
        connection = await Connection.open(server.host, server.port)
        with contextlib.closing(connection):
            began = time.perf_counter()
            connection.writer.write(raw)
            status = await connection.head()
            seconds = time.perf_counter() - began
        await asyncio.sleep(0.2)  # for what waited to be counted
    return {"status": status, "answered_ms": 1000 * seconds, "health_worst_ms": 1000 * max(watched)}


async def digits_alone(server: Server, times: int) -> dict[str, float]:
    taken = []
    async with health(server) as watched:
        for _ in range(times):
            connection = await Connection.open(server.host, server.port)
            with contextlib.closing(connection):
                began = time.perf_counter()
                connection.send("POST", CHAT, DIGITS)
                status = await connection.head()
                taken.append(time.perf_counter() - began)
                assert 400 <= status < 500, status
    return {
        "digits_ms": 1000 * max(taken),
        "digits_median_ms": 1000 * statistics.median(taken),
        "health_p99_ms": 1000 * p99(watched),
    }


async def digits_by_eight(server: Server, rounds: int, chats: int) -> dict[str, float]:
    on, stop = mp.Event(), mp.Event()
    attackers = mp.Process(target=digits_in_a_loop, args=(server.host, server.port, on, stop), daemon=True)
    attackers.start()
    quiet: list[float] = []
    attacked: list[float] = []
    watched: list[float] = []
    try:
        for _ in range(rounds):
            quiet += [await first_token(server) for _ in range(chats)]
            on.set()
            await asyncio.sleep(0.5)
            async with health(server) as during:
                attacked += [await first_token(server) for _ in range(chats)]
            watched += during
            on.clear()
            await asyncio.sleep(1.0)
    finally:
        stop.set()
        attackers.join(20)
        attackers.kill()
    calm, under = statistics.median(quiet), statistics.median(attacked)
    return {
        "quiet_ms": 1000 * calm,
        "attacked_ms": 1000 * under,
        "later_ms": 1000 * (under - calm),
        "health_p99_ms": 1000 * p99(watched),
    }


async def held(server: Server, count: int, begin: bytes, more: bytes, pause: float) -> dict[str, float]:
    result = mp.Value("d", -1.0)
    arguments_ = (server.host, server.port, count, begin, more, pause, result)
    attackers = mp.Process(target=hold, args=arguments_, daemon=True)
    async with health(server) as watched:
        attackers.start()
        while attackers.is_alive():
            await asyncio.sleep(0.05)
    worst = 1000 * max(watched)
    return {"closed_after_s": result.value, "health_p99_ms": 1000 * p99(watched), "health_worst_ms": worst}


async def measure(server: Server, rounds: int, chats: int, only: str) -> dict[str, dict[str, float]]:
    for _ in range(3):
        await first_token(server)
    attacks: dict[str, Callable[[], Any]] = {
        "8 MB of digits, one at a time": lambda: digits_alone(server, 10),
        "8 MB of digits, eight clients in a loop": lambda: digits_by_eight(server, rounds, chats),
        "500 connections whose headers trickle": lambda: held(server, TRICKLING, b"POST / HT", b"x", 0.2),
        "500 connections whose bodies trickle": lambda: held(server, TRICKLING, head(5000), b"x", 0.2),
        "20 refused connections that keep sending": lambda: held(
            server, SENDING, head(1 << 30), b"x" * 65536, 0.0
        ),
    }
    for name, raw in single_requests().items():
        attacks[f"one request: {name}"] = lambda raw=raw: alone(server, raw)
    found = {}
    for name, attack in [item for item in attacks.items() if only in item[0]]:
        found[name] = await attack()
        shown = ", ".join(f"{key} {value:.1f}" for key, value in found[name].items())
        missed = [key for key, most in TARGETS.items() if found[name].get(key, 0) > most]
        print(f"{name:56} {shown}{'   over: ' + ', '.join(missed) if missed else ''}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="the model to serve")
    parser.add_argument("--only", default="", help="attacks whose name has this text")
    parser.add_argument("--rounds", type=int, default=5, help="turns of chats without and with attackers")
    parser.add_argument("--chats", type=int, default=8, help="chats a turn")
    parser.add_argument(
        "--json", type=Path, help="write the figures, with where they come from, to this file"
    )
    given = arguments(parser)
    times = ("--header-timeout", str(TIMEOUT), "--body-timeout", str(TIMEOUT))
    with Server(given.model, *times, *given.flags) as server:
        found = asyncio.run(measure(server, given.rounds, given.chats, given.only))
    if given.json:
        given.json.write_text(
            json.dumps({**birth_certificate("bench.serve_attacks"), "figures": found}, indent=1)
        )


if __name__ == "__main__":
    main()
