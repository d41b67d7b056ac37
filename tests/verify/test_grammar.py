"""Grammars that compile and break in use: found by a trial where every text breaks them, and never by a draft alone."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.verify.grammar import GrammarCompiler
from outrider.verify.grammar_source import Matchers
from tests.load.tiny import byte_level_backend, vocabulary

WIDE = " ".join('("a"|"")' for _ in range(2000))  # more items in a row than llguidance allows
NUMBER = {"type": "integer"}


@pytest.fixture(scope="module")
def matchers() -> Matchers:
    return Matchers(byte_level_backend().to_str(), len(vocabulary()), [0])


def token(char: str) -> int:
    [found] = byte_level_backend().encode(char, add_special_tokens=False).ids
    return found


BREAKING: dict[str, dict[str, Any]] = {
    "optional rules": {"lark": f'start: "b" x\nx: {WIDE}'},
    "many alternatives": {
        "lark": 'start: "b" x\nx: '
        + " | ".join(f"r{i}" for i in range(2500))
        + "".join(f'\nr{i}: "w{i}" "z"' for i in range(2500))
    },
    "many properties below another": {
        "json_schema": {
            "type": "object",
            "properties": {
                "k": {"type": "object", "properties": {f"a{i}": NUMBER for i in range(900)}},
            },
            "required": ["k"],
        }
    },
}
SOUND: dict[str, dict[str, Any]] = {
    "object": {"json_object": True},
    "boolean": {"json_schema": {"type": "boolean"}},
    "person": {
        "json_schema": {"properties": {"name": {"type": "string"}, "age": NUMBER}, "required": ["name"]}
    },
    "a date": {"json_schema": {"type": "string", "format": "date-time"}},
    "alternatives": {
        "json_schema": {
            "anyOf": [{"properties": {f"a{i}": NUMBER}, "required": [f"a{i}"]} for i in range(300)]
        }
    },
    "address": {"regex": r"[a-z]+@[a-z]+\.(com|org)"},
    "choice": {"choice": [f"word {i}" for i in range(1000)]},
    "recursion": {"lark": 'start: e\ne: e e | "(" e ")" | "a"'},
    "one text breaks, others do not": {"lark": f'start: /[c-z]+/ | "b" x\nx: {WIDE}'},
}


@pytest.mark.parametrize("name", BREAKING)
def test_what_breaks_on_every_text_is_found(name: str, matchers: Matchers) -> None:
    failure = matchers.failure_in_use(matchers.make(BREAKING[name]))
    assert failure and "items" in failure


@pytest.mark.parametrize("name", SOUND)
def test_what_can_be_written_is_not_refused(name: str, matchers: Matchers) -> None:
    assert matchers.failure_in_use(matchers.make(SOUND[name])) is None


def test_a_draft_that_breaks_the_matcher_does_not_end_the_answer() -> None:
    """The answer goes on where plain decoding would; it ends where the text itself breaks the matcher."""
    compiler = GrammarCompiler(byte_level_backend().to_str(), len(vocabulary()), [0])
    state = compiler.compile({"lark": f'start: "d" ("c" "z" | "b" x)\nx: {WIDE}'})
    state.advance(token("d"))
    for _ in range(2):
        assert state.mask([token("b")]) is None
        assert state.problem is None
        mask = state.mask([])
        assert mask is not None and mask[token("c")] and mask[token("b")]
    assert state.mask([token("c")]) is not None
    broken = state.copy()
    state.advance(token("c"))
    state.advance(token("z"))
    assert state.complete and state.problem is None
    broken.advance(token("b"))
    assert broken.problem and "items" in broken.problem
    assert broken.mask([token("a")]) is None
