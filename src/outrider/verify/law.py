"""The law of sampling, and `coupled` verification, which is the same law at every node of a draft.

    y_t = argmax_v  l_t(v) + G(s, t, v)      G = -log(-log U),  U keyed by (seed, position, token)
    y_t = argmax_v  l_t(v)                   at temperature 0; ties go to the lowest id

Why it is exact: adding Gumbel noise to log-probabilities and taking the argmax draws from the softmax, so
plain decoding samples the target.

Why speculation changes nothing: y_t is a function of the target's logits after the true text, the seed and t.
A draft only decides which rows are computed in advance. The walk starts at the root and descends to the child
whose token equals y. The row of that child was computed after the true text, so its y is the true next token.
Where no child matches, the walk emits y and stops. So every emitted token is the one of plain decoding.

Pure functions; randomness is passed in as seeds.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.verify.rows import Fetched, Ints, LogitRows, TreeRows

Draw = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Filter = Callable[[Tensor, Tensor, Tensor, Tensor], None]
Result = tuple[list[int], list[int]]  # accepted nodes in path order; tokens emitted


def coupled(chosen: Ints, rows: TreeRows) -> list[Result]:
    """`chosen`: the law's token at every row."""
    return follow(chosen[rows.parent] == rows.token, chosen, rows)


def choose(processed: Tensor, rows: LogitRows, draw: Draw) -> Fetched:
    """The law at every row: [R, vocab] -> the token each row would emit."""
    keys = rows.keys(processed.device)
    return Fetched(draw(processed, keys.sampled, keys.seeds, keys.positions))


def follow(matches: NDArray[np.bool_], chosen: Ints, rows: TreeRows) -> list[Result]:
    """Descends from each root while nodes match, then emits the law's token where the walk ended."""
    if not any(rows.drafts):
        return [([], [int(token)]) for token in chosen]
    matches = matches | (rows.depth == 0)
    alive = matches.copy()
    for _ in range(
        int(rows.depth.max(initial=0)) - 1
    ):  # one iteration per level of the deepest draft, for all rows at once
        alive = matches & alive[rows.parent]
    reach = np.where(alive, rows.depth, -1)
    results = []
    for start, draft in zip(rows.starts, rows.drafts, strict=True):
        last = int(reach[start : start + 1 + len(draft)].argmax())
        path = draft.path(last - 1)
        results.append((path, [*(draft.tokens[i] for i in path), int(chosen[start + last])]))
    return results
