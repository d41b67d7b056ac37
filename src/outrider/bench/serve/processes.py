"""A load by one process or by several: where one core cannot follow all streams, each of them takes a share.

    python -m outrider.bench.serve.processes       one of them: a load on stdin; on stdout how far it is, then what came

Both directions are lines of JSON.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import IO, Any

from outrider.bench.serve.answer import Sample
from outrider.bench.serve.arrivals import Due, Lengths
from outrider.bench.serve.asked import Asked, Vocabulary
from outrider.bench.serve.client import Drove, Load, Tell, drive
from outrider.bench.serve.conversations import shape_of
from outrider.bench.serve.http import Server
from outrider.errors import OutriderError

SOON = 0.05  # seconds until all of them begin


def run(load: Load, count: int, tell: Tell) -> list[Drove]:
    """What each process found; the requests are shared out among them."""
    if count == 1:
        return [asyncio.run(drive(load, 0, 1, time.perf_counter, tell))]
    return Processes(load, count, tell).run()


class Processes:
    def __init__(self, load: Load, count: int, tell: Tell) -> None:
        self.load, self.count, self.tell = load, count, tell
        self.ended = [0] * count
        self.found: list[Drove | None] = [None] * count

    def run(self) -> list[Drove]:
        command = [sys.executable, "-P", "-m", __name__]
        children = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for _ in range(self.count)
        ]
        try:
            return self._led(children)
        finally:
            for child in children:
                child.kill()
                child.communicate()

    def _led(self, children: list[subprocess.Popen[bytes]]) -> list[Drove]:
        for index, child in enumerate(children):
            _send(child.stdin, [asdict(self.load), index, self.count])
        for child in children:
            _receive(child)  # it is ready
        begin = time.perf_counter() + SOON  # one clock for all processes of a machine
        for child in children:
            _send(child.stdin, begin)
        readers = [
            threading.Thread(target=self._read, args=(index, child), daemon=True)
            for index, child in enumerate(children)
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        found = [drove for drove in self.found if drove is not None]
        if len(found) < self.count:
            raise OutriderError("a client process ended early; try fewer of them: --clients")
        return found

    def _read(self, index: int, child: subprocess.Popen[bytes]) -> None:
        while isinstance(said := _receive(child, lost=None), int):
            self.ended[index] = said
            self.tell(sum(self.ended))
        if said is not None:
            self.found[index] = Drove(**{**said, "samples": [Sample(**one) for one in said["samples"]]})


def _send(pipe: IO[bytes] | None, what: Any) -> None:
    assert pipe is not None
    pipe.write(json.dumps(what).encode() + b"\n")
    pipe.flush()


def _receive(child: subprocess.Popen[bytes], **lost: Any) -> Any:
    assert child.stdout is not None
    if line := child.stdout.readline():
        return json.loads(line)
    if lost:
        return lost["lost"]
    raise OutriderError(f"a client process ended with {child.wait()} before it began")


def _load(raw: Mapping[str, Any]) -> Load:
    asked = dict(raw["asked"])
    asked["input"], output = Lengths(**asked["input"]), asked["output"]
    asked["output"] = None if output is None else Lengths(**output)
    asked["rows"], asked["trace"] = tuple(asked["rows"]), tuple(Due(**one) for one in asked["trace"])
    words = asked["vocabulary"]
    asked["vocabulary"] = Vocabulary(tuple(words["words"]), tuple(words["sizes"]), words["measured"])
    shape = shape_of(raw["conversations"])
    return Load(**{**raw, "server": Server(**raw["server"]), "asked": Asked(**asked), "conversations": shape})


def main() -> None:
    raw, index, count = json.loads(sys.stdin.buffer.readline())
    load = _load(raw)

    def ready() -> float:
        _send(sys.stdout.buffer, "ready")
        return float(json.loads(sys.stdin.buffer.readline()))

    found = asyncio.run(drive(load, index, count, ready, lambda ended: _send(sys.stdout.buffer, ended)))
    _send(sys.stdout.buffer, asdict(found))


if __name__ == "__main__":
    main()
