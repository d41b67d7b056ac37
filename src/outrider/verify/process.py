"""From the target's logits to the logits the law draws from. One function for target and drafters.

Order: penalties, bias, bans (grammar, bad words, end ids before the minimum length), temperature, top-k,
top-p, min-p. At a node of a draft, the tokens of its path count as output already written.

Every reduction here works row by row, so a row's result does not depend on the rows beside it. torch.sum would depend
on them: it splits a single row over threads.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.types import Sequence
from outrider.verify.filters import BANNED, OFF, filter_logits, wanted
from outrider.verify.law import Filter
from outrider.verify.rows import LogitRows, to_device, to_device_together


def process(logits: Tensor, rows: LogitRows, filter_logits: Filter = filter_logits) -> Tensor:
    """Processes logits [R, vocab] float32 into a new tensor."""
    params = [s.request.params for s in rows.sequences]
    edited = [i for i, s in enumerate(rows.sequences) if s.request.edits_logits]
    sampled = any(p.temperature > 0 for p in params)
    if not edited and not sampled:
        return logits
    if edited:
        logits = logits.clone()
    for index in edited:
        _edit(logits, rows, index)
    if sampled:
        logits = logits / rows.keys(logits.device).temperature[:, None]
        _filter(logits, rows, filter_logits)
    return logits


def _edit(logits: Tensor, rows: LogitRows, index: int) -> None:
    """Penalties, bias and bans of one sequence, on its rows, in place."""
    sequence = rows.sequences[index]
    p = sequence.request.params
    at = np.flatnonzero(rows.owner == index)
    paths = [rows.path(int(row)) for row in at]
    mine = logits if len(at) == len(logits) else logits[at]
    if p.penalised:
        _penalise(mine, sequence, paths)
    if p.logit_bias:
        pairs = np.array(list(p.logit_bias)), np.array(list(p.logit_bias.values()), np.float32)
        ids, values = to_device_together(pairs, mine.device)
        mine[:, ids] += values
    if sequence.grammar is not None or sequence.request.bad_word_ids or p.min_tokens:
        _ban(mine, sequence, paths)
    if mine is not logits:
        logits[at] = mine


def _penalise(mine: Tensor, sequence: Sequence, paths: list[list[int]]) -> None:
    p, vocab = sequence.request.params, mine.shape[1]
    written = torch.bincount(torch.tensor(sequence.output, dtype=torch.int64), minlength=vocab)
    counts = written.to(mine).repeat(len(mine), 1)
    for row, path in enumerate(paths):
        for token in path:
            counts[row, token] += 1
    prompt = torch.zeros(vocab, dtype=torch.bool, device=mine.device)
    prompt[list(sequence.request.prompt_ids)] = True
    numbers = [p.repetition_penalty, p.frequency_penalty, p.presence_penalty]
    mine.copy_(penalise(mine, counts, prompt, torch.tensor(numbers, device=mine.device)))


def penalise(logits: Tensor, counts: Tensor, prompt: Tensor, penalties: Tensor) -> Tensor:
    """Applies penalties to logits [R, vocab] float32, given how often each token was emitted before a row, which tokens
    the prompt has, and the penalties for repetition, frequency and presence [..., 3]. All are tensors, because a GPU
    divides by a scalar with other rounding than by a tensor.
    """
    repetition, frequency, presence = penalties[..., None].unbind(-2)
    seen = counts > 0
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen | prompt, repeated, logits)
    return logits - (frequency * counts + presence * seen)


def _ban(mine: Tensor, sequence: Sequence, paths: list[list[int]]) -> None:
    """Sets forbidden tokens to -inf at all rows, with one copy to the device."""
    vocab = mine.shape[1]
    allowed = np.full((len(paths), -(-vocab // 8)), 255, np.uint8)  # one bit per token
    for row, path in zip(allowed, paths, strict=True):
        if not sequence.request.stop_ids.intersection(path):  # no token is emitted after an end id
            _allow(row, vocab, sequence, path)
    if (allowed == 255).all():
        return
    if mine.is_cuda:
        banned = unset_bits(to_device(torch.from_numpy(allowed), mine.device), vocab)
    else:
        banned = torch.from_numpy(np.unpackbits(allowed, 1, vocab, "little") == 0)
    mine.masked_fill_(banned, BANNED)


def _allow(row: NDArray[np.uint8], vocab: int, sequence: Sequence, path: list[int]) -> None:
    """Leaves the bits set of tokens that may follow a path: those the grammar allows, less bad words, and less end ids
    before the minimum length.
    """
    request = sequence.request
    if sequence.grammar is not None and (bits := sequence.grammar.bits(path)) is not None:
        row[:] = bits[: len(row)]
    for *before, last in request.bad_word_ids:
        history = [*sequence.tokens[-len(before) :], *path] if before else []
        if not before or history[-len(before) :] == before:
            _unset(row, last)
    written = len(sequence.tokens) - sequence.prompt_len + len(path)
    if written < request.params.min_tokens and request.stop_ids:
        kept = row.copy()
        for end in request.stop_ids:
            _unset(row, end)
        if not np.unpackbits(row, count=vocab, bitorder="little").any():
            row[:] = kept  # after a complete grammar only an end id may follow


def _unset(row: NDArray[np.uint8], token: int) -> None:
    row[token >> 3] &= 255 ^ (1 << (token & 7))


def unset_bits(bits: Tensor, count: int) -> Tensor:
    """Unpacks bits [R, bytes] -> [R, count] on their device, so that the copy to a GPU is an eighth as large."""
    return ((bits[:, :, None] & _powers(bits.device)) == 0).flatten(1)[:, :count]


@functools.cache
def _powers(device: torch.device) -> Tensor:
    return torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=device)


def _filter(logits: Tensor, rows: LogitRows, filter_logits: Filter) -> None:
    """top-k, top-p and min-p on the rows that ask for them, in place."""
    asked = [wanted(s.request.params) for s in rows.sequences]
    at = np.flatnonzero(rows.spread([filters != OFF for filters in asked], bool))
    if not len(at):
        return
    kinds = zip(zip(*asked, strict=True), (np.int64, np.float32, np.float32), strict=True)
    columns = [rows.spread(column, kind)[at] for column, kind in kinds]
    top_k, top_p, log_min_p = to_device_together(columns, logits.device)
    mine = logits if len(at) == len(logits) else logits[torch.from_numpy(at)]
    filter_logits(mine, top_k, top_p, log_min_p)
    if mine is not logits:
        logits[torch.from_numpy(at)] = mine
