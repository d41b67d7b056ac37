"""From the target's logits to the logits the law draws from. One function for target and drafters.

Order: penalties, bias, bans (grammar, bad words, end ids before the minimum length), temperature, top-k,
top-p, min-p. At a node of a draft, the tokens of its path count as output already written.

Every reduction here works row by row, so a row's result does not depend on the rows beside it. (torch.sum
would: it splits a lone row over threads.)
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from outrider.types import Sequence
from outrider.verify.rows import LogitRows

BANNED = float("-inf")
COLDEST = 1e-5  # below this logits would overflow; the likeliest token is chosen long before
_WIDTH = 512  # top-p first looks at this many of the likeliest tokens; only a flat row needs them all


def process(logits: Tensor, rows: LogitRows) -> Tensor:
    """[R, vocab] float32 -> the same, processed. The input is left as it is."""
    params = [s.request.params for s in rows.sequences]
    edited = [i for i, s in enumerate(rows.sequences) if s.request.edits_logits]
    sampled = any(p.temperature > 0 for p in params)
    if not edited and not sampled:
        return logits
    logits = logits.clone()
    for index in edited:
        _edit(logits, rows, index)
    if sampled:
        heat = [max(p.temperature, COLDEST) if p.temperature else 1.0 for p in params]
        logits.div_(_column(rows, heat, logits))
        _filter(logits, rows)
    return logits


def _edit(logits: Tensor, rows: LogitRows, index: int) -> None:
    """Penalties, bias and bans of one sequence, on its rows, in place."""
    sequence = rows.sequences[index]
    p = sequence.request.params
    at = np.flatnonzero(rows.owner == index)
    paths = [rows.path(int(row)) for row in at]
    mine = logits[at]
    if p.penalised:
        _penalise(mine, sequence, paths)
    if p.logit_bias:
        ids = torch.tensor(list(p.logit_bias), device=mine.device)
        mine[:, ids] += torch.tensor(list(p.logit_bias.values()), device=mine.device)
    for row, path in zip(mine, paths, strict=True):
        _ban(row, sequence, path)
    logits[at] = mine


def _penalise(mine: Tensor, sequence: Sequence, paths: list[list[int]]) -> None:
    p, vocab = sequence.request.params, mine.shape[1]
    written = torch.bincount(torch.tensor(sequence.output, dtype=torch.int64), minlength=vocab)
    counts = written.to(mine).repeat(len(mine), 1)
    for row, path in enumerate(paths):
        for token in path:
            counts[row, token] += 1
    seen = counts > 0
    if p.repetition_penalty != 1.0:
        present = seen.clone()
        present[:, list(sequence.request.prompt_ids)] = True
        r = p.repetition_penalty
        mine.copy_(torch.where(present, torch.where(mine > 0, mine / r, mine * r), mine))
    mine -= p.frequency_penalty * counts + p.presence_penalty * seen


def _ban(row: Tensor, sequence: Sequence, path: list[int]) -> None:
    """Rule out what may not come next: end ids too early, words to avoid, what the grammar forbids."""
    request = sequence.request
    if request.stop_ids.intersection(path):
        return  # past an end id nothing is ever emitted
    allowed = None if sequence.grammar is None else sequence.grammar.mask(path)
    if allowed is not None:
        row[~allowed] = BANNED
    for word in request.bad_word_ids:
        before = list(word[:-1])
        history = [*sequence.tokens[-len(before) :], *path] if before else []
        if not before or history[-len(before) :] == before:
            row[word[-1]] = BANNED
    written = len(sequence.tokens) - sequence.prompt_len + len(path)
    if written < request.params.min_tokens and request.stop_ids:
        ends = list(request.stop_ids)
        kept = row[ends].clone()
        row[ends] = BANNED
        if bool(torch.isinf(row).all()):  # a grammar that is complete leaves nothing but the end
            row[ends] = kept


def _filter(logits: Tensor, rows: LogitRows) -> None:
    """top-k, top-p and min-p on the sampled rows that ask for them, in place. Ties at a bound are kept."""
    params = [s.request.params for s in rows.sequences]
    sampled = rows.spread([p.temperature > 0 for p in params], bool)
    vocab = logits.shape[1]
    top_k = rows.spread([p.top_k for p in params], np.int64)
    for k in np.unique(top_k[sampled & (top_k > 0) & (top_k < vocab)]):
        at = torch.from_numpy(np.flatnonzero(sampled & (top_k == k)))
        mine = logits[at]
        logits[at] = _cut(mine, mine.topk(int(k)).values[:, -1:])
    top_p = rows.spread([p.top_p for p in params], np.float32)
    at = torch.from_numpy(np.flatnonzero(sampled & (top_p < 1)))
    if len(at):
        mine = logits[at]
        logits[at] = _cut(mine, _nucleus(mine, torch.from_numpy(top_p)[at][:, None].to(mine)))
    min_p = rows.spread([p.min_p for p in params], np.float32)
    at = torch.from_numpy(np.flatnonzero(sampled & (min_p > 0)))
    if len(at):
        mine = logits[at]
        floor = torch.from_numpy(min_p)[at][:, None].to(mine).log()
        logits[at] = _cut(mine, mine.amax(-1, keepdim=True) + floor)


def _nucleus(logits: Tensor, top_p: Tensor) -> Tensor:
    """[R, 1] the smallest logit in the smallest set whose probability reaches top_p."""
    probabilities = logits.softmax(-1)
    for width in (_WIDTH, logits.shape[1]):
        values, ids = logits.topk(min(width, logits.shape[1]))
        reached = probabilities.gather(1, ids).cumsum(-1) >= top_p
        if bool(reached.any(-1).all()) or width >= logits.shape[1]:
            break
    # Rounding may leave the whole vocabulary short of top_p: then everything is kept.
    last = torch.where(reached.any(-1), reached.int().argmax(-1), reached.shape[1] - 1)
    return values.gather(1, last[:, None])


def _cut(logits: Tensor, bound: Tensor) -> Tensor:
    return logits.masked_fill(logits < bound, BANNED)


def _column(rows: LogitRows, values: list[float], like: Tensor) -> Tensor:
    return torch.from_numpy(rows.spread(values, np.float32))[:, None].to(like)
