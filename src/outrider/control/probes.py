"""When a drafter that is not in use may be tried again: seldom enough that it costs next to nothing."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.control.guards import Guards
from outrider.types import Sequence


def probe_due(
    guards: Guards, idle: float, lost: float, speedup: float, sequences: Seq[Sequence], spared: bool = False
) -> bool:
    """Whether a probe that loses so much may be made after so long; both in plain steps' time. `spared`: what was
    drafted for these never paid.
    """
    share = guards.spare_probe_share if speedup > 1 else guards.probe_share
    share *= guards.patience_share if spared else 1.0
    if not share:
        return False
    longest = max(1.0, guards.probe_answer_share * tokens_left(sequences) / speedup)
    return idle >= max(guards.probe_interval, lost / share) and lost <= longest


def tokens_left(sequences: Seq[Sequence]) -> float:
    """Of one answer, at most, on average."""
    left = sum(s.remaining for s in sequences)
    return left / max(len(sequences), 1)
