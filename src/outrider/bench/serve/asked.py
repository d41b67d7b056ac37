"""What is asked: the body of every request, by its number. The same seed and number give the same body."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.bench.prompts import KINDS
from outrider.bench.serve.arrivals import Due, Lengths
from outrider.bench.serve.http import NotHttp, Pool, Reply

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ENOUGH = 32  # words of one token each
CALLS = 96  # of a server's tokenizer, at most
USUAL = Lengths(256, 256)
WORDS = sorted(
    {word for texts in KINDS.values() for text in texts for word in re.findall(r"\b[a-z]{2,8}\b", text)}
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Words to make prompts of, and the tokens each of them is."""

    words: tuple[str, ...] = tuple(WORDS)
    sizes: tuple[int, ...] = ()  # empty: one token each, as far as is known
    measured: bool = False  # by the server's own tokenizer

    def text(self, tokens: int, chance: random.Random) -> str:
        """About `tokens` tokens, each word with the space before it."""
        if not self.sizes:
            return " " + " ".join(chance.choices(self.words, k=tokens))
        chosen, left = [], tokens
        pairs = list(zip(self.words, self.sizes, strict=True))
        while pairs:
            word, size = chance.choice(pairs)
            if size > left:
                pairs = [pair for pair in pairs if pair[1] <= left]
                continue
            chosen.append(word)
            left -= size
        return " " + " ".join(chosen or [min(self.words, key=len)])


@dataclass(frozen=True, slots=True)
class Asked:
    """Requests without end. `rows` are asked as they are, in turn; without any, prompts are made up."""

    path: str
    model: str
    output: Lengths | None
    input: Lengths = USUAL
    rows: tuple[Mapping[str, Any], ...] = ()
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    trace: tuple[Due, ...] = ()
    seed: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)  # of every body

    def body(self, number: int) -> dict[str, Any]:
        chance = random.Random(f"{self.seed} {number}")
        size, length = self.input.draw(chance), self.output.draw(chance) if self.output else None
        if self.trace and number >= 0:
            due = self.trace[number % len(self.trace)]
            size, length = due.input_tokens or size, due.output_tokens or length
        body: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body |= {} if length is None else {"max_tokens": length}
        if self.rows:
            body |= self.rows[number % len(self.rows)]
        else:
            text = self.vocabulary.text(size, chance)
            body |= (
                {"messages": [{"role": "user", "content": text}]} if self.path == CHAT else {"prompt": text}
            )
        if self.fields.get("temperature"):
            body["seed"] = self.seed + number % 2**31
        return body | dict(self.fields)


async def vocabulary_of(pool: Pool, model: str) -> Vocabulary:
    """Words by the server's `/tokenize`, those of a single token if there are enough; else words as they are."""
    found: dict[str, int] = {}
    if await _count(pool, model, WORDS[:1]) is None:
        return Vocabulary()
    groups = [WORDS]
    for _ in range(CALLS):
        if not groups:
            break
        words = groups.pop()
        count = await _count(pool, model, words)
        if count is None:
            return Vocabulary()
        if count == len(words) or len(words) == 1:
            found |= {word: count // len(words) for word in words}
        elif sum(size == 1 for size in found.values()) < ENOUGH:
            groups += [words[: len(words) // 2], words[len(words) // 2 :]]
    if not found:
        return Vocabulary()
    single = tuple(word for word, size in found.items() if size == 1)
    if len(single) >= ENOUGH:
        return Vocabulary(single, (), True)
    return Vocabulary(tuple(found), tuple(found.values()), True)


async def _count(pool: Pool, model: str, words: list[str]) -> int | None:
    """Tokens of these words, each with the space before it; None where the server does not say."""
    reply = Reply()
    body = {"model": model, "prompt": " " + " ".join(words), "add_special_tokens": False}
    try:
        await pool.ask(pool.server.request("POST", "/tokenize", body), reply)
    except NotHttp:
        return None
    said = reply.json()
    count = said.get("count") if isinstance(said, dict) and reply.status == 200 else None
    return count if isinstance(count, int) and count > 0 else None
