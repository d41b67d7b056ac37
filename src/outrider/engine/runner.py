"""Packs sequences and drafts into one flat batch. What the rows mean is said at `types.Batch`."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from outrider.cache.table import SlotTable
from outrider.types import Batch, Draft, Work


def pack(picks: Seq[Work], drafts: Seq[Draft], table: SlotTable) -> Batch:
    """Every pick's known tokens, then its draft's nodes. The table row already ends with slots for both.

    Logits are wanted of the rows that emit, in order, and after all of those of the prompt rows asked for.
    """
    sizes = [pick.known + len(draft) for pick, draft in zip(picks, drafts, strict=True)]
    total = sum(sizes)
    ids, ancestors = np.empty(total, np.int64), np.zeros(total, np.int64)
    positions, slots = np.empty(total, np.int32), np.empty(total, np.int32)
    owners, prefix = np.empty(total, np.int32), np.empty(total, np.int32)
    logit_rows: list[int] = []
    prompt_rows: list[int] = []
    at = 0
    for pick, draft, size in zip(picks, drafts, sizes, strict=True):
        sequence, base, known = pick.sequence, pick.sequence.cached, pick.known
        end, last = base + known, at + known
        ids[at:last] = sequence.tokens[base:end]
        positions[at:last] = np.arange(base, end)
        prefix[at:last] = np.arange(base + 1, end + 1)
        if size > known:
            ids[last : at + size] = draft.tokens
            positions[last : at + size] = np.array(draft.depths) + (end - 1)
            prefix[last : at + size] = end
            ancestors[last : at + size] = draft.ancestors
        slots[at : at + size] = table.entries[sequence.row, base : base + size]
        owners[at : at + size] = sequence.row
        if pick.emits:
            logit_rows.extend(range(last - 1, at + size))
        prompt_rows.extend(range(at, at + pick.scored))
        at += size
    return Batch(
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(slots),
        table_rows=torch.from_numpy(owners),
        prefix=torch.from_numpy(prefix),
        ancestors=torch.from_numpy(ancestors),
        table=table.tensor,
        logit_rows=torch.tensor(logit_rows + prompt_rows, dtype=torch.int64),
    )
