"""Sequences as an engine would have them, without an engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from outrider.device.state import SequenceState
from outrider.types import Request, SamplingParams, Sequence

WIDTH = 128


def sequence(row: int, prompt: list[int], output: list[int], **params: Any) -> Sequence:
    """Decoding: everything but its last token is cached, in slots that nobody else has."""
    wanted = SamplingParams(**{"temperature": 0.0, "max_tokens": 64, **params})
    one = Request(f"r{row}", tuple(prompt), wanted, seed=100 + row)
    tokens = [*prompt, *output]
    return Sequence(one, 0, one.seed, tokens, row=row, cached=len(tokens) - 1)


def slots_of(one: Sequence, count: int) -> np.ndarray:
    return one.row * WIDTH + np.arange(count, dtype=np.int32)


def state_of(sequences: list[Sequence], vocab: int, device: str = "cpu", rows: int = 6) -> SequenceState:
    state = SequenceState(rows, WIDTH, torch.device(device), vocab)
    state.table[-1] = padding_slot(rows)
    for one in sequences:
        state.upload(one, slots_of(one, one.cached))
    return state


def padding_slot(rows: int = 6) -> int:
    return rows * WIDTH
