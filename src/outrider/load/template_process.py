"""The process that compiles and renders chat templates, started by rendering.py.

A template that never ends or takes all memory costs this process, which is started again. It imports little, so that it
starts quickly.

Messages are bytes behind their length. The first one holds the limits, every other one a template's source and its
variables, all as JSON. An answer is a mark and a text: `=` what was rendered, `!` why not, `#` memory ran out.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import re
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.load.child import ignore_signals, limit_memory, limit_time

LENGTH = struct.Struct("!I")
LONGEST_PROBLEM = 2000  # characters


def main(descriptor: int) -> None:
    ignore_signals()
    with socket.socket(fileno=descriptor) as sock:
        first = receive(sock)
        if first is None:
            return
        limits = json.loads(first)
        sandbox = Sandbox(limits["mark"])
        compiled = functools.lru_cache(maxsize=8)(sandbox.from_string)
        limit_memory(limits["memory"])
        send(sock, "=", "")
        while (asked := receive(sock)) is not None:
            limit_time(
                limits["seconds"]
            )  # for a parent that is gone: one that is there ends what takes longer
            try:
                answer = rendered(compiled, asked, limits["characters"])
            except MemoryError:
                answer = "#", ""
            send(sock, *answer)


def rendered(compiled: Callable[[str], jinja2.Template], asked: bytes, most: int) -> tuple[str, str]:
    chunks, size = [], 0
    try:
        given = json.loads(asked)
        for chunk in compiled(given["source"]).generate(given["variables"]):
            chunks.append(chunk)
            size += len(chunk)
            if size > most:
                return "!", f"it makes a text longer than {most} characters"
    except MemoryError:
        raise
    except RecursionError:
        return "!", "it recurses without end"
    except Exception as problem:  # template code can raise anything at all
        return "!", (str(problem) or type(problem).__name__)[:LONGEST_PROBLEM]
    return "=", "".join(chunks)


class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it only renders what it holds."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class Sandbox(ImmutableSandboxedEnvironment):
    """Keeps a template from attributes that lead out of it, and from changing what it was given."""

    def __init__(self, mark: str) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, Generation]
        )
        self._mark = mark
        self._escaped_mark = re.compile(rf"(?<!\\)((?:\\\\)*)\\u{ord(mark):04x}")
        self.filters["tojson"] = self._tojson
        self.globals |= {
            "raise_exception": raise_exception,
            "strftime_now": lambda form: datetime.datetime.now().strftime(form),
        }

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Jinja's own escapes for HTML, which no model was trained on."""
        text = json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        return self._escaped_mark.sub(rf"\1{self._mark}", text) if ensure_ascii else text


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def send(sock: socket.socket, mark: str, text: str) -> None:
    body = (mark + text).encode("utf-8", "surrogatepass")
    sock.sendall(LENGTH.pack(len(body)) + body)


def receive(sock: socket.socket) -> bytes | None:
    """The next message; None once the parent is gone."""
    head = exactly(sock, LENGTH.size)
    return None if head is None else exactly(sock, LENGTH.unpack(head)[0])


def exactly(sock: socket.socket, size: int) -> bytes | None:
    found = bytearray()
    while len(found) < size:
        part = sock.recv(min(size - len(found), 1 << 20))
        if not part:
            return None
        found += part
    return bytes(found)


if __name__ == "__main__":
    with contextlib.suppress(ConnectionError):
        main(int(sys.argv[1]))
