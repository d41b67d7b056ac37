"""What drafters that take no pass would have got, had they been asked: they are scored on what was verified.

A proposal is followed until it fails or ends, over several steps if need be, as a plain step brings one token.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from outrider.draft.drafters import Drafters
from outrider.types import Bet, Outcome, Sequence

DEPTH = 4  # tokens of a proposal: of more, nobody would know for longer whether any was right


class Proposal(NamedTuple):
    end: int  # tokens that the sequence has when the next of it is due
    tokens: Seq[int]
    right: int  # of those, so far


class Scores:
    def __init__(self, drafters: Drafters) -> None:
        self.drafters = drafters
        self.open: dict[Sequence, dict[str, Proposal]] = {}

    def score(self, name: str, sequence: Sequence, verified: Seq[int]) -> Outcome | None:
        """What became of its proposal once these tokens follow what is known; None: that is still open."""
        mine, known = self.open.setdefault(sequence, {}), len(sequence.tokens)
        end, tokens, right = mine.pop(name, Proposal(0, (), 0))
        if end != known:  # there is none, or nobody looked in between
            tokens, right = self.drafters.foresee(name, sequence, DEPTH), 0
        for i, token in enumerate(verified):
            if right == len(tokens) or tokens[right] != token:
                break
            right += 1
            if i + 1 == len(verified) and right < len(tokens):
                mine[name] = Proposal(known + len(verified), tokens, right)
                return None
        return Outcome(sequence, Bet(name), len(tokens), len(tokens), right, right)

    def stop(self, sequence: Sequence) -> None:
        self.open.pop(sequence, None)
