"""`lookup`: guesses that what followed last time will follow again. No model, next to no cost.

Three places are searched for the longest ending of the text: the text itself, the user's prediction of the
answer, and past answers to the same owner, never anybody else's. The continuations found become one tree:
where they agree they share nodes, and the longest match has the first claim on them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from outrider.draft.merged import merge_drafts
from outrider.draft.suffix import Automaton, Match, OwnMatch
from outrider.types import Bet, Draft, Sequence, Verdict

SHORTEST = 2  # tokens that must match before a continuation is believed
GRAM = 4  # past answers are found by this many tokens
LONGEST = 64  # how far back a match with a past answer is followed
READ = 4  # past answers read in one go


@dataclass(slots=True)
class State:
    own: OwnMatch
    prediction: Match | None
    read: int = 0  # tokens of the sequence already in


@dataclass(slots=True)
class Past:
    """One owner's earlier answers: where each run of GRAM tokens was last seen. The oldest are forgotten.

    Answers are read when somebody looks for a guess, a few at a time: nobody may.
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


class LookupDrafter:
    def __init__(self, owners: int = 256, tokens_per_owner: int = 65536) -> None:
        self.owners, self.room = owners, tokens_per_owner
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

    def propose(self, sequences: Seq[Sequence], bets: Seq[Bet]) -> list[Draft]:
        return [self._guess(s, bet) for s, bet in zip(sequences, bets, strict=True)]

    def accept(self, sequence: Sequence, draft: Draft, verdict: Verdict) -> None:
        pass  # new tokens are read when the next guess is asked for

    def stop(self, sequence: Sequence) -> None:
        self.states.pop(sequence, None)
        owner, answer = sequence.request.owner, sequence.output
        if len(answer) > GRAM:
            self.past.setdefault(owner, Past()).add(answer, self.room)
            self.past.move_to_end(owner)
            if len(self.past) > self.owners:
                self.past.popitem(last=False)

    def _guess(self, sequence: Sequence, bet: Bet) -> Draft:
        state = self.states[sequence]
        for token in sequence.tokens[state.read :]:
            state.own.advance(token)
            if state.prediction and state.read >= sequence.prompt_len:
                state.prediction.advance(token)
            state.read += 1
        chains = [Draft.chain(tokens) for tokens in self._found(sequence, state, bet.depth)]
        return merge_drafts(chains, bet.nodes)[0]

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
