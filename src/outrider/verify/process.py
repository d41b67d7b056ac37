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
from outrider.verify.filters import BANNED, OFF, sift, wanted
from outrider.verify.law import Sift
from outrider.verify.rows import LogitRows

COLDEST = 1e-5  # below this logits would overflow; the likeliest token is chosen long before


def process(logits: Tensor, rows: LogitRows, sift: Sift = sift) -> Tensor:
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
        heat = [warmth(p.temperature) or 1.0 for p in params]
        logits.div_(torch.from_numpy(rows.spread(heat, np.float32))[:, None].to(logits))
        _filter(logits, rows, sift)
    return logits


def warmth(temperature: float) -> float:
    """What logits are divided by where a temperature above 0 is asked for."""
    return max(temperature, COLDEST) if temperature else 0.0


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


def _filter(logits: Tensor, rows: LogitRows, sift: Sift) -> None:
    """top-k, top-p and min-p on the rows that ask for them, in place."""
    asked = [wanted(s.request.params) for s in rows.sequences]
    at = np.flatnonzero(rows.spread([filters != OFF for filters in asked], bool))
    if not len(at):
        return
    top_k, top_p, floor = (
        torch.from_numpy(rows.spread(column, kind)[at])
        for column, kind in zip(zip(*asked, strict=True), (np.int64, np.float32, np.float32), strict=True)
    )
    mine = logits if len(at) == len(logits) else logits[torch.from_numpy(at)]
    sift(mine, top_k, top_p, floor)
    if mine is not logits:
        logits[torch.from_numpy(at)] = mine
