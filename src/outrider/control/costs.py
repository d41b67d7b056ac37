"""What a step costs here, learned from the steps taken: seconds by rows, and seconds a level of guessing."""

from __future__ import annotations

from outrider.types import StepRecord

KEEP = 0.9  # weight of what was known against the newest measurement
# believed cost of a row nobody has measured yet, as a share of a step; low, so that it gets measured
SLOPE = 0.05


class Costs:
    def __init__(self) -> None:
        self.by_rows: dict[int, float] = {}
        self.by_drafter: dict[str, float] = {}  # seconds a level

    def observe(self, record: StepRecord) -> None:
        if record.known != record.sequences:
            return  # part of a prompt was read: not a step a plan could have changed
        _learn(self.by_rows, record.rows, record.total_s - record.draft_s)
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


def _learn(known: dict, key: object, value: float) -> None:
    known[key] = KEEP * known[key] + (1 - KEEP) * value if key in known else value
