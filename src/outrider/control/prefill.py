"""How many prompt rows a step with decoding sequences gets: a bound on the time that prefill adds to it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from math import inf

from outrider.control.costs import CostModel, round_up
from outrider.control.guards import BURST_STEPS, CROWDED, FEW_DECODING, Guards

MOST_EAGER_ROWS = 4096  # that a step's time is looked up for
MAX_PROMPT_ROWS = 1 << 20  # more than any step has


def prompt_rows(
    costs: CostModel, guards: Guards, decoding: int, waited: float, waiting: int = 1, pending: int = 0
) -> int:
    """`waited`: seconds that the oldest of `waiting` prompts has waited; `pending`: tokens of them all.

    The bound grows with that time. It also grows with the prompts that wait for each decoding sequence: few are slowed
    down then, and many helped.
    """
    if guards.prefill_slowdown == inf:
        return MAX_PROMPT_ROWS
    size = _captured_size(costs, decoding)
    plain = costs.captured.plain(size) if size else None
    if not size and costs.eager.by_rows:
        plain = costs.eager.step(decoding)
    if not plain:
        return MAX_PROMPT_ROWS
    # A captured step of many sequences hardly takes longer than one of a few, but more prompts arrive among many.
    base = max(plain, (costs.captured.plain(1) or 0.0) * decoding / FEW_DECODING)
    added = guards.prefill_slowdown * max(1.0, waited / guards.prefill_wait) * base
    sizes = costs.prompt_sizes(size) if size else {}
    if not sizes:
        return _eager_rows(costs.eager.per_prompt_row, added)
    added *= max(1.0, waiting / decoding / CROWDED)
    fitting = [rows for rows, seconds in sizes.items() if seconds <= plain + added]
    rows = max(fitting, default=min(sizes))
    if waiting >= max(2, CROWDED * decoding) and pending <= BURST_STEPS * max(sizes):
        rows = max([rows, *(one for one in sizes if one <= 2 * pending)])  # at least half of it is filled
    return rows


def background_rows(costs: CostModel, decoding: int, most: float) -> int:
    """Prompt rows of a step of background requests alone, which is to take `most` seconds."""
    if sizes := costs.prompt_sizes(_captured_size(costs, decoding)):
        return max((rows for rows, seconds in sizes.items() if seconds <= most), default=min(sizes))
    if not costs.eager.curve:  # as without drafters
        decode = costs.eager.step(decoding) if decoding and costs.eager.by_rows else 0.0
        return _eager_rows(costs.eager.per_prompt_row or costs.eager.per_lone_row, most - decode)
    rows = range(decoding + 1, MOST_EAGER_ROWS)
    return bisect_right(rows, most, key=costs.eager.curve_at)


def _captured_size(costs: CostModel, decoding: int) -> int:
    """Size of the smallest captured step that has room for `decoding` sequences; 0: there is none."""
    size = min(costs.captured.sizes("none"), default=0, key=lambda one: (one < decoding, one))
    return size if size >= decoding else 0


def _eager_rows(known: Mapping[int, float], added: float) -> int:
    """Prompt rows that add about `added` seconds, by the seconds per row of the nearest known number of rows."""
    if not known:
        return MAX_PROMPT_ROWS
    bucket = round_up(2 * max(known))
    while bucket > 1:
        near = min(known, key=lambda one: abs(one.bit_length() - bucket.bit_length()))
        rows = min(int(added / max(known[near], 1e-9)), bucket)
        if rows > bucket // 2:
            return rows
        bucket //= 2
    return 1
