"""Penalties and logit_bias of resident sequences, over the vocabulary: a few rows, for the few who ask for them.

A row holds how often each token was emitted, which tokens the prompt has, the bias of each, and the three penalties.
What is done with them is verify/process.py's `penalise`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from outrider.types import Sequence
from outrider.verify.rows import put, to_device, to_device_together

MOST = 64  # sequences: nine bytes a token of the vocabulary each
NO_ROW = -1


class EditRows:
    """Memory is taken when the first sequence needs it, and keeps its place: captured steps read it there."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        self.vocab, self.device = vocab, device
        # By row of the state: the row here, -1 where nothing is edited. So is padding's.
        self.of_row = torch.full((rows + 1,), NO_ROW, dtype=torch.int32, device=device)
        self.held: dict[int, tuple[Sequence, int]] = {}  # the same, for the host, and for whom
        self.free = list(range(min(rows, MOST) if vocab else 0))[::-1]
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
