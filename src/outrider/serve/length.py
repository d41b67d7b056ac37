"""How long a text can be that still fits the model, known before tokenizing it: that takes seconds for some texts."""

from __future__ import annotations

from typing import Any

import msgspec

from outrider.errors import InvalidRequest
from outrider.load.tokenizer import Tokenizer

SLICE = 8192  # characters that are counted at once
# Times the limit; slices are cut where the tokenizer would not cut, which changes a count a little.
MARGIN = 2
COMPOSED = 4  # times fewer bytes, at most, once characters are composed (NFC and its like)
EXACT = frozenset({"ByteLevel", "Digits", "Split", "Metaspace", "Punctuation"})
COMPOSING = frozenset({"NFC", "NFKC", "NFD", "NFKD", "Prepend", "Replace", "Lowercase", "ByteLevel"})


class _TokenizerFile(msgspec.Struct):
    """Of a tokenizer.json: what could make a long text few tokens."""

    model: dict[str, Any]
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None
    added_tokens: list[dict[str, Any]] = []


def bytes_of_tokens(tokenizer: Tokenizer, source: str, tokens: int) -> int | None:
    """The most bytes of text that `tokens` tokens can stand for; None if a token can stand for any number."""
    file = msgspec.json.decode(source, type=_TokenizerFile)
    normalizers, cuts = _parts(file.normalizer, "normalizers"), _parts(file.pre_tokenizer, "pretokenizers")
    drops = any(str(part.get("behavior")).lower() == "removed" for part in cuts)
    strips = any(token.get("lstrip") or token.get("rstrip") for token in file.added_tokens)
    every_byte = file.model.get("byte_fallback") or any(part.get("type") == "ByteLevel" for part in cuts)
    known = {part.get("type") for part in cuts} <= EXACT and {
        part.get("type") for part in normalizers
    } <= COMPOSING
    if drops or strips or not every_byte or not known:
        return None
    longest = max(len(tokenizer.token_bytes(token, special=True)) for token in range(tokenizer.vocab_size))
    return longest * tokens * (COMPOSED if normalizers else 1)


def _parts(step: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    return list(step.get(name, ())) if step.get("type") == "Sequence" else [step]


def check_length(text: str, tokenizer: Tokenizer, tokens: int, most_bytes: int | None, param: str) -> None:
    """Refuses a text that certainly has too many tokens. One that passes may still have too many: encoding tells."""
    if len(text) <= MARGIN * tokens:
        return
    if most_bytes is not None and len(text) > most_bytes:
        raise _too_long(f"a text of {len(text)} characters", tokens, param)
    count = 0
    for begin in range(0, len(text), SLICE):
        count += len(tokenizer.encode(text[begin : begin + SLICE], special=False))
        if count > MARGIN * tokens + begin // SLICE:
            raise _too_long(f"a text of more than {count} tokens", tokens, param)


def _too_long(what: str, tokens: int, param: str) -> InvalidRequest:
    return InvalidRequest(
        f"{what} cannot fit: this model's maximum context length leaves room for {tokens} tokens; shorten it",
        param,
    )
