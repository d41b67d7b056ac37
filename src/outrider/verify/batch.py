"""Verifies drafts on the host: processes the logits once, then verifies each request in its mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from outrider.types import Draft, Sequence, TokenLogprob, Verdict, Work
from outrider.verify.filters import filter_logits as filter_in_torch
from outrider.verify.law import Draw, Filter, Result, choose, coupled
from outrider.verify.lossy import lossy
from outrider.verify.noise import draw as draw_in_torch
from outrider.verify.process import process
from outrider.verify.rejection import rejection
from outrider.verify.rows import TreeRows, lay_out, to_device

VERIFY: dict[str, Callable[[Tensor, TreeRows, Draw], list[Result]]] = {"rejection": rejection, "lossy": lossy}


class VerifyBatch:
    """A batch of drafts under verification: the logits of every sequence's root and draft nodes, in order. On a GPU the
    law is launched at once; the host waits only when it reads the verdicts.
    """

    def __init__(
        self,
        logits: Tensor,
        sequences: Seq[Sequence],
        drafts: Seq[Draft],
        draw: Draw = draw_in_torch,
        filter_logits: Filter = filter_in_torch,
    ) -> None:
        self.logits, self.draw = logits, draw
        self.rows = lay_out(sequences, drafts)
        self.processed = process(logits, self.rows, filter_logits)
        self.modes = [mode_of(sequence) for sequence in sequences]
        self.chosen = choose(self.processed, self.rows, draw) if set(self.modes) == {"coupled"} else None

    def verdicts(self) -> list[Verdict]:
        """The verdict of each sequence."""
        found = []
        for index, (path, tokens) in enumerate(self._results()):
            start, wanted = self.rows.starts[index], self.rows.sequences[index].request.params.logprobs
            logprobs = None
            if wanted is not None:
                logprobs = report(self.logits[start:][emitting_rows(path)], tokens, wanted)
            found.append(Verdict(tokens, path, logprobs))
        return found

    def _results(self) -> list[Result]:
        rows, modes = self.rows, self.modes
        if self.chosen is not None:
            return coupled(self.chosen.numpy(), rows)
        if len(set(modes)) == 1:
            return _verify(modes[0], self.processed, rows, self.draw)
        results: list[Result] = [([], [])] * len(modes)
        for mode in sorted(set(modes)):
            group = [i for i, m in enumerate(modes) if m == mode]
            some = lay_out([rows.sequences[i] for i in group], [rows.drafts[i] for i in group])
            at = torch.from_numpy(np.flatnonzero(np.isin(rows.owner, group)))
            for index, result in zip(group, _verify(mode, self.processed[at], some, self.draw), strict=True):
                results[index] = result
        return results


def verify_rows(
    logits: Tensor,
    sequences: Seq[Sequence],
    drafts: Seq[Draft],
    draw: Draw = draw_in_torch,
    filter_logits: Filter = filter_in_torch,
) -> list[Verdict]:
    """Verifies and waits for the result."""
    return VerifyBatch(logits, sequences, drafts, draw, filter_logits).verdicts()


def score_prompts(logits: Tensor, work: Seq[Work]) -> Iterator[tuple[Work, list[TokenLogprob]]]:
    """Log-probabilities of prompt tokens, for the rows that each piece of work wants scored, in order."""
    at = 0
    for one in work:
        wanted, count = one.sequence.request.params.prompt_logprobs, one.scored
        if count and wanted is not None:
            predicted = one.sequence.tokens[one.start + 1 : one.start + 1 + count]
            yield one, report(logits[at : at + count], predicted, wanted)
        at += count


def _verify(mode: str, processed: Tensor, rows: TreeRows, draw: Draw) -> list[Result]:
    """Verifies in a mode: the law on the device of the logits, the other modes on the host."""
    if mode == "coupled":
        return coupled(choose(processed, rows, draw).numpy(), rows)
    if processed.is_cuda:
        return VERIFY[mode](processed.cpu(), rows, draw_in_torch)
    return VERIFY[mode](processed, rows, draw)


def mode_of(sequence: Sequence) -> str:
    """At temperature 0 the ratio test gives the law's token, so the law is used."""
    params = sequence.request.params
    greedy = params.temperature == 0 and params.speculation.mode == "rejection"
    return "coupled" if greedy else params.speculation.mode


def predicted(logits: Tensor, verdict: Verdict) -> tuple[int, float]:
    """How predictable the text is for the target: the number of tokens that one sequence emits in this step, and the
    sum of their probabilities under the target.
    """
    rows = logits[emitting_rows(verdict.accepted)]
    tokens = to_device(torch.tensor(verdict.tokens), logits.device)
    chances = rows.float().softmax(-1).gather(1, tokens[:, None])
    return len(rows), float(chances.sum())


def emitting_rows(path: Seq[int]) -> slice | list[int]:
    """The rows of a sequence that emit: the root and the accepted nodes. For a chain they are a slice, which needs no
    copy to the device.
    """
    rows = [0, *(1 + node for node in path)]
    return slice(len(rows)) if rows[-1] == len(path) else rows


def report(logits: Tensor, tokens: list[int], alternatives: int) -> list[TokenLogprob]:
    """The target's log-probabilities, before any processing, of the tokens and of the likeliest alternatives."""
    logprobs = logits.float().log_softmax(-1)
    parts = [logprobs.gather(1, to_device(torch.tensor(tokens), logits.device)[:, None])]
    if alternatives:
        parts += logprobs.topk(alternatives)
    # Doubles hold both ids and log-probabilities, so that one copy from the device is enough.
    numbers = torch.cat([part.double() for part in parts], 1).tolist()
    return [
        TokenLogprob(
            token, chosen, list(zip(map(int, rest[alternatives:]), rest[:alternatives], strict=True))
        )
        for token, (chosen, *rest) in zip(tokens, numbers, strict=True)
    ]
