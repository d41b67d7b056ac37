"""What to ask: prompts from the command line, files or a pipe, as rows. Reads no model.

A row is one of
    {"turns": ["...", "..."]}     user turns, asked one after the other, each answered before the next
    {"messages": [{"role": ...}]} a conversation as it is
    {"prompt": "..."}             a raw prompt, with no template
    any other line                plain text
and may carry an "id", which comes back with its answer.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from outrider.errors import InvalidRequest

KINDS = ("turns", "messages", "prompt")


@dataclass(frozen=True, slots=True)
class Row:
    """One thing to ask: `turns`, `messages` or `prompt`, whichever it has."""

    id: str
    turns: tuple[str, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    prompt: str | None = None


def plain_row(text: str, chat: bool, row_id: str = "1") -> Row:
    """Text with no form of its own: a user turn, or a raw prompt."""
    if not text:
        raise InvalidRequest("the prompt is empty", "prompt")
    return Row(row_id, turns=(text,)) if chat else Row(row_id, prompt=text)


def read_rows(name: str, stdin: TextIO, limit: int | None = None) -> list[tuple[str, str | dict[str, Any]]]:
    """The first `limit` rows of a file, or of stdin when it is `-`: an id, and text or an object."""
    return [(row_id, value) for _, row_id, value in numbered_rows(name, stdin, limit)]


def read_checked_rows(
    name: str, stdin: TextIO, limit: int | None = None
) -> list[tuple[int, Row, str | dict[str, Any]]]:
    """The number of its line, the row and what it was made of; one that cannot be asked is an error that names its line
    and field.
    """
    found = []
    for line, row_id, value in numbered_rows(name, stdin, limit):
        try:
            row = make_row(row_id, value, None, True)
            if row.messages and not any(m.get("role") == "user" for m in row.messages):
                raise InvalidRequest('"messages" has nothing of the role "user"', "messages")
        except InvalidRequest as problem:
            raise InvalidRequest(f"{name}, line {line}: {problem}", problem.param or "prompts") from None
        found.append((line, row, value))
    if not found:
        raise InvalidRequest(f"{name} holds no prompts", "prompts")
    return found


def numbered_rows(
    name: str, stdin: TextIO, limit: int | None = None
) -> list[tuple[int, str, str | dict[str, Any]]]:
    """The same, each with the number of its line."""
    try:
        if name == "-":
            return list(itertools.islice(_parse(stdin, "stdin"), limit))
        with Path(name).expanduser().open(encoding="utf-8") as lines:
            return list(itertools.islice(_parse(lines, name), limit))
    except OSError as problem:
        raise InvalidRequest(f"{name} cannot be read: {problem.strerror}", "prompts") from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"{name} is not UTF-8 text", "prompts") from None


def _parse(lines: Iterable[str], name: str) -> Iterator[tuple[int, str, str | dict[str, Any]]]:
    count = 0
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text:
            continue
        count += 1
        if text[0] not in '{"':
            yield number, str(count), text
            continue
        try:
            value = json.loads(text)
        except ValueError as problem:
            if text[0] == '"':  # text that begins with a quotation
                yield number, str(count), text
                continue
            raise InvalidRequest(f"{name}, line {number}: not JSON: {problem}", "prompts") from None
        yield number, str(value.get("id", count) if isinstance(value, dict) else count), value


def make_row(row_id: str, value: str | dict[str, Any], chat: bool | None, has_template: bool) -> Row:
    """A row as it will be asked. `chat` is the user's word: yes, no, or None for what the row calls for."""
    templated = has_template if chat is None else chat
    if isinstance(value, str):
        return plain_row(value, templated, row_id)
    kinds = [kind for kind in KINDS if kind in value]
    if len(kinds) != 1:
        raise InvalidRequest(f'a row needs one of "turns", "messages" or "prompt"; found {kinds or "none"}')
    given = value[kinds[0]]
    if kinds[0] == "prompt":
        if not isinstance(given, str):
            raise InvalidRequest('"prompt" must be a string', "prompt")
        return plain_row(given, bool(chat), row_id)
    if chat is False:
        raise InvalidRequest(f'"{kinds[0]}" needs the chat template; leave out --raw', "raw")
    if not isinstance(given, list) or not given:
        raise InvalidRequest(f'"{kinds[0]}" must be a list that is not empty', kinds[0])
    if kinds[0] == "messages":
        if not all(isinstance(message, dict) for message in given):
            raise InvalidRequest('"messages" must hold objects with "role" and "content"', "messages")
        return Row(row_id, messages=tuple(given))
    if not all(isinstance(turn, str) and turn for turn in given):
        raise InvalidRequest('"turns" must hold texts that are not empty', "turns")
    return Row(row_id, turns=tuple(given))
