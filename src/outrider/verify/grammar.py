"""Structured output: which tokens may come next, at any node of a draft. Through llguidance.

A compiled grammar is a state that moves along the text; `mask` looks ahead along a path and comes back, so
every node of a draft is masked as plain decoding would mask it, and nothing needs undoing when a guess is
rejected.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

import torch
from torch import Tensor

from outrider.errors import InvalidRequest, OutriderError
from outrider.types import JSON_SPELLING

# Remainders the numbers of a grammar may have to be told apart by, all `multipleOf` together: as many states
# are made while compiling, and llguidance has no limit of its own (ten million take a minute and gigabytes).
MOST_REMAINDERS = 100_000


class GrammarState:
    """Where one sequence stands in its grammar."""

    def __init__(self, matcher: Any, vocab: int) -> None:
        self._matcher, self._vocab = matcher, vocab
        self._failure: str | None = None

    def copy(self) -> GrammarState:
        return GrammarState(self._matcher.deep_copy(), self._vocab)

    def mask(self, path: Sequence[int]) -> Tensor | None:
        """[vocab] True where a token may follow the text and `path`; None if the path itself may not."""
        try:
            return self._mask(path)
        except Exception as error:  # one answer is lost, not every answer of the step
            self._failure = f"{type(error).__name__}: {error}"
            return None

    def _mask(self, path: Sequence[int]) -> Tensor | None:
        if path and self._matcher.validate_tokens(list(path)) < len(path):
            return None
        if path:
            self._matcher.consume_tokens(list(path))
        bits = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        if path:
            self._matcher.rollback(len(path))
        spread = bits[:, None] >> torch.arange(8, dtype=torch.uint8) & 1
        return spread.flatten()[: self._vocab].bool()

    def advance(self, token: int) -> None:
        if not self._failure and not self._matcher.is_stopped():
            self._matcher.consume_token(token)

    @property
    def problem(self) -> str | None:
        """What broke the matcher, if anything did: some grammars are found out only while they are used."""
        if self._failure is None and self._matcher.is_error():
            self._failure = self._matcher.get_error()
        return None if self._failure is None else _first_line(self._failure)

    @property
    def complete(self) -> bool:
        """Nothing more may follow."""
        return bool(self._matcher.is_stopped())


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Made once: reading the vocabulary takes about half a second."""

    def __init__(self, tokenizer_json: str, vocab: int, ends: Sequence[int]) -> None:
        try:
            import llguidance  # an extra: only structured output needs it
            from llguidance.gbnf_to_lark import any_to_lark
        except ImportError:
            raise OutriderError(
                'structured output needs llguidance: pip install "outrider[grammar]"'
            ) from None
        self._matcher, self._to_lark = llguidance.LLMatcher, any_to_lark
        self._tokenizer = llguidance.LLTokenizer(tokenizer_json, n_vocab=vocab, eos_token=list(ends))
        self._vocab = vocab

    def compile(self, grammar: Mapping[str, Any]) -> GrammarState:
        """From `{"json_schema": ...}`, `{"json_object": true}`, `{"regex": ...}`, `{"choice": [...]}` or
        `{"lark": ...}`.
        """
        ((kind, value),) = grammar.items()
        try:
            source = self._source(kind, value)
        except (Exception, RecursionError) as wrong:  # the readers of each form raise their own
            raise InvalidRequest(f"grammar: {kind} cannot be read: {wrong}", "grammar") from None
        state = GrammarState(self._matcher(self._tokenizer, source, log_level=0), self._vocab)
        if not state.problem:
            state.mask(())  # endless recursion shows at the first mask
        if state.problem:
            raise InvalidRequest(f"grammar: {kind} does not compile: {state.problem}", "grammar")
        return state

    def _source(self, kind: str, value: Any) -> str:
        if kind == "json_schema":
            schema = value if isinstance(value, str) else json.dumps(value)
            _check_remainders(_multiples(schema))
            return self._matcher.grammar_from_json_schema(_spelled(json.loads(schema)))
        if kind == "json_object":
            return self._matcher.grammar_from_json_schema(_spelled({"type": "object"}))
        if kind == "regex":
            return self._matcher.grammar_from_regex(value)
        if kind == "choice":
            # One terminal: as many rules would be too many for the parser from two thousand on.
            return self._matcher.grammar_from_lark(
                "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice) for choice in dict.fromkeys(value))
            )
        lark = self._to_lark(value)  # GBNF becomes Lark, Lark stays
        _check_remainders(_embedded_multiples(lark))
        return self._matcher.grammar_from_lark(lark)


def _spelled(schema: Any) -> str:
    """The schema, with one way to write what it allows, unless it has its own."""
    return json.dumps({"x-guidance": JSON_SPELLING, **schema} if isinstance(schema, dict) else schema)


def _multiples(text: str) -> Iterator[Any]:
    """Every `multipleOf` in the JSON that a text begins with."""
    found: list[Any] = []

    def note(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found.extend(value for name, value in pairs if name == "multipleOf")
        return dict(pairs)

    read = json.JSONDecoder(object_pairs_hook=note, parse_int=Decimal, parse_float=Decimal)
    read.raw_decode(text.lstrip())
    return iter(found)


def _embedded_multiples(lark: str) -> Iterator[Any]:
    """The same of every schema in a grammar. What cannot be read is none, or will not be read by llguidance."""
    for mark in re.finditer("%json", lark):
        with contextlib.suppress(ValueError, ArithmeticError, RecursionError):
            yield from _multiples(lark[mark.end() :])


def _check_remainders(multiples: Iterator[Any]) -> None:
    """Powers of ten cost nothing: what counts is a number's digits without the zeros at its end."""
    digits = {
        int("".join(map(str, number.normalize().as_tuple().digits)))
        for number in multiples
        if isinstance(number, Decimal) and number.is_finite()
    }
    if math.prod(digits) > MOST_REMAINDERS:
        raise ValueError(f"multipleOf asks for more than {MOST_REMAINDERS} remainders to be told apart")


def _first_line(message: str) -> str:
    """The rest is the matcher's inner state."""
    return message.strip().partition("\n")[0]
