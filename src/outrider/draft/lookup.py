"""`lookup`: drafts that what followed last time will follow again. No model, next to no cost.

Three places are searched for the longest ending of the text: the text itself, the user's prediction of the
answer, and past answers to the same owner, never anybody else's. The continuations found become one tree:
where they agree they share nodes, and the longest match has the first claim on them. In resident steps the text itself
and the prediction are searched, on the device.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from outrider.device.layout import TreeLayout
from outrider.device.ops import StepOps
from outrider.draft.drafter import ResidentDrafter
from outrider.draft.merged import merge_drafts
from outrider.draft.suffix import Automaton, Match, OwnMatch
from outrider.types import Draft, DraftPlan, Sequence

SHORTEST = 2  # tokens that must match before a continuation is believed
GRAM = 4  # past answers are found by this many tokens
LONGEST = 64  # how far back a match with a past answer is followed
READ = 4  # past answers read in one go
# In resident steps: how many tokens of an ending are compared, and how many must be the same. One is enough there, as
# the step's rows are paid for whether there is a draft or not.
REACH, SHORTEST_RESIDENT = 8, 1

# Tokens and predictions of all sequences, how long the predictions are, some rows, the sequences' lengths, how many to
# draft, how long sequences may be, and what counts as the same.
Find = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, int, int], tuple[Tensor, Tensor]]


class Text:
    """A sequence's tokens as an array, in which the longest ending is found in a few comparisons of all of it."""

    def __init__(self) -> None:
        self.tokens, self.read = np.empty(0, np.int64), 0

    def place(self, tokens: list[int], end: int, shortest: int) -> int:
        """Where what followed the longest ending of the first `end` tokens begins, up to REACH of them and the latest
        such place; 0: nowhere are as many as `shortest` the same.
        """
        if end > len(self.tokens):
            self.tokens = np.resize(self.tokens, 2 * end)
        if end > self.read:
            self.tokens[self.read : end] = tokens[self.read : end]
            self.read = end
        text, size = self.tokens, 1
        places = np.flatnonzero(text[: end - 1] == tokens[end - 1]) + 1
        while len(places) and size < min(REACH, end):
            longer = places[(places > size) & (text[places - size - 1] == tokens[end - size - 1])]
            if not len(longer):
                break
            places, size = longer, size + 1
        return int(places[-1]) if len(places) and size >= shortest else 0


@dataclass(slots=True)
class State:
    own: OwnMatch
    prediction: Match | None
    read: int = 0  # tokens of the sequence already in
    text: Text = field(default_factory=Text)  # for scores alone


@dataclass(slots=True)
class Past:
    """One owner's earlier answers: where each run of GRAM tokens was last seen. The oldest are forgotten.

    Answers are read when somebody looks for a draft, a few at a time: nobody may.
    """

    answers: deque[list[int]] = field(default_factory=deque)
    unread: deque[list[int]] = field(default_factory=deque)
    grams: dict[tuple[int, ...], tuple[list[int], int]] = field(default_factory=dict)
    size: int = 0

    def add(self, answer: list[int], room: int) -> None:
        self.answers.append(answer)
        self.unread.append(answer)
        self.size += len(answer)
        while self.size > room:
            self._forget(self.answers.popleft())

    def _forget(self, answer: list[int]) -> None:
        self.size -= len(answer)
        if self.unread and self.unread[0] is answer:
            self.unread.popleft()
            return
        for end in range(GRAM, len(answer) + 1):
            key = tuple(answer[end - GRAM : end])
            if key in self.grams and self.grams[key][0] is answer:
                del self.grams[key]

    def _read(self) -> None:
        for _ in range(min(READ, len(self.unread))):
            answer = self.unread.popleft()
            for end in range(GRAM, len(answer) + 1):
                self.grams[tuple(answer[end - GRAM : end])] = (answer, end)

    def continuation(self, text: Seq[int], n: int) -> tuple[int, list[int]]:
        """How long an ending of `text` matched, and what followed it."""
        self._read()
        answer, end = self.grams.get(tuple(text[-GRAM:]), ([], 0))
        size = 0
        while size < min(end, len(text), LONGEST) and answer[end - 1 - size] == text[-1 - size]:
            size += 1
        return size, answer[end : end + n]


def find_copies(
    tokens: Tensor,
    predictions: Tensor,
    predicted: Tensor,
    rows: Tensor,
    lengths: Tensor,
    n: int,
    context: int,
    reach: int,
    shortest: int,
) -> tuple[Tensor, Tensor]:
    """The longest ending of each text, up to `reach` tokens, that occurs in its prediction or earlier in the text, the
    latest such place, and the n tokens [S, n] that followed there; how many of them are proposed [S], none where fewer
    than `shortest` are the same. A prediction counts as if GRAM more were: the user said what to expect.
    """
    before = predicted[rows][:, None]  # the prediction lies before the text
    place = torch.arange(predictions.shape[1] + context, device=tokens.device)
    own = tokens[rows].gather(1, (place - before).clamp(min=0, max=tokens.shape[1] - 1))
    texts = torch.where(place < before, predictions[rows][:, place.clamp(max=predictions.shape[1] - 1)], own)
    last = lengths + predicted[rows]
    size = torch.zeros_like(texts)
    same = place < last[:, None]  # places whose next token is known
    for back in range(reach):
        ending = texts.gather(1, (last - back).clamp(min=0)[:, None])
        shifted = torch.roll(texts, back, dims=1)
        same = same & (shifted == ending) & (place >= back) & (lengths[:, None] >= back)
        size += same
    value = (size + GRAM * (place < before)) * len(place) + place
    best = value.masked_fill(size < shortest, -1).amax(1)
    found = best >= 0
    start = torch.where(found, best % len(place) + 1, 0)
    at = start[:, None] + torch.arange(n, device=texts.device)
    ends = torch.where(start <= predicted[rows], predicted[rows], last + 1)
    count = torch.where(found, (ends - start).clamp(max=n), 0)
    return texts.gather(1, at.clamp(max=texts.shape[1] - 1)), count


class LookupDrafter(ResidentDrafter):
    max_depth, trees, model_free = 15, False, True  # deep, as its draft tokens take no passes

    def __init__(self, owners: int = 256, tokens_per_owner: int = 65536, find: Find = find_copies) -> None:
        """`find` is how resident sequences are searched: `find_copies`, or a GPU's kernel for it."""
        self.owners, self.room, self.find = owners, tokens_per_owner, find
        self.states: dict[Sequence, State] = {}
        # By owner and text, as long as somebody uses it: many choices may have one prediction.
        self.predictions: WeakValueDictionary[tuple[str, tuple[int, ...]], Automaton] = WeakValueDictionary()
        self.past: OrderedDict[str, Past] = OrderedDict()  # least recently used first

    def start(self, sequence: Sequence) -> None:
        match = Match(self._prediction(sequence)) if sequence.request.prediction_ids else None
        self.states[sequence] = State(OwnMatch(), match)

    def _prediction(self, sequence: Sequence) -> Automaton:
        key = (sequence.request.owner, sequence.request.prediction_ids)
        automaton = self.predictions.get(key)
        if automaton is None:
            automaton = self.predictions[key] = Automaton(sequence.request.prediction_ids)
        return automaton

    def propose(self, sequences: Seq[Sequence], draft_plans: Seq[DraftPlan]) -> list[Draft]:
        return [self._draft(s, draft_plan) for s, draft_plan in zip(sequences, draft_plans, strict=True)]

    def stop(self, sequence: Sequence) -> None:
        self.states.pop(sequence, None)
        owner, answer = sequence.request.owner, sequence.output
        if len(answer) > GRAM:
            self.past.setdefault(owner, Past()).add(answer, self.room)
            self.past.move_to_end(owner)
            if len(self.past) > self.owners:
                self.past.popitem(last=False)

    def shadow_propose(self, sequence: Sequence, end: int, n: int, resident: bool) -> Seq[int]:
        shortest, tokens = SHORTEST_RESIDENT if resident else SHORTEST, sequence.tokens
        at = self.states[sequence].text.place(tokens, end, shortest)
        return tokens[at : min(at + n, end)] if at else ()

    def propose_resident(
        self, ops: StepOps, rows: Tensor, lengths: Tensor, tree: TreeLayout, context: int
    ) -> tuple[Tensor, Tensor]:
        state = ops.state
        texts = state.tokens, state.predictions, state.predicted
        context = min(context, state.width)
        return self.find(*texts, rows, lengths, len(tree), context, REACH, SHORTEST_RESIDENT)

    def _draft(self, sequence: Sequence, draft_plan: DraftPlan) -> Draft:
        state = self.states[sequence]
        for token in sequence.tokens[state.read :]:
            state.own.advance(token)
            if state.prediction and state.read >= sequence.prompt_len:
                state.prediction.advance(token)
            state.read += 1
        chains = [Draft.chain(tokens) for tokens in self._found(sequence, state, draft_plan.depth)]
        return merge_drafts(chains, draft_plan.nodes)[0]

    def _found(self, sequence: Sequence, state: State, depth: int) -> list[list[int]]:
        """Continuations, longest match first."""
        found: list[tuple[int, list[int]]] = []
        if state.own.size >= SHORTEST:
            found.append((state.own.size, state.own.continuation(depth)))
        if match := state.prediction:
            if not sequence.output:  # nothing written yet: the prediction's beginning
                found.append((1 << 30, match.automaton.text[:depth]))
            elif match.size:  # one token is enough: the user said what to expect
                found.append((match.size + GRAM, match.continuation(depth)))
        if past := self.past.get(sequence.request.owner):
            size, tokens = past.continuation(sequence.tokens, depth)
            if size >= GRAM:
                found.append((size, tokens))
        found.sort(key=lambda pair: -pair[0])
        return [tokens for _, tokens in found if tokens]
