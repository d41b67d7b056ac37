"""What the engine process sends arrives whole and in order, however slowly it is read."""

from __future__ import annotations

import socket
import struct
import threading
import time

from outrider.serve import link
from outrider.serve.outbox import Outbox

PATIENCE = 30.0


def received(sock: socket.socket, count: int) -> list[link.FromEngine]:
    sock.settimeout(PATIENCE)
    found = []
    for _ in range(count):
        (size,) = struct.unpack("!I", link._exactly(sock, 4) or b"")
        found.append(link.from_engine.decode(link._exactly(sock, size) or b""))
    return found


def message(number: int, size: int = 1000) -> link.Accepted:
    return link.Accepted("x" * size, number)


def test_messages_come_in_order_with_nobody_reading_at_first() -> None:
    ours, theirs = socket.socketpair()
    outbox, count = Outbox(ours), 3000  # of a thousand bytes: more than any socket holds
    for number in range(count):
        outbox.put(message(number))
    assert outbox._left
    assert received(theirs, count) == [message(number) for number in range(count)]
    outbox.put(message(count))
    assert received(theirs, 1) == [message(count)]


def test_messages_come_in_order_while_they_are_read() -> None:
    ours, theirs = socket.socketpair()
    outbox, count = Outbox(ours), 20_000
    found: list[link.FromEngine] = []
    reader = threading.Thread(target=lambda: found.extend(received(theirs, count)), daemon=True)
    reader.start()
    for number in range(count):
        outbox.put(message(number))
    reader.join(PATIENCE)
    assert [one.seed for one in found if isinstance(one, link.Accepted)] == [*range(count)]


def test_several_threads_send_whole_messages() -> None:
    ours, theirs = socket.socketpair()
    outbox, each = Outbox(ours), 400

    def send(first: int) -> None:
        for number in range(first, first + each):
            outbox.put(message(number, 700 + number % 600))

    threads = [threading.Thread(target=send, args=(each * i,)) for i in range(4)]
    for one in threads:
        one.start()
    time.sleep(0.05)
    found = received(theirs, 4 * each)
    for one in threads:
        one.join()
    seeds = [one.seed for one in found if isinstance(one, link.Accepted)]
    assert sorted(seeds) == [*range(4 * each)]
    assert all(sorted(mine) == mine for i in range(4) if (mine := [s for s in seeds if s // each == i]))


def test_what_was_taken_is_sent_after_closing() -> None:
    ours, theirs = socket.socketpair()
    outbox, count = Outbox(ours), 3000
    for number in range(count):
        outbox.put(message(number))
    outbox.close()
    outbox.put(message(count))
    assert received(theirs, count)[-1] == message(count - 1)
    outbox._writer.join(PATIENCE)
    assert not outbox._writer.is_alive()


def test_nobody_to_send_to_is_no_error() -> None:
    ours, theirs = socket.socketpair()
    outbox = Outbox(ours)
    for number in range(3000):
        outbox.put(message(number))
    theirs.close()
    outbox._writer.join(PATIENCE)
    assert not outbox._writer.is_alive() and not outbox._left
    outbox.put(message(0))
    other, peer = socket.socketpair()
    outbox = Outbox(other)
    peer.close()
    outbox.put(message(0))
    outbox.put(message(1))
