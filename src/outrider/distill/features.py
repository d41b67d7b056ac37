"""What a draft learns from: the hidden states of the target and what it says of every token, by one pass of the model
that serves, over the tokens of a whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.distill.answers import TrainBatch
from outrider.draft.reading import pieces
from outrider.model.decoder import Layered, make_store
from outrider.model.staged import ROW_FIELDS
from outrider.types import Batch
from outrider.verify.rows import to_device

PASS_ROWS = {"cpu": 512, "cuda": 16384}  # tokens of one pass


@dataclass(frozen=True, slots=True)
class Features:
    """Of a batch, where the model is. In the padding they mean nothing."""

    taps: Tensor  # [B, T, taps, hidden]
    last: Tensor  # [B, T, hidden], what leaves the last layer


class TargetReader:
    """Reads batches of up to `tokens` tokens. Taps are as in a HeadConfig."""

    def __init__(self, model: Layered, taps: tuple[int, ...], tokens: int) -> None:
        self.model, self.count = model, len(taps)
        last = model.config.layers
        self.store = make_store(model, tokens)
        tapped = taps if last in taps else (*taps, last)
        self.place = tapped.index(last)
        self.store.tap(tapped, model.config.hidden)

    @torch.no_grad()
    def read(self, batch: TrainBatch, tell: Callable[[float], None] = lambda share: None) -> Features:
        """The batch's tokens, one text after the other, as a prompt is prefilled. What attention is planned by stays on
        the host, which waits for nothing. `tell` is called with the share that is read.
        """
        where = self.model.device
        slots = slots_of(batch)
        table, read = to_device(slots, where), 0
        for piece in pieces(_prefill(batch, slots), PASS_ROWS[where.type]):
            last = torch.tensor([piece.rows - 1])  # a pass has logits; these are of no interest
            there = replace(
                _pinned(piece, where), ids=to_device(piece.ids, where), table=table, logit_rows=last
            )
            self.model.forward(there, self.store)
            read += piece.rows
            tell(read / batch.tokens)
        assert self.store.features is not None
        made = self.store.features[table.long()]
        return Features(made[:, :, : self.count], made[:, :, self.place])

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """[B, T] -> [B, T, hidden] float32."""
        return self.model.embed(to_device(ids.flatten(), self.model.device)).view(*ids.shape, -1).float()

    def probabilities(
        self, states: Tensor, words: Tensor | None, temperature: float = 1.0
    ) -> Callable[[slice], Tensor]:
        """What the target says after last hidden states [N, hidden]: float32, of these words or of all."""

        @torch.no_grad()
        def some(rows: slice) -> Tensor:
            p = (self.logits(states[rows]) / temperature).softmax(-1)
            return p if words is None else p[:, words]

        return some

    @torch.no_grad()
    def logits(self, states: Tensor) -> Tensor:
        every = torch.arange(len(states), device=states.device)
        return self.model.logits(states.float().contiguous(), every).float()


def _pinned(batch: Batch, device: torch.device) -> Batch:
    """The rows on the host, from where they travel by themselves."""
    if device.type != "cuda":
        return batch
    return replace(batch, **{name: getattr(batch, name).pin_memory() for name in ROW_FIELDS})


def slots_of(batch: TrainBatch) -> Tensor:
    """[B, T] int32: every token has a slot of its own; padding has the first, which no token sees."""
    lengths = batch.lengths[:, None]
    at = torch.arange(batch.ids.shape[1])
    first = batch.lengths.cumsum(0)[:, None] - lengths
    return torch.where(at < lengths, first + at, 0).int()


def _prefill(batch: TrainBatch, slots: Tensor) -> Batch:
    real = torch.arange(batch.ids.shape[1]) < batch.lengths[:, None]
    rows, positions = real.nonzero(as_tuple=True)
    return Batch(
        ids=batch.ids[real],
        positions=positions.int(),
        slots=slots[real],
        table_rows=rows.int(),
        prefix=positions.int() + 1,
        ancestors=torch.zeros(len(rows), dtype=torch.int64),
        table=slots,
        logit_rows=torch.empty(0, dtype=torch.int64),
    )
