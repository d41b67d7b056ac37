"""`--kv-events`: a subscriber learns which blocks are cached, in the layout that routers read."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from outrider.cache.table import SlotTable
from outrider.cli.main import make_app
from tests.serve.conftest import COMMAND, Served

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed: pip install 'outrider[events]'")

COMPLETIONS, BLOCK = "/v1/completions", 16


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class Subscriber:
    """What a router does: it subscribes by topic, checks the numbers, and keeps the blocks that are there."""

    def __init__(self, context: Any, address: str, replay: str, topic: str = "kv@") -> None:
        self.sub, self.dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self.dealer.set(zmq.RCVTIMEO, 10_000)
        self.sub.set(zmq.SUBSCRIBE, topic.encode())
        self.sub.connect(address)
        self.dealer.connect(replay)
        self.topics: set[str] = set()
        self.last = -1
        self.parents: dict[int, int | None] = {}
        self.tokens: dict[int, list[int]] = {}

    def replay(self, first: int = 0) -> list[list[bytes]]:
        self.dealer.send_multipart([b"", first.to_bytes(8, "big")])
        found = []
        while (frames := self.dealer.recv_multipart())[-1]:
            found.append(frames[1:])
        assert int.from_bytes(frames[2], "big", signed=True) == -1
        return found

    def feed(self, frames: list[bytes]) -> None:
        topic, number, payload = frames
        if (now := int.from_bytes(number, "big")) <= self.last:
            return
        assert now == self.last + 1
        self.last = now
        self.topics.add(topic.decode())
        sent, events, rank = msgspec.msgpack.decode(payload)
        assert sent > 1e9 and rank == 0
        for kind, *fields in events:
            getattr(self, kind)(*fields)

    def read(self, enough: Callable[[], bool]) -> None:
        """Live messages, and those that were sent before the subscription had reached the server."""
        until = time.monotonic() + 30
        while not enough():
            assert time.monotonic() < until, len(self.tokens)
            live = [self.sub.recv_multipart()] if self.sub.poll(200) else []
            if not live or int.from_bytes(live[0][1], "big") > self.last + 1:
                live = self.replay(self.last + 1)
            for frames in live:
                self.feed(frames)

    def AllBlocksCleared(self) -> None:  # noqa: N802 - as the layout has it
        self.parents.clear()
        self.tokens.clear()

    def BlockStored(  # noqa: N802
        self, hashes: list[int], parent: int | None, tokens: list[int], size: int, lora: None, medium: str
    ) -> None:
        assert (size, lora, medium) == (BLOCK, None, "GPU") and len(tokens) == size * len(hashes)
        assert parent is None or parent in self.tokens
        for i, block in enumerate(hashes):
            assert block not in self.tokens
            self.parents[block] = hashes[i - 1] if i else parent
            self.tokens[block] = tokens[i * size : (i + 1) * size]

    def BlockRemoved(self, hashes: list[int], medium: str) -> None:  # noqa: N802
        for block in hashes:
            del self.tokens[block], self.parents[block]

    def texts(self) -> list[list[int]]:
        """From the first block to each that is there."""
        found = []
        for block in self.tokens:
            text: list[int] = []
            step: int | None = block
            while step is not None:
                text = self.tokens[step] + text
                step = self.parents[step]
            found.append(text)
        return found


@pytest.fixture
def context() -> Iterator[Any]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


def test_a_subscriber_learns_what_is_cached(serve_tiny: Callable[..., Served], context: Any) -> None:
    """Blocks of prompts and answers come and go. A subscriber that comes late asks for what it missed."""
    at, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    topic = "kv@10.0.0.7:8000@tiny"
    server = serve_tiny(
        "--kv-events", at, "--kv-events-replay", replay, "--kv-events-topic", topic, "--threads", "1",
        "--context", "512", "--max-sequences", "2", "--cache-bytes", "512K",
    )  # fmt: skip
    one = Subscriber(context, at, replay)

    def ask(text: str, **more: Any) -> list[int]:
        prompt = [2 + ord(letter) for letter in text]
        body = {"prompt": prompt, "max_tokens": 8, "return_token_ids": True, "ignore_eos": True, **more}
        reply = server.post(COMPLETIONS, body)
        assert reply.status_code == 200, reply.text
        choice = reply.json()["choices"][0]
        return [*prompt, *choice["token_ids"]]

    first = ask("a first prompt that is longer than a few blocks of the cache")
    whole = first[: (len(first) - 1) // BLOCK * BLOCK]
    one.read(lambda: whole in one.texts())
    assert one.last >= 1  # the first message said that nothing was cached

    known = {*one.tokens}
    again = ask("a first prompt that is longer than a few blocks of the cache, and goes on")
    one.read(lambda: any(text == again[: len(text)] for text in one.texts() if len(text) > len(whole)))
    assert known <= {*one.tokens}  # nothing was published twice
    secret = ask("what a tenant asks under a salt of its own " * 3, cache_salt="tenant")
    for number in range(30):  # until blocks must go
        last = ask(f"{number} another text " * 20)
    whole = last[: (len(last) - 1) // BLOCK * BLOCK]
    one.read(lambda: whole in one.texts())
    assert not known <= {*one.tokens}
    assert not any(block == secret[:BLOCK] for block in one.tokens.values())
    assert one.topics == {topic}

    late = Subscriber(context, at, replay)
    for frames in late.replay():
        late.feed(frames)
    assert late.tokens == one.tokens and late.parents == one.parents
    assert len(one.replay(one.last)) == 1
    assert server.stop() == 0


def test_blocks_of_other_owners_are_not_published() -> None:
    from outrider.serve.kv_events import BlockHashes, EventPublisher

    queued: list[Any] = []

    class Quiet(EventPublisher):
        def __init__(self) -> None:
            self._queue = self  # type: ignore[assignment]

        put = staticmethod(queued.append)

    table, text = SlotTable(128, 2, 64), [*range(40)]
    table.prefix.watch = Quiet()
    for owner in ("a key", "", "a key:a salt"):
        row, _ = table.open(text, owner)
        table.extend(row, 40 - int(table.lengths[row]))
        table.release(row, text, owner)
    assert queued == [(None, [3, 4], text[:32])]
    hashes, other = BlockHashes("one"), BlockHashes("other")
    stored = hashes.stored(*queued[0])
    assert stored is not None and stored.block_hashes != other.stored(*queued[0]).block_hashes  # type: ignore[union-attr]
    assert BlockHashes("one").stored(*queued[0]) == stored  # in any process
    assert hashes.stored(77, [78], text[:16]) is None  # of an unknown parent
    removed = hashes.removed([1, 3])
    assert removed is not None and removed.block_hashes == stored.block_hashes[:1]
    assert hashes.removed([1, 3]) is None


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--kv-events", "127.0.0.1:5557"], "kv_events must be tcp://HOST:PORT or ipc://FILE"),
        (["--kv-events-topic", "kv@a@b"], "kv_events_topic needs kv_events"),
        (
            ["--kv-events", "tcp://127.0.0.1:5557", "--api-key", "k" * 20],
            "kv_events is for servers without keys",
        ),
        (
            ["--kv-events", "tcp://127.0.0.1:5557", "--no-prefix-reuse"],
            "nothing to publish without prefix_reuse",
        ),
        (["b=b", "--kv-events", "tcp://127.0.0.1:5557"], "two engines cannot share tcp://127.0.0.1:5557"),
    ],
)
def test_what_cannot_be_is_refused(flags: list[str], says: str) -> None:
    ended = CliRunner().invoke(make_app(), ["serve", "a=a", "--port", "0", *flags])
    assert ended.exit_code != 0 and says in str(ended.exception)


def test_a_taken_address_is_an_error_before_anything_is_loaded(tiny_folder: Path) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        at = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        command = [*COMMAND, "serve", str(tiny_folder), "--port", "0", "--kv-events", at]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert f"error: kv_events: cannot publish at {at}: Address already in use" in ended.stderr
