"""Between the passes of a round on a CUDA device: a kernel for what takes many tensor operations. Twin: `Between`."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.draft.state import Between, Columns, Layout, State, TakeOff
from outrider.model.decoder import Model
from outrider.model.kernels.gpu import between
from outrider.model.kernels.gpu.draw import draw_owned
from outrider.types import Batch


class DeviceBetween(Between):
    def take_off(self, state: State, inputs: Tensor) -> TakeOff:
        return TakeOff(inputs, *between.take_off(inputs, state.table, state.lengths))

    def lay(
        self, state: State, rows: Tensor, lengths: Tensor, layout: Layout, guesses: Tensor | None = None
    ) -> Batch:
        entries, depths, picks = map(state.constant, (layout.entries, layout.depths, layout.picks))
        masks = state.constant(layout.masks, torch.int64) if layout.masks else None
        how = entries, depths, picks, masks, layout.least
        wanted = state.constant(layout.logit_rows(len(rows)), torch.int64)
        fields = between.lay(state.tokens, state.table, rows, lengths, how, guesses)
        return Batch(**fields, table=state.table, logit_rows=wanted)

    def draw(
        self,
        model: Model,
        state: State,
        batch: Batch,
        logits: Tensor,
        columns: Columns,
        out: Tensor,
        ahead: int = 1,
    ) -> None:
        if state.filtered:
            logits = state.filter(model, logits, batch.table_rows[batch.logit_rows].long())
        places = state.constant([column for one in columns for column in one]).view(len(columns), -1)
        law = state.temperature, state.seeds
        draw_owned(logits, batch, law, places, out, ahead, warmed=not state.filtered)

    def keep(self, state: State, off: TakeOff, told: Tensor) -> None:
        between.keep(state.tokens, state.lengths, off.rows, off.lengths, told)

    def commit(
        self,
        state: State,
        off: TakeOff,
        parents: tuple[int, ...],
        depth: int,
        guesses: Tensor,
        counts: Tensor | None,
        chosen: Tensor,
    ) -> Tensor:
        known = state.tokens, state.table, state.lengths
        above = state.constant(parents)
        return between.commit(known, off.rows, off.lengths, off.inputs, above, depth, guesses, counts, chosen)
