"""The steps of one choice as an answer shows them: the draft, what the target accepted of it, and why it was made.

Made in the API process from what the engine reports, so that writing them costs no step any time.
"""

from __future__ import annotations

from typing import Any

from outrider.serve.link import Detail
from outrider.serve.model import ServedModel


class StepWriter:
    def __init__(self, model: ServedModel, last: int) -> None:
        """`last`: the token before the answer's first."""
        self.steps: list[dict[str, Any]] = []
        self.prediction: list[int] = []  # the user's
        self._model, self._last, self._text = model, last, model.tokenizer.text_stream()

    def add(self, tokens: list[int], step: Detail) -> None:
        """A step that emitted these tokens. The texts of all of them, joined, are the answer's text."""
        path = [step.tokens[node] for node in step.accepted]
        copied = self._copied(path) if "lookup" in step.drafter.split("+") else 0
        emitted = [
            {"id": token, "text": self._text.feed(token), "origin": origin, "predicted": i < copied}
            for i, (token, origin) in enumerate(zip(tokens, step.origins, strict=True))
        ]
        draft = {
            "tokens": step.tokens,
            "texts": [self._model.token_text(token)[0] for token in step.tokens],
            "parents": step.parents,
        }
        facts = [dict(zip(("name", "value", "bound"), fact, strict=False)) for fact in step.facts]
        reason = {"kind": step.kind, "depth": step.depth, "text": step.reason, "facts": facts}
        self.steps.append(
            {
                "tokens": emitted,
                "drafter": step.drafter,
                "draft": draft,
                "accepted": step.accepted,
                "reason": reason,
            }
        )
        self._last = tokens[-1] if tokens else self._last

    def _copied(self, path: list[int]) -> int:
        """How many accepted tokens stand in the user's prediction behind the token before them, as lookup copies."""
        text = self.prediction
        starts = [place + 1 for place, token in enumerate(text) if token == self._last]
        if not self.steps:
            starts.append(0)  # lookup begins with the prediction's beginning
        return max((_shared(text, start, path) for start in starts), default=0)


def _shared(text: list[int], start: int, path: list[int]) -> int:
    length = 0
    while length < len(path) and start + length < len(text) and text[start + length] == path[length]:
        length += 1
    return length
