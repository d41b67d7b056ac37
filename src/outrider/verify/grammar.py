"""Structured output: which tokens may come next, at any node of a draft. Through llguidance.

A compiled grammar is a state that advances with the text. `mask` looks ahead along a path and returns, so every node of
a draft gets the mask of plain decoding, and a rejected draft needs no rollback.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.verify.grammar_source import Matchers, first_line

Mask = NDArray[np.bool_]


class GrammarState:
    """The state of one sequence in its grammar."""

    def __init__(self, matcher: Any, vocab: int) -> None:
        self._matcher, self._vocab = matcher, vocab
        self._start, self._text = (
            matcher.deep_copy(),
            list[int](),
        )  # to come back from a path that broke the matcher
        self._failure: str | None = None

    def copy(self) -> GrammarState:
        return GrammarState(self._matcher.deep_copy(), self._vocab)

    def mask(self, path: Sequence[int]) -> Mask | None:
        """[vocab] True where a token may follow the text and `path`; None if the path itself may not."""
        bits = self.bits(path)
        return None if bits is None else np.unpackbits(bits, count=self._vocab, bitorder="little").view(bool)

    def bits(self, path: Sequence[int]) -> NDArray[np.uint8] | None:
        """The same as packed bits from the matcher, lowest token first."""
        if path and self.problem:
            return None
        bits, failure = None, None
        try:
            bits = self._bits(path)
        except Exception as error:  # one answer is lost, not every answer of the step
            failure = f"{type(error).__name__}: {error}"
        if path and (failure or self._matcher.is_error()):  # the text may never go there
            self._matcher, bits = self._start.deep_copy(), None
            self._matcher.consume_tokens(self._text)
        elif failure:
            self._failure = failure
        return bits

    def _bits(self, path: Sequence[int]) -> NDArray[np.uint8] | None:
        if path and self._matcher.validate_tokens(list(path)) < len(path):
            return None
        if path:
            self._matcher.consume_tokens(list(path))
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if path:
            self._matcher.rollback(len(path))
        return bits

    def advance(self, token: int) -> None:
        if not self._failure and not self._matcher.is_stopped():
            self._matcher.consume_token(token)
            self._text.append(token)

    @property
    def problem(self) -> str | None:
        """The matcher's error, if any: some grammars fail only in use."""
        if self._failure is None and self._matcher.is_error():
            self._failure = self._matcher.get_error()
        return None if self._failure is None else first_line(self._failure)

    @property
    def complete(self) -> bool:
        """Whether no token may follow."""
        return bool(self._matcher.is_stopped())


class GrammarCompiler:
    """Compiles grammars for one tokenizer."""

    def __init__(self, tokenizer_json: str, vocab: int, ends: Sequence[int]) -> None:
        self._matchers, self._vocab = Matchers(tokenizer_json, vocab, ends), vocab

    def compile(self, grammar: Mapping[str, Any]) -> GrammarState:
        return GrammarState(self._matchers.make(grammar), self._vocab)
