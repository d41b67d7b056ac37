"""Conversations of several turns, as agents hold them: every turn sends all that was said before, answers included."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.bench.serve.arrivals import Lengths
from outrider.bench.serve.asked import Asked


@dataclass(frozen=True, slots=True)
class Conversations:
    """Their shape. A conversation waits until all others had a turn: their prefixes compete for the cache."""

    turns: int
    system: Lengths | None = None  # tokens of a system prompt; None: there is none
    systems: int = 1  # different system prompts of a round, which conversations share in turn

    def __str__(self) -> str:
        system = f", {self.systems} system prompts of {self.system} tokens" if self.system else ""
        return f"conversations of {self.turns} turns{system}"


class Conversation:
    """One of them, as far as it has come."""

    def __init__(self, asked: Asked, shape: Conversations, first: int, number: int) -> None:
        self.asked, self.shape, self.number = asked, shape, first + number
        self.turn = 0
        self.messages: list[dict[str, str]] = []
        if shape.system:
            chance = random.Random(f"{asked.seed} system {first} {number % shape.systems}")
            text = asked.vocabulary.text(shape.system.draw(chance), chance)
            self.messages.append({"role": "system", "content": text})

    def body(self) -> dict[str, Any]:
        """The next turn's request."""
        body = self.asked.body(self.number * self.shape.turns + self.turn)
        self.messages += body["messages"]
        return body | {"messages": list(self.messages)}

    def goes_on(self, answer: str) -> bool:
        self.messages.append({"role": "assistant", "content": answer})
        self.turn += 1
        return self.turn < self.shape.turns


def shape_of(raw: Mapping[str, Any] | None) -> Conversations | None:
    """From what `asdict` made of it."""
    if raw is None:
        return None
    return Conversations(**{**raw, "system": Lengths(**raw["system"]) if raw["system"] else None})
