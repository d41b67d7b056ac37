"""Where in a text has its own ending been seen before? A suffix automaton, grown token by token.

Each token costs amortised constant time, and so does moving the match along: the automaton always knows the
longest ending of the text read so far that occurs earlier (or, in a fixed text, anywhere), and where that
occurrence ended.
"""

from __future__ import annotations

from collections.abc import Iterable


class Automaton:
    """All substrings of a text. State 0 is the empty one; `end[s]` is a place where state s ends: its
    first, or a later one noted.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.end = [0]
        self.text: list[int] = []
        self.last = 0
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        self.text.append(token)
        new = self._state(self.length[self.last] + 1, {}, len(self.text))
        state = self.last
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        self.link[new] = 0 if state < 0 else self._split(state, token)
        self.last = new

    def _split(self, state: int, token: int) -> int:
        """The state a link may point to: the one reached by `token`, cloned if it stands for longer texts
        too.
        """
        target = self.next[state][token]
        if self.length[target] == self.length[state] + 1:
            return target
        clone = self._state(self.length[state] + 1, dict(self.next[target]), self.end[target])
        self.link[clone] = self.link[target]
        while state >= 0 and self.next[state].get(token) == target:
            self.next[state][token] = clone
            state = self.link[state]
        self.link[target] = clone
        return clone

    def _state(self, length: int, moves: dict[int, int], end: int) -> int:
        self.next.append(moves)
        self.link.append(-1)
        self.length.append(length)
        self.end.append(end)
        return len(self.next) - 1


class Match:
    """The longest ending of a stream of tokens that occurs in an automaton's text."""

    def __init__(self, automaton: Automaton) -> None:
        self.automaton = automaton
        self.state = 0
        self.size = 0

    def advance(self, token: int) -> None:
        a = self.automaton
        while self.state and token not in a.next[self.state]:
            self.state = a.link[self.state]
            self.size = a.length[self.state]
        if token in a.next[self.state]:
            self.state = a.next[self.state][token]
            self.size += 1

    def continuation(self, n: int) -> list[int]:
        """Up to n tokens that followed the match where `end` says."""
        end = self.automaton.end[self.state]
        return self.automaton.text[end : end + n] if self.size else []


class OwnMatch(Match):
    """The longest ending of a growing text that occurs earlier in it. Of several such places the latest
    counts at which it was the longest.
    """

    def __init__(self) -> None:
        super().__init__(Automaton())

    def advance(self, token: int) -> None:
        a = self.automaton
        a.end[self.state] = len(a.text)  # when the last ending comes up again, this is its latest place
        a.add(token)
        # The link of the whole text is its longest ending that was there before.
        self.state = a.link[a.last]
        self.size = a.length[self.state]
