"""Percentiles of what was measured. One is interpolated between neighbours, as numpy does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np


def spread(values: Sequence[float] | np.ndarray) -> dict[str, float] | None:
    """Mean and percentiles; None of nothing."""
    if not len(values):
        return None
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return {"mean": float(np.mean(values)), "p50": float(p50), "p90": float(p90), "p99": float(p99),
            "max": float(np.max(values))}  # fmt: skip


def spread_of_rounds(rounds: Iterable[Sequence[float]]) -> dict[str, Any] | None:
    """The spread of all rounds together. With more rounds than one, `rounds` has the lowest and the highest of each
    percentile in a round.
    """
    kept = [values for values in rounds if len(values)]
    found: dict[str, Any] | None = spread([value for values in kept for value in values])
    if found is None or len(kept) < 2:
        return found
    each = [spread(values) or {} for values in kept]
    spans = {at: [min(one[at] for one in each), max(one[at] for one in each)] for at in ("p50", "p90", "p99")}
    return found | {"rounds": spans}


def span_of_rounds(found: Mapping[str, Any] | None, percent: str) -> tuple[float, float] | None:
    """The lowest and the highest of a percentile in a round; None where there was one round."""
    span = ((found or {}).get("rounds") or {}).get(percent)
    return None if span is None else (span[0], span[1])
