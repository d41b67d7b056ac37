"""From logits to verdicts: process once, then each request by the mode it asked for."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from outrider.types import Draft, Sequence, TokenLogprob, Verdict
from outrider.verify.law import Draw, Result, coupled
from outrider.verify.lossy import lossy
from outrider.verify.noise import draw as draw_in_torch
from outrider.verify.process import process
from outrider.verify.rejection import rejection
from outrider.verify.rows import TreeRows, lay_out

VERIFY: dict[str, Callable[[Tensor, TreeRows, Draw], list[Result]]] = {
    "coupled": coupled,
    "rejection": rejection,
    "lossy": lossy,
}


def judge(
    logits: Tensor, sequences: Seq[Sequence], drafts: Seq[Draft], draw: Draw = draw_in_torch
) -> list[Verdict]:
    """Logits of every sequence's root and draft nodes, in order -> what each sequence emits."""
    rows = lay_out(sequences, drafts)
    processed = process(logits, rows)
    verdicts = []
    for index, (path, tokens) in enumerate(_by_mode(processed, rows, draw)):
        start = int(rows.starts[index])
        wanted = sequences[index].request.params.logprobs
        emitting = [start, *(start + 1 + node for node in path)]
        logprobs = None if wanted is None else report(logits[emitting], tokens, wanted)
        verdicts.append(Verdict(tokens, path, logprobs))
    return verdicts


def _by_mode(processed: Tensor, rows: TreeRows, draw: Draw) -> list[Result]:
    modes = [mode_of(s) for s in rows.sequences]
    if len(set(modes)) == 1:
        return VERIFY[modes[0]](processed, rows, draw)
    results: list[Result] = [([], [])] * len(modes)
    for mode in sorted(set(modes)):
        group = [i for i, m in enumerate(modes) if m == mode]
        some = lay_out([rows.sequences[i] for i in group], [rows.drafts[i] for i in group])
        at = torch.from_numpy(np.flatnonzero(np.isin(rows.owner, group)))
        for index, result in zip(group, VERIFY[mode](processed[at], some, draw), strict=True):
            results[index] = result
    return results


def mode_of(sequence: Sequence) -> str:
    """At temperature 0 the ratio test has one outcome, the law's: no need for its machinery."""
    params = sequence.request.params
    greedy = params.temperature == 0 and params.speculation.mode == "rejection"
    return "coupled" if greedy else params.speculation.mode


def report(logits: Tensor, tokens: list[int], alternatives: int) -> list[TokenLogprob]:
    """The target's own log-probabilities, before any processing, of the tokens and their likeliest rivals."""
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    values, ids = logprobs.topk(alternatives) if alternatives else (logprobs[:, :0], logprobs[:, :0].long())
    rivals = [list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
    return [TokenLogprob(t, p, r) for t, p, r in zip(tokens, chosen, rivals, strict=True)]
