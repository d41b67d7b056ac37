"""What steps cost here, learned from those taken. `Costs`: seconds of a packed step by rows, and of a level of
guessing. `RoundCosts`: seconds of a round on the device, which drafts and checks in one piece.
"""

from __future__ import annotations

from outrider.control.forms import NO_FORM, Form
from outrider.types import StepRecord

KEEP = 0.9  # weight of what was known against the newest measurement
# believed cost of a row nobody has measured yet, as a share of a step; low, so that it gets measured
SLOPE = 0.05
HOPED = 0.02  # the same for a guess in a round
FEW = 256  # tokens that a drafter reads in the time of one
SLOWEST = 4  # plain rounds' time that they take, at most: beyond, something was made on the way


class Costs:
    def __init__(self) -> None:
        self.by_rows: dict[int, float] = {}
        self.by_drafter: dict[str, float] = {}  # seconds a level

    def observe(self, record: StepRecord) -> None:
        if record.known != record.sequences:
            return  # part of a prompt was read: not a step a plan could have changed
        _learn(self.by_rows, record.rows, (record.total_s - record.draft_s) / record.passes)
        levels = max((o.deepest for o in record.outcomes), default=0)
        names = {o.bet.drafter for o in record.outcomes if o.drafted}
        if levels and len(names) == 1:
            _learn(self.by_drafter, names.pop(), record.draft_s / levels)

    def step(self, rows: int) -> float:
        """Seconds of a step over `rows`, from the nearest measured counts."""
        if not self.by_rows:
            return 1.0 + SLOPE * rows
        if rows in self.by_rows:
            return self.by_rows[rows]
        below = [r for r in self.by_rows if r < rows]
        above = [r for r in self.by_rows if r > rows]
        if below and above:
            a, b = max(below), min(above)
            share = (rows - a) / (b - a)
            return self.by_rows[a] * (1 - share) + self.by_rows[b] * share
        near = max(below) if below else min(above)
        return self.by_rows[near] * (1 + SLOPE * rows) / (1 + SLOPE * near)

    def level(self, drafter: str) -> float:
        return self.by_drafter.get(drafter, 0.0)


class RoundCosts:
    """By the form of the guesses (depth and nodes) and how many sequences have room in a round, a power of two."""

    def __init__(self) -> None:
        # By drafter, form and size; plain: "none", NO_FORM.
        self.seconds: dict[tuple[str, Form, int], float] = {}
        self.a_token: dict[str, float] = {}  # by drafter: seconds to read one

    def observe(self, drafter: str, form: Form, size: int, seconds: float) -> None:
        _learn(self.seconds, (drafter, form, size), seconds)

    def observe_reading(self, drafter: str, tokens: int, seconds: float) -> None:
        """A drafter read on before it could guess. The least counts: at times something is made on the way."""
        self.a_token[drafter] = min(self._a_token(drafter), seconds / max(tokens, FEW))

    def _a_token(self, drafter: str) -> float:
        """Seconds to read one; while nobody knows, as many as it may take."""
        if drafter in self.a_token:
            return self.a_token[drafter]
        plain = (cost for (_, form, _), cost in self.seconds.items() if form == NO_FORM)
        return SLOWEST * min(plain, default=0.0) / FEW

    def reading(self, drafter: str, tokens: int) -> float:
        """Seconds to read so many tokens; few take as long as some more do."""
        return self._a_token(drafter) * max(tokens, FEW) if tokens else 0.0

    def plain(self, size: int) -> float | None:
        return self.seconds.get(("none", NO_FORM, size))

    def forms(self, drafter: str, size: int) -> list[Form]:
        """Those whose cost is known."""
        return [form for name, form, s in self.seconds if (name, s) == (drafter, size)]

    def ratio(self, drafter: str, form: Form, size: int) -> float:
        """A round's cost against a plain one's. Of a form that was not measured: by its rows from the nearest, or
        hoped to be low, so that it gets measured.
        """
        plain, known = self.plain(size), self.forms(drafter, size)
        if form == NO_FORM:
            return 1.0
        if plain is None or not known:
            return 1 + HOPED * form[1]
        if form in known:
            return self.seconds[drafter, form, size] / plain
        nearest = min(known, key=lambda one: (abs(one[1] - form[1]), one))
        return 1 + (self.seconds[drafter, nearest, size] / plain - 1) * form[1] / nearest[1]


def _learn(known: dict, key: object, value: float) -> None:
    known[key] = KEEP * known[key] + (1 - KEEP) * value if key in known else value
