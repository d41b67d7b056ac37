"""`lookup`: drafts what followed the ending of the text at an earlier place. It runs no model.

**The searchable text** of a sequence is recent answers to the same owner (never to another), then the user's
prediction of the answer, then the sequence's own tokens. The first two are the sequence's *references*: fixed when it
starts, and together at most MAX_REFERENCES tokens. The prediction has priority, then the latest answers. A separator
(-1) ends each of them; it matches nothing and is never proposed, so that neither a match nor a draft crosses from one
text into the next.

**The search** takes the longest ending of the own tokens, up to REACH, that occurs earlier in the searchable text with
at least one token behind it; among equally long ones the latest. An occurrence in the own tokens must have SHORTEST
tokens, one in a past answer GRAM. In the prediction one token suffices, and GRAM more count as matching: the user said
what to expect. **The draft** is the chain that followed there. Before anything was written, it is the beginning of the
prediction.

The search exists three times with one result, which tests compare: `Text.continuation` for one sequence on the host,
`find_copies` for rows of the device's state in torch, and the Triton kernels of `model/kernels/gpu/copies.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from outrider.device.ops import StepOps, TreeLayout
from outrider.device.state import MAX_REFERENCES
from outrider.draft.drafter import ResidentDrafter
from outrider.types import Draft, DraftPlan, References, Sequence

REACH, SHORTEST, GRAM = 8, 2, 4
SEPARATOR = -1

# Tokens, references and spans of all sequences, some rows, the sequences' lengths, how many tokens to draft, how long
# sequences may be, and REACH, SHORTEST and GRAM.
Find = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, int, int, tuple[int, int, int]], tuple[Tensor, Tensor]
]


class Text:
    """The searchable text of a sequence as one array. It begins with REACH separators, where comparisons end."""

    def __init__(self, sequence: Sequence) -> None:
        given = sequence.references
        self.prompt_len, self.read = sequence.prompt_len, 0  # own tokens in the array
        self.prediction = REACH + given.answers  # where it begins
        self.own = REACH + len(given.tokens)
        self.latest = -1, 0  # the latest search: planning and launching a step ask for the same
        self._hold(np.full(self.own + 2 * len(sequence.tokens), SEPARATOR, np.int32))
        self.array[REACH : self.own] = given.tokens

    def _hold(self, array: np.ndarray) -> None:
        self.array = array
        self.endings = sliding_window_view(array, REACH)[:, ::-1]  # by the place of their first token

    def continuation(self, tokens: list[int], end: int, n: int) -> list[int]:
        """Up to n tokens to draft after the first `end` of the sequence's tokens."""
        if end > self.read:
            if self.own + end > len(self.array):
                self._hold(np.resize(self.array, self.own + 2 * end))
            self.array[self.own + self.read : self.own + end] = tokens[self.read : end]
            self.read = end
        last = self.own + end - 1
        opening = end <= self.prompt_len and self.prediction < self.own
        if self.latest[0] != last:
            self.latest = last, self.prediction if opening else self._search(last)
        start = self.latest[1]
        found: list[int] = self.array[start : min(start + n, last + 1)].tolist()
        return found[: found.index(SEPARATOR)] if SEPARATOR in found else found

    def _search(self, last: int) -> int:
        """Where the draft begins, if the own tokens end at `last`; 0, where a separator is, if it is empty."""
        text, end = self.array, last + 1 - self.own
        places = (text[:last] == text[last]).nonzero()[0]
        if not len(places):
            return 0
        if self.prediction == self.own:  # else every place in the prediction counts
            places = places[text[places - 1] == text[last - 1]]
            if not len(places):
                return 0
        other = self.endings[places + (1 - REACH)] != self.endings[last + 1 - REACH]
        size = other.argmax(1)  # how many tokens back the first one that differs is; 0: none does
        size[size == 0] = REACH
        if end < REACH:
            np.minimum(size, end, out=size)
        if places[0] < self.own:
            prediction, own = places.searchsorted((self.prediction, self.own))
            size[:prediction] *= size[:prediction] >= GRAM
            size[prediction:own] += GRAM
            size *= text[places + 1] != SEPARATOR
        best = len(size) - 1 - int(size[::-1].argmax())
        return int(places[best]) + 1 if size[best] >= SHORTEST else 0


def find_copies(
    tokens: Tensor,
    references: Tensor,
    spans: Tensor,
    rows: Tensor,
    lengths: Tensor,
    n: int,
    context: int,
    limits: tuple[int, int, int],
) -> tuple[Tensor, Tensor]:
    """The search for rows [S] of the device's state, whose last known tokens are at `lengths`. Returns n tokens each
    [S, n], and how many of them are drafted [S].
    """
    reach, shortest, gram = limits
    # A graph's shapes are fixed. On a CPU the search is as wide as the longest references of these rows.
    wide = references.shape[1] if tokens.is_cuda else max(1, int(spans[rows, 1].max()))
    answers, before, prompt = (span[:, None] for span in spans[rows].unbind(1))
    place = torch.arange(wide + context, device=tokens.device)
    own = tokens[rows].gather(1, (place - before).clamp(min=0, max=tokens.shape[1] - 1))
    texts = torch.where(place < before, references[rows][:, place.clamp(max=wide - 1)], own)
    known, last = lengths[:, None], lengths[:, None] + before
    padded = torch.nn.functional.pad(texts, (reach, 1), value=SEPARATOR)
    size = torch.zeros_like(texts, dtype=torch.int32)
    same = (place < last) & (padded[:, reach + 1 :] >= 0)
    for back in range(reach):
        ending = texts.gather(1, (last - back).clamp(min=0)).masked_fill(known < back, SEPARATOR - 1)
        same &= padded[:, reach - back : reach - back + len(place)] == ending
        size += same
    predicted = (place >= answers) & (place < before)
    needed = torch.where(place < before, torch.where(predicted, 1, gram), shortest)
    value = (size + gram * predicted) * len(place) + place
    best = value.masked_fill(size < needed, -1).amax(1, keepdim=True)
    opening = (known < prompt) & (answers < before)
    at = torch.where(opening, answers, best % len(place) + 1) + torch.arange(n, device=texts.device)
    drafted = texts.gather(1, at.clamp(max=texts.shape[1] - 1))
    proposed = (opening | (best >= 0)) & (at <= last) & (drafted >= 0)
    return drafted.clamp(min=0), proposed.cumprod(1).sum(1)


class LookupDrafter(ResidentDrafter):
    max_depth, trees, model_free = 15, False, True  # deep, as its draft tokens take no passes

    def __init__(self, owners: int = 256, find: Find = find_copies) -> None:
        """`find` is how resident sequences are searched: `find_copies`, or a GPU's kernel for it."""
        self.owners, self.find = owners, find
        self.texts: dict[Sequence, Text] = {}
        # Recent answers by owner, a separator after each; the least recently used owner first.
        self.past: OrderedDict[str, np.ndarray] = OrderedDict()

    def start(self, sequence: Sequence) -> None:
        past = self.past.get(sequence.request.owner, np.empty(0, np.int32))
        if expected := sequence.request.prediction_ids[: MAX_REFERENCES - 1]:
            past = past[max(len(past) + len(expected) + 1 - MAX_REFERENCES, 0) :]
            tokens = np.array((*past.tolist(), *expected, SEPARATOR), np.int32)
            sequence.references = References(tokens, len(past))
        else:
            sequence.references = References(past, len(past))

    def propose(self, sequences: Seq[Sequence], draft_plans: Seq[DraftPlan]) -> list[Draft]:
        return [
            Draft.chain(self.shadow_propose(one, len(one.tokens), min(plan.depth, plan.nodes)))
            for one, plan in zip(sequences, draft_plans, strict=True)
        ]

    def stop(self, sequence: Sequence) -> None:
        self.texts.pop(sequence, None)
        owner, answer = sequence.request.owner, sequence.output
        if len(answer) > GRAM:
            latest = np.array((*answer[1 - MAX_REFERENCES :], SEPARATOR), np.int32)
            past = np.concatenate((self.past.get(owner, latest[:0]), latest))
            self.past[owner] = past[-MAX_REFERENCES:]
            self.past.move_to_end(owner)
            if len(self.past) > self.owners:
                self.past.popitem(last=False)

    def shadow_propose(self, sequence: Sequence, end: int, n: int) -> list[int]:
        text = self.texts.get(sequence)
        if text is None:
            text = self.texts[sequence] = Text(sequence)
        return text.continuation(sequence.tokens, end, n)

    def propose_resident(
        self, ops: StepOps, rows: Tensor, lengths: Tensor, tree: TreeLayout, context: int
    ) -> tuple[Tensor, Tensor]:
        state = ops.state
        texts = state.tokens, state.references, state.spans
        context = min(context, state.width)
        return self.find(*texts, rows, lengths, len(tree), context, (REACH, SHORTEST, GRAM))
