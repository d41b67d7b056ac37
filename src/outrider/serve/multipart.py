"""Reads a form with files (`multipart/form-data`) as it arrives, so that no file is held in memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from email.message import Message

from outrider.errors import InvalidRequest

MAX_HEADERS = 8 << 10  # bytes of the headers of one part
MAX_VALUE = 4 << 10  # bytes of a field that is no file
MAX_PARTS = 16


def boundary_of(content_type: str) -> bytes:
    """The text between parts, as the request's Content-Type names it."""
    message = Message()
    message["content-type"] = content_type
    boundary = message.get_boundary() or ""
    if message.get_content_type() != "multipart/form-data" or not re.fullmatch(r"[ -~]{1,70}", boundary):
        raise InvalidRequest("send the file as multipart/form-data, as OpenAI's clients do")
    return boundary.encode()


class FormReader:
    """Call `feed` with every piece of the body, then `finish`. Fields are in `fields`; the bytes of the part named
    `file` go to `write`.
    """

    def __init__(self, boundary: bytes, write: Callable[[bytes], None]) -> None:
        self._mark, self._write = b"\r\n--" + boundary, write
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._buffer = bytearray(b"\r\n")  # the first mark has no line before it
        self._part: str | None = None  # whose bytes come; None: headers, or what stands before the first part
        self._value = bytearray()
        self._begun = self._over = False

    def feed(self, piece: bytes) -> None:
        self._buffer += piece
        while not self._over and self._advance():
            pass
        if self._over:
            self._buffer.clear()

    def finish(self) -> None:
        if not self._over:
            raise InvalidRequest("the form ends in the middle of a part")

    def _advance(self) -> bool:
        """Takes what can be taken from the buffer. False: more must come first."""
        if self._begun and self._part is None:
            return self._read_headers()
        at = self._buffer.find(self._mark)
        end = at if at >= 0 else len(self._buffer) - len(self._mark)
        if end > 0:
            self._take(bytes(self._buffer[:end]))
            del self._buffer[:end]
        if at < 0 or len(self._buffer) < len(self._mark) + 2:
            return False
        after = bytes(self._buffer[len(self._mark) : len(self._mark) + 2])
        if after not in (b"\r\n", b"--"):
            raise InvalidRequest("the form's parts are not divided as its Content-Type says")
        del self._buffer[: len(self._mark) + 2]
        self._end_part()
        self._begun, self._over = True, after == b"--"
        return True

    def _read_headers(self) -> bool:
        at = self._buffer.find(b"\r\n\r\n")
        if at < 0 and len(self._buffer) < MAX_HEADERS:
            return False
        if not 0 <= at < MAX_HEADERS:
            raise InvalidRequest("the headers of a part of the form are too long")
        message = Message()
        for line in bytes(self._buffer[:at]).decode("utf-8", "replace").split("\r\n"):
            header, _, value = line.partition(":")
            message[header.strip()] = value.strip()
        del self._buffer[: at + 4]
        name = message.get_param("name", None, "content-disposition")
        if not isinstance(name, str) or name in self.fields or (name == "file" and self.filename is not None):
            raise InvalidRequest("a part of the form has no name, or that of another part")
        if len(self.fields) >= MAX_PARTS:
            raise InvalidRequest(f"the form has more than {MAX_PARTS} parts")
        if name == "file":
            self.filename = message.get_filename() or "file"
        self._part = name
        return True

    def _take(self, data: bytes) -> None:
        if self._part == "file":
            self._write(data)
        elif self._part is not None:
            self._value += data
            if len(self._value) > MAX_VALUE:
                raise InvalidRequest(f"the field {self._part[:60]!r} is longer than {MAX_VALUE} bytes")

    def _end_part(self) -> None:
        if self._part is not None and self._part != "file":
            self.fields[self._part] = self._value.decode("utf-8", "replace")
        self._part, self._value = None, bytearray()
