"""What the device holds of every sequence, as tensors: tokens, lengths, slots and sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from outrider.device.edits import EditRows
from outrider.types import SamplingParams, Sequence
from outrider.verify.filters import BANNED, OFF, wanted
from outrider.verify.rows import clamp_temperature, put, to_device, to_device_together

MAX_PREDICTION = 4096  # tokens of a user's prediction that the device holds


class SequenceState:
    """One row a sequence, by its row of the slot table, and one more: padding's own."""

    def __init__(self, rows: int, width: int, device: torch.device, vocab: int = 0) -> None:
        """With a `vocab` of 0 nobody's logits are edited here."""
        self.rows, self.width, self.device = rows, width, device
        self.tokens = torch.zeros(rows + 1, width, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(rows + 1, dtype=torch.int64, device=device)  # tokens in the KV cache
        self.table = torch.zeros(rows + 1, width, dtype=torch.int32, device=device)
        self.seeds = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(rows + 1, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self.top_p = torch.ones(rows + 1, dtype=torch.float32, device=device)
        self.log_min_p = torch.full((rows + 1,), BANNED, dtype=torch.float32, device=device)
        # What users expect their answers to be, and how many tokens of it there are.
        wide = min(width, MAX_PREDICTION)
        self.predictions = torch.zeros(rows + 1, wide, dtype=torch.int64, device=device)
        self.predicted = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self._has_prediction = np.zeros(rows + 1, bool)
        self.filters = np.zeros(rows + 1, bool)  # for the host: whose sampling has any
        self.edits = EditRows(rows, vocab, device)
        self._constants: dict[tuple[torch.dtype, tuple[int, ...]], Tensor] = {}

    def upload(self, sequence: Sequence, entries: np.ndarray) -> None:
        """Bring a row up to what the host knows of its sequence."""
        row = sequence.row
        self.advance(sequence, entries, 0, 0)
        put(self.seeds, row, sequence.seed)
        self._upload_sampling(row, sequence.request.params)
        expected = sequence.request.prediction_ids[: self.predictions.shape[1]]
        if expected or self._has_prediction[row]:
            self.predictions[row, : len(expected)] = self._sent(torch.tensor(expected, dtype=torch.int64))
            put(self.predicted, row, len(expected))
            self._has_prediction[row] = bool(expected)

    def advance(self, sequence: Sequence, entries: np.ndarray, known: int, cached: int) -> None:
        """The same for a row that holds so many of its tokens, and slots of so many of them, already."""
        row = sequence.row
        further = np.array(sequence.tokens[known:], np.int64)
        tokens, slots = to_device_together((further, entries[cached : sequence.cached]), self.device)
        self.tokens[row, known : len(sequence.tokens)] = tokens
        self.table[row, cached : sequence.cached] = slots
        put(self.lengths, row, sequence.cached)
        self.edits.upload(sequence, self.tokens[row])

    def can_edit(self, sequence: Sequence) -> bool:
        """Whether the device heeds the penalties and logit_bias of a sequence that was uploaded, if it has any."""
        return self.edits.serves(sequence)

    def edits_any(self, rows: Seq[int] | np.ndarray) -> bool:
        """Whether a step of these rows must heed penalties or logit_bias."""
        return any(int(row) in self.edits.held for row in rows)

    def upload_slots(self, row: int, start: int, slots: np.ndarray) -> None:
        """Entries of a row's slot table, from `start` on."""
        self.table[row, start : start + len(slots)] = self._sent(torch.from_numpy(slots.copy()))

    def _upload_sampling(self, row: int, params: SamplingParams) -> None:
        put(self.temperature, row, clamp_temperature(params.temperature))
        filters = wanted(params)
        if filters != OFF or self.filters[row]:
            for column, value in zip((self.top_k, self.top_p, self.log_min_p), filters, strict=True):
                put(column, row, value)
        self.filters[row] = filters != OFF

    def _sent(self, values: Tensor) -> Tensor:
        return to_device(values, self.device)

    def constant(self, values: Seq[int], kind: torch.dtype = torch.int32) -> Tensor:
        """Numbers on the device, put there once: a graph that is being captured can take nothing from the host."""
        key = kind, tuple(values)
        if key not in self._constants:
            self._constants[key] = torch.tensor(key[1], dtype=kind, device=self.device)
        return self._constants[key]

    def draft_buffer(self, sequences: int, nodes: int) -> Tensor:
        """Room for the draft tokens of a step."""
        return torch.empty((sequences, nodes), dtype=torch.int64, device=self.device)
