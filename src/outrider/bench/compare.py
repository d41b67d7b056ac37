"""Two answers to the same question, token by token."""

from __future__ import annotations

from collections.abc import Sequence


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Where they part; the end of the shorter one if it is the beginning of the other; None if they are equal."""
    if len(a) == len(b) and list(a) == list(b):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def differing(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens from the first difference on: what follows it is another text."""
    at = first_difference(a, b)
    return 0 if at is None else max(len(a), len(b)) - at


def cut(text: str, width: int) -> str:
    """No longer than `width`; what was longer shows it."""
    return text if len(text) <= width else text[: width - 1] + "…"
