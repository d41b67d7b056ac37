"""The law of sampling, and verification, which is the same law at every node of a draft.

    y_t = argmax_v  l_t(v) + G(s, t, v)      G = -log(-log U),  U keyed by (seed, position, token)
    y_t = argmax_v  l_t(v)                   at temperature 0; ties go to the lowest id

Why it is exact: adding Gumbel noise to log-probabilities and taking the argmax draws from the softmax, so plain
decoding samples the target. Why speculation changes nothing: y_t is a function of the target's logits after the
true text, the seed and t. A draft only decides which rows were computed in advance. From the root we go to the
child whose token *is* y; there the row was computed after the true text, so its y is the true next token; where
no child matches we emit y and stop. Every token emitted is the one plain decoding would have emitted.

Pure functions; the randomness comes in as seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from outrider.types import Draft, Sequence, TokenLogprob, Verdict
from outrider.verify.noise import draw as draw_in_torch
from outrider.verify.process import process
from outrider.verify.rows import Ints, LogitRows, lay_out


Draw = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def judge(
    logits: Tensor, sequences: Seq[Sequence], drafts: Seq[Draft], draw: Draw = draw_in_torch
) -> list[Verdict]:
    """Logits of every sequence's root and draft nodes, in order -> what each sequence emits."""
    rows = lay_out(sequences, drafts)
    chosen = choose(process(logits, rows), rows, draw)
    paths = walk(chosen, rows)
    verdicts = []
    for index, path in enumerate(paths):
        start = int(rows.starts[index])
        emitting = [start, *(start + 1 + node for node in path)]
        tokens = [int(chosen[row]) for row in emitting]
        wanted = sequences[index].request.params.logprobs
        logprobs = None if wanted is None else report(logits[emitting], tokens, wanted)
        verdicts.append(Verdict(tokens, path, logprobs))
    return verdicts


def choose(processed: Tensor, rows: LogitRows, draw: Draw) -> Ints:
    """The law at every row: [R, vocab] -> the token each row would emit."""
    params = [s.request.params for s in rows.sequences]
    sampled = torch.from_numpy(rows.spread([p.temperature > 0 for p in params], bool))
    seeds = torch.from_numpy(rows.spread([s.seed for s in rows.sequences], np.int64))
    return draw(processed, sampled, seeds, torch.from_numpy(rows.position)).numpy()


def walk(chosen: Ints, rows: LogitRows) -> list[list[int]]:
    """The accepted nodes of each draft in path order, empty where the first guess was wrong."""
    matches = (chosen[rows.parent] == rows.token) | (rows.depth == 0)
    alive = matches.copy()
    for _ in range(int(rows.depth.max(initial=0)) - 1):  # as often as the deepest draft is deep, all rows at once
        alive = matches & alive[rows.parent]
    reach = np.where(alive, rows.depth, -1)
    paths = []
    for start, draft in zip(rows.starts, rows.drafts, strict=True):
        deepest = int(reach[start : start + 1 + len(draft)].argmax())
        paths.append(draft.path(deepest - 1))
    return paths


def report(logits: Tensor, tokens: list[int], alternatives: int) -> list[TokenLogprob]:
    """The target's own log-probabilities, before any processing, of the tokens and their likeliest rivals."""
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    values, ids = logprobs.topk(alternatives) if alternatives else (logprobs[:, :0], logprobs[:, :0].long())
    rivals = [list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
    return [TokenLogprob(t, p, r) for t, p, r in zip(tokens, chosen, rivals, strict=True)]
