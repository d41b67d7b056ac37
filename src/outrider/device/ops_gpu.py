"""The operations of a step on a CUDA device: a kernel for what takes many torch operations. Twin: `StepOps`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.device.ops import Columns, Layout, StepInputs, StepOps
from outrider.model.kernels.gpu import step_ops
from outrider.model.kernels.gpu.ahead import AHEAD, is_collecting
from outrider.model.kernels.gpu.draw import draw_owned
from outrider.model.kernels.gpu.edit import Edits, count_tokens, edit_rows
from outrider.model.kernels.gpu.launch import INTERPRETED
from outrider.types import Batch


class GpuStepOps(StepOps):
    ahead = None if INTERPRETED else AHEAD
    model: Any  # a DeviceDecoder

    @property
    def touched(self) -> Tensor:
        return self.model.kernels.counter

    def spread_rows(self, rows: int) -> None:
        self.model.spread_rows(rows)

    def begin_step(self, inputs: Tensor) -> StepInputs:
        made = step_ops.begin_step(inputs, self.state.table, self.state.lengths)
        if is_collecting():  # torch operations must find rows and slots that are there
            return super().begin_step(inputs)
        return StepInputs(inputs, *made)

    def build_batch(
        self, rows: Tensor, lengths: Tensor, layout: Layout, drafted: Tensor | None = None
    ) -> Batch:
        state = self.state
        entries, depths, nodes = map(state.constant, (layout.entries, layout.depths, layout.nodes))
        masks = state.constant(layout.masks, torch.int64) if layout.masks else None
        how = entries, depths, nodes, masks, layout.behind
        wanted = state.constant(layout.logit_rows(len(rows)), torch.int64)
        fields = step_ops.build_batch(state.tokens, state.table, rows, lengths, how, drafted)
        if is_collecting():
            return super().build_batch(rows, lengths, layout, drafted)
        return Batch(**fields, table=state.table, logit_rows=wanted)

    def edit(self, batch: Batch, logits: Tensor, drafted: Tensor, ahead: int) -> Tensor:
        self.state.edits.make()
        return edit_rows(logits, batch, self.state.lengths, drafted, self._edits(), ahead)

    def _edits(self) -> Edits:
        edits = self.state.edits
        return edits.of_row, edits.counts, edits.prompt, edits.bias, edits.penalties

    def draw(
        self,
        batch: Batch,
        logits: Tensor,
        columns: Columns,
        out: Tensor,
        ahead: int = 1,
        drafted: Tensor | None = None,
    ) -> None:
        state, edited = self.state, None
        nodes = out if drafted is None else drafted
        if self.edited and self.filtered:
            logits = self.edit(batch, logits, nodes, ahead)
        elif self.edited:  # most rows have nothing to edit, and are not copied
            state.edits.make()
            made = edit_rows(logits, batch, state.lengths, nodes, self._edits(), ahead, copy=False)
            edited = state.edits.of_row, made
        if self.filtered:
            logits = self.filter(logits, batch.table_rows[batch.logit_rows].long())
        places = state.constant([column for one in columns for column in one]).view(len(columns), -1)
        law = state.temperature, state.seeds
        draw_owned(logits, batch, law, places, out, ahead, not self.filtered, edited)

    def append_tokens(self, step: StepInputs, emitted: Tensor) -> None:
        state = self.state
        step_ops.append_tokens(state.tokens, state.lengths, step.rows, step.lengths, step.inputs, emitted)
        self._count(step, emitted)

    def commit(
        self,
        step: StepInputs,
        parents: tuple[int, ...],
        depth: int,
        drafted: Tensor,
        counts: Tensor | None,
        chosen: Tensor,
    ) -> Tensor:
        known = self.state.tokens, self.state.table, self.state.lengths
        above = self.state.constant(parents)
        result = step_ops.commit(
            known, step.rows, step.lengths, step.inputs, above, depth, drafted, counts, chosen
        )
        self._count(step, result[:, 2 : 3 + depth], result[:, 0])
        return result

    def _count(self, step: StepInputs, emitted: Tensor, accepted: Tensor | None = None) -> None:
        if self.edited:
            count_tokens(step.inputs, emitted, accepted, self._edits())
