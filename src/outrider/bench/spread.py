"""Percentiles of what was measured. One is interpolated between neighbours, as numpy does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def spread(values: Sequence[float] | np.ndarray) -> dict[str, float] | None:
    """Mean and percentiles; None of nothing."""
    if not len(values):
        return None
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return {"mean": float(np.mean(values)), "p50": float(p50), "p90": float(p90), "p99": float(p99),
            "max": float(np.max(values))}  # fmt: skip
