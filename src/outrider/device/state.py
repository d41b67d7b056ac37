"""What the device holds of every sequence, as tensors: tokens, lengths, slots and sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.types import Sequence
from outrider.verify.filters import BANNED, OFF, wanted
from outrider.verify.rows import clamp_temperature, put, to_device, to_device_together

MAX_REFERENCES = 4096  # tokens that lookup searches beside a sequence's own
MAX_EDITED = 64  # sequences with penalties or bias: nine bytes a token of the vocabulary each
NO_ROW = -1


class Change(NamedTuple):
    """A row to be brought up to date: its sequence, the entries of its slot table, and what of both it has."""

    sequence: Sequence
    entries: np.ndarray
    known: int = 0  # tokens
    cached: int = 0


class SequenceState:
    """One row a sequence, by its row of the slot table, and one more: padding's own."""

    def __init__(self, rows: int, width: int, device: torch.device, vocab: int = 0) -> None:
        """With a `vocab` of 0 no logits are edited here."""
        self.rows, self.width, self.device = rows, width, device
        self.tokens = torch.zeros(rows + 1, width, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(rows + 1, dtype=torch.int64, device=device)  # tokens in the KV cache
        self.table = torch.zeros(rows + 1, width, dtype=torch.int32, device=device)
        self.seeds = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(rows + 1, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self.top_p = torch.ones(rows + 1, dtype=torch.float32, device=device)
        self.log_min_p = torch.full((rows + 1,), BANNED, dtype=torch.float32, device=device)
        # Past answers, then the prediction. Spans: tokens of the answers, of both, and of the prompt.
        self.references = torch.zeros(rows + 1, MAX_REFERENCES, dtype=torch.int32, device=device)
        self.spans = torch.zeros(rows + 1, 3, dtype=torch.int64, device=device)
        self._referenced = np.zeros(rows + 1, bool)
        self._unreferenced: dict[int, Sequence] = {}  # by row: whose references are not uploaded yet
        self.filters = np.zeros(rows + 1, bool)  # for the host: whose sampling has any
        self.edits = EditRows(rows, vocab, device)
        self._constants: dict[tuple[torch.dtype, tuple[int, ...]], Tensor] = {}

    def upload(self, sequence: Sequence, entries: np.ndarray) -> None:
        """Bring a row up to what the host knows of its sequence."""
        self.bring([Change(sequence, entries)])

    def bring(self, changes: Seq[Change]) -> None:
        """The same for several rows, in one copy and a few kernels: a step that many join waits for them."""
        if not changes:
            return
        sequences = [one.sequence for one in changes]
        rows = np.array([sequence.row for sequence in sequences], np.int64)
        tokens = [np.array(one.sequence.tokens[one.known :], np.int64) for one in changes]
        slots = [one.entries[one.cached : one.sequence.cached] for one in changes]
        temperatures = [clamp_temperature(sequence.request.params.temperature) for sequence in sequences]
        made = (
            rows,
            np.array([sequence.cached for sequence in sequences], np.int64),
            np.array([sequence.seed for sequence in sequences], np.int64),
            np.array(temperatures, np.float32),
            self._places(rows, [one.known for one in changes], tokens),
            np.concatenate(tokens),
            self._places(rows, [one.cached for one in changes], slots),
            np.concatenate(slots).astype(np.int32),
        )
        at, lengths, seeds, temperature, *values = to_device_together(made, self.device)
        self.lengths.index_copy_(0, at, lengths)
        self.seeds.index_copy_(0, at, seeds)
        self.temperature.index_copy_(0, at, temperature)
        self.tokens.view(-1).index_copy_(0, *values[:2])
        self.table.view(-1).index_copy_(0, *values[2:])
        for one in changes:
            self.edits.upload(one.sequence, self.tokens[one.sequence.row])
            if not one.known:
                self._upload_filters(one.sequence)
                self._note_references(one.sequence)

    def _places(self, rows: np.ndarray, starts: Seq[int], values: Seq[np.ndarray]) -> np.ndarray:
        """Of values that follow one another in each row, in a table of them all."""
        first = rows * self.width + starts
        return np.concatenate([np.arange(at, at + len(some)) for at, some in zip(first, values, strict=True)])

    def _upload_filters(self, sequence: Sequence) -> None:
        row, filters = sequence.row, wanted(sequence.request.params)
        if filters != OFF or self.filters[row]:
            for column, value in zip((self.top_k, self.top_p, self.log_min_p), filters, strict=True):
                put(column, row, value)
        self.filters[row] = filters != OFF

    def _note_references(self, sequence: Sequence) -> None:
        """A row whose last sequence had references must lose them, uploaded or not: they may be another owner's."""
        row = sequence.row
        if len(sequence.references.tokens) or self._referenced[row] or row in self._unreferenced:
            self._unreferenced[row] = sequence

    def upload_references(self) -> None:
        """Before a step that drafts: plain steps need none. In one copy, for sequences that have references and for
        rows whose last sequence had.
        """
        rows, some = np.array(list(self._unreferenced), np.int64), list(self._unreferenced.values())
        if not some:
            return
        self._unreferenced = {}
        sizes = np.array([len(one.references.tokens) for one in some], np.int64)
        answers = [one.references.answers for one in some]
        spans = np.stack((answers, sizes, [one.prompt_len for one in some]), 1)
        tokens = np.zeros((len(some), max(1, *sizes)), np.int32)
        for held, one in zip(tokens, some, strict=True):
            held[: len(one.references.tokens)] = one.references.tokens
        at, span, token = to_device_together((rows, spans, tokens), self.device)
        self.spans.index_copy_(0, at, span)
        self.references[:, : token.shape[1]].index_copy_(0, at, token)
        self._referenced[rows] = sizes > 0

    def can_edit(self, sequence: Sequence) -> bool:
        """Whether the device heeds the penalties and logit_bias of a sequence that was uploaded, if it has any."""
        return self.edits.serves(sequence)

    def edits_any(self, rows: Seq[int] | np.ndarray) -> bool:
        """Whether a step of these rows must heed penalties or logit_bias."""
        return any(int(row) in self.edits.held for row in rows)

    def upload_slots(self, row: int, start: int, slots: np.ndarray) -> None:
        """Entries of a row's slot table, from `start` on."""
        self.table[row, start : start + len(slots)] = to_device(torch.from_numpy(slots.copy()), self.device)

    def constant(self, values: Seq[int], kind: torch.dtype = torch.int32) -> Tensor:
        """Numbers on the device, put there once: a graph that is being captured can take nothing from the host."""
        key = kind, tuple(values)
        if key not in self._constants:
            self._constants[key] = torch.tensor(key[1], dtype=kind, device=self.device)
        return self._constants[key]

    def draft_buffer(self, sequences: int, nodes: int) -> Tensor:
        """Room for the draft tokens of a step."""
        return torch.empty((sequences, nodes), dtype=torch.int64, device=self.device)


class EditRows:
    """Penalties and logit_bias of resident sequences, over the vocabulary: a row for each of the few who ask for them.

    A row holds how often each token was emitted, which tokens the prompt has, the bias of each, and the three
    penalties. What is done with them is `penalise` of verify/process.py. Memory is taken when the first sequence needs
    it, and keeps its place: captured steps read it there.
    """

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        self.vocab, self.device = vocab, device
        # By row of the state: the row here, -1 where nothing is edited. So is padding's.
        self.of_row = torch.full((rows + 1,), NO_ROW, dtype=torch.int32, device=device)
        self.held: dict[int, tuple[Sequence, int]] = {}  # the same, for the host, and for whom
        self.free = list(range(min(rows, MAX_EDITED) if vocab else 0))[::-1]
        self.counts = self.prompt = self.bias = self.penalties = torch.empty(0, device=device)

    def serves(self, sequence: Sequence) -> bool:
        """Whether its logits are edited here, if they are edited at all; once it was uploaded."""
        return not _edited(sequence) or self.held.get(sequence.row, (None, 0))[0] is sequence

    def upload(self, sequence: Sequence, tokens: Tensor) -> None:
        """Count anew, if there is a row for it. `tokens` are the sequence's, on the device already."""
        params = sequence.request.params
        at = self._take(sequence) if _edited(sequence) else self._release(sequence.row)
        if at == NO_ROW:
            return
        start, end = sequence.prompt_len, len(sequence.tokens)
        emitted = tokens[start:end]
        self.counts[at].zero_().index_add_(0, emitted, torch.ones_like(emitted, dtype=torch.int32))
        self.prompt[at].zero_().index_fill_(0, tokens[:start], 1)
        self.bias[at].zero_()
        if params.logit_bias:
            pairs = np.array(list(params.logit_bias)), np.array(list(params.logit_bias.values()), np.float32)
            self.bias[at].index_copy_(0, *to_device_together(pairs, self.device))
        numbers = [params.repetition_penalty, params.frequency_penalty, params.presence_penalty]
        self.penalties[at] = to_device(torch.tensor(numbers), self.device)

    def _take(self, sequence: Sequence) -> int:
        """The row of a sequence, its own or a free one."""
        row = sequence.row
        if not self.free and row not in self.held:
            for other, (holder, _) in [*self.held.items()]:
                if holder.finish_reason is not None or holder.row != other:
                    self._release(other)
        if row not in self.held and self.free:
            self.make()
            self.held[row] = sequence, self.free.pop()
            put(self.of_row, row, self.held[row][1])
        if row not in self.held:
            return NO_ROW
        self.held[row] = sequence, self.held[row][1]
        return self.held[row][1]

    def _release(self, row: int) -> int:
        if row in self.held:
            self.free.append(self.held.pop(row)[1])
            put(self.of_row, row, NO_ROW)
        return NO_ROW

    def make(self) -> None:
        """Take the memory, if there is none yet."""
        if self.vocab and not len(self.counts):
            shape = len(self.free), self.vocab
            self.counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
            self.prompt = torch.zeros(shape, dtype=torch.uint8, device=self.device)
            self.bias = torch.zeros(shape, dtype=torch.float32, device=self.device)
            self.penalties = torch.zeros((len(self.free), 3), dtype=torch.float32, device=self.device)


def _edited(sequence: Sequence) -> bool:
    params = sequence.request.params
    return bool(params.penalised or params.logit_bias)
