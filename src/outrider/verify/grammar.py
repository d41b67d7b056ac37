"""Structured output: which tokens may come next, at any node of a draft. Through llguidance.

A compiled grammar is a state that moves along the text; `mask` looks ahead along a path and comes back, so
every node of a draft is masked as plain decoding would mask it, and nothing needs undoing when a guess is
rejected.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.errors import InvalidRequest, OutriderError


class GrammarState:
    """Where one sequence stands in its grammar."""

    def __init__(self, matcher: Any, vocab: int) -> None:
        self._matcher, self._vocab = matcher, vocab

    def copy(self) -> GrammarState:
        return GrammarState(self._matcher.deep_copy(), self._vocab)

    def mask(self, path: Sequence[int]) -> Tensor | None:
        """[vocab] True where a token may follow the text and `path`; None if the path itself may not."""
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
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)

    @property
    def complete(self) -> bool:
        """Nothing more may follow."""
        return bool(self._matcher.is_stopped())


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Made once: reading the vocabulary takes about half a second."""

    def __init__(self, tokenizer_json: str, vocab: int, ends: Sequence[int]) -> None:
        try:
            import llguidance  # an extra: only structured output needs it
        except ImportError:
            raise OutriderError(
                'structured output needs llguidance: pip install "outrider[grammar]"'
            ) from None
        self._matcher = llguidance.LLMatcher
        self._tokenizer = llguidance.LLTokenizer(tokenizer_json, n_vocab=vocab, eos_token=list(ends))
        self._vocab = vocab

    def compile(self, grammar: Mapping[str, Any]) -> GrammarState:
        """From `{"json_schema": ...}`, `{"json_object": true}`, `{"regex": ...}`, `{"choice": [...]}` or
        `{"lark": ...}`.
        """
        ((kind, value),) = grammar.items()
        try:
            source = self._source(kind, value)
        except (TypeError, ValueError) as wrong:
            raise InvalidRequest(f"grammar: {kind} cannot be read: {wrong}", "grammar") from None
        matcher = self._matcher(self._tokenizer, source)
        if matcher.is_error():
            raise InvalidRequest(f"grammar: {kind} does not compile: {matcher.get_error()}", "grammar")
        return GrammarState(matcher, self._vocab)

    def _source(self, kind: str, value: Any) -> str:
        if kind == "json_schema":
            return self._matcher.grammar_from_json_schema(
                value if isinstance(value, str) else json.dumps(value)
            )
        if kind == "json_object":
            return self._matcher.grammar_from_json_schema('{"type": "object"}')
        if kind == "regex":
            return self._matcher.grammar_from_regex(value)
        if kind == "choice":
            return self._matcher.grammar_from_lark(
                "start: " + " | ".join(json.dumps(choice) for choice in value)
            )
        return self._matcher.grammar_from_lark(value)
