"""What stands between the bytes a client sent and the code that believes them, and between errors and clients.

Everything here is linear in its input and raises nothing but InvalidRequest. Numbers of messages, choices and stop
strings are checked in wire.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import msgspec

from outrider.errors import InvalidRequest, invalid

MAX_DIGITS = 40  # of an integer; 128 bits need 39, and beyond 308 arithmetic with floats raises
MAX_VALUES = 1_000_000  # an empty list takes three bytes of a body and 56 of memory
MAX_FIELDS = 100_000  # objects, lists and fields of objects: the parser needs half a microsecond for each
MAX_MESSAGE = 500
MAX_DEPTH = 64  # nesting of JSON; the parser recurses
MAX_MESSAGES = 4096
MAX_N = 32  # answers of a request
MAX_STOP = 16  # stop texts, and stop tokens
MAX_BIAS = 1024  # biased tokens, and bad words
ESCAPED_BYTE = 6  # bytes of a body that may stand for one of a text: \\u00xx
# Bytes that one call looks at. Such a call holds Python's lock, and with it every other request.
SLICE = 64 << 10
MARGIN = 64  # bytes more, for what begins in one slice and ends in the next; more than MAX_DIGITS

_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEP = [(byte in b"[{") - (byte in b"]}") for byte in range(256)]
_MANY_DIGITS = b"0" * (MAX_DIGITS + 1)
_AS_ZERO = bytes(b"0"[0] if byte in b"0123456789" else 0 for byte in range(256))
_LONG_INTEGER = re.compile(rb"(?<![0-9.eE])(?<![eE][+-])[0-9]{%d}[0-9]*+(?![.eE])" % (MAX_DIGITS + 1))
_HALF_PAIR = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)


def read_json(body: bytes, max_depth: int = MAX_DEPTH) -> Any:
    """The value of a request body. Strict JSON in UTF-8; of a name given twice, the last counts."""
    outside = _outside_strings(body)
    fields = sum(map(outside.count, (b":", b"[", b"{")))
    if outside.count(b",") + fields - outside.count(b":") > MAX_VALUES:
        raise _unreadable(f"it holds more than {MAX_VALUES} values")
    if _depth(outside) > max_depth:
        raise _unreadable(f"it is nested deeper than {max_depth} levels")
    if fields > MAX_FIELDS:
        raise _unreadable(f"it holds more than {MAX_FIELDS} lists, objects and fields")
    if _MANY_DIGITS in outside.translate(_AS_ZERO) and _occurs(_LONG_INTEGER, outside):
        raise _unreadable(f"an integer has more than {MAX_DIGITS} digits")
    try:
        return msgspec.json.decode(body)
    except UnicodeDecodeError:
        raise _unreadable("it is not UTF-8") from None
    except (msgspec.MsgspecError, RecursionError) as problem:
        raise _unreadable(_reason(body, problem)) from None


def _unreadable(reason: str) -> InvalidRequest:
    return InvalidRequest(f"We could not parse the JSON body of your request: {reason}.")


def _reason(body: bytes, problem: Exception) -> str:
    """The parser says "truncated" of text cut through an emoji, which is a common slip of clients."""
    if (b"\\ud" in body or b"\\uD" in body) and _occurs(_HALF_PAIR, body):
        return r"a \u escape is half of a surrogate pair, as when text is cut through an emoji"
    text = str(problem)
    return text[0].lower() + text[1:] if text.startswith(("Input", "Number", "Integer")) else text


class StringScan:
    """Follows the strings of a JSON body that comes in pieces. Looks at each byte once."""

    def __init__(self) -> None:
        self.inside = False  # a string is open
        self.open_bytes = 0  # since the last quote: bytes of text, at least
        self._escape = b""  # a backslash whose second byte is still to come

    def feed(self, piece: bytes) -> bytes:
        """The piece without escaped backslashes and quotes: the quotes that it holds begin and end strings."""
        piece = self._escape + piece
        cut = (len(piece) - len(piece.rstrip(b"\\"))) % 2
        self._escape = piece[len(piece) - cut :]
        plain = piece[: len(piece) - cut].replace(b"\\\\", b".").replace(b'\\"', b".")
        if quotes := plain.count(b'"'):
            self.inside ^= quotes % 2 == 1
            self.open_bytes = 0
        run = plain[plain.rfind(b'"') + 1 :]
        self.open_bytes += len(run) - (ESCAPED_BYTE - 1) * run.count(b"\\")
        return plain


def _outside_strings(body: bytes) -> bytes:
    """What is not within quotes. Where the body is no JSON this may err, but the parser stops there too."""
    scan, outside = StringScan(), []
    for begin in range(0, len(body), SLICE):
        inside = scan.inside
        outside.append(b'"'.join(scan.feed(body[begin : begin + SLICE]).split(b'"')[inside::2]))
    return b"".join(outside)


def _depth(outside: bytes) -> int:
    """How deep brackets nest, without recursion. Brackets that do not match in kind are for the parser."""
    depth = deepest = 0
    for begin in range(0, len(outside), SLICE):
        brackets = outside[begin : begin + SLICE].translate(None, _NO_BRACKETS)
        depths = [*accumulate(map(_STEP.__getitem__, brackets), initial=depth)]
        depth, deepest = depths[-1], max(deepest, *depths)
        if depth < 0:  # the parser reads no further
            break
    return deepest


def _occurs(pattern: re.Pattern[bytes], data: bytes) -> bool:
    """Whether a search finds something. What is cut off at a slice's end is tried again whole."""
    for begin in range(0, len(data), SLICE):
        found = pattern.search(data, begin, begin + SLICE + MARGIN)
        if found and pattern.match(data, found.start()):
            return True
    return False


def _walk(value: Any) -> Iterator[Any]:
    """Every value within, itself included, without recursion."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        yield item
        if isinstance(item, dict):
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)


_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


def check_schema(schema: Any, max_bytes: int, param: str, max_depth: int = MAX_DEPTH) -> None:
    """Refuse a JSON schema that is too large, too deep, or points outside itself. Errors name `param`."""
    if not isinstance(schema, (dict, bool)):
        raise invalid(param, "must be a JSON schema, an object")
    if _deeper(schema, max_depth):
        raise invalid(param, f"is nested deeper than {max_depth} levels")
    try:
        size = len(msgspec.json.encode(schema))
    except (TypeError, ValueError, RecursionError):
        raise invalid(param, "holds something that is not JSON") from None
    if size > max_bytes:
        raise invalid(param, f"has {size} bytes; at most {max_bytes} are allowed")
    for item in _walk(schema):
        if isinstance(item, dict):
            _check_references(item, param)


def _check_references(item: dict[str, Any], param: str) -> None:
    """A property may itself be named $ref: then its value is a schema and no text."""
    for name in _REFERENCES:
        target = item.get(name)
        if isinstance(target, str) and not target.startswith("#"):
            raise invalid(
                param,
                f"has a {name} to {target[:100]!r}; only references within the schema are followed, "
                "such as '#/$defs/name'",
            )


def _deeper(value: Any, max_depth: int) -> bool:
    level = [value]
    for _ in range(max_depth + 1):
        level = [item for item in level if isinstance(item, (dict, list))]
        if not level:
            return False
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return True


_PLACES = re.compile(
    r"""(?P<kept>\bhttps?://[^\s'"]*|\#/[^\s'"]*|(?<![\w./~-])/v1(?:/[\w-]+)*(?![\w./-]))"""
    r"""|(?P<quote>['"`])(?!/v1[/'"`])(?:file://|~?/|[A-Za-z]:\\|\\\\)[^'"`]*(?P=quote)"""
    r"""|(?:file://|(?<![\w.~/-])~?)/[^\s'"`:,;()<>\[\]{}/]+/[^\s'"`:,;()<>\[\]{}]*"""
    r"""|\b[A-Za-z]:\\[^\s'"`:,;()<>]*"""
)
_ADDRESS = re.compile(r"\b0[xX][0-9a-fA-F]{2,}\b")
_READ = 10 * MAX_MESSAGE  # of a message; more would only be cut off again


def clean_line(text: str) -> str:
    text = text[:_READ].encode("utf-8", "replace").decode("utf-8")
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def clean_error(text: str) -> str:
    """A message fit for clients: one line of bounded length, without addresses and this machine's paths."""
    text = _PLACES.sub(_hide, clean_line(text[:_READ]))
    text = _ADDRESS.sub("<address>", text)
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 3] + "..."


def _hide(match: re.Match[str]) -> str:
    if match["kept"]:
        return match["kept"]
    quote = match["quote"] or ""
    return f"{quote}<path>{quote}"
