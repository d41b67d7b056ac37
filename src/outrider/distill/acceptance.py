"""Acceptance as serving will see it, from held-out answers, without an engine.

Along the target's own tokens a draft is accepted as long as each of its draws is the token that came. Greedy text:
its argmax. Sampled text: its draw with the noise of the law, of which one thing is known, that the target drew with it
the token that came; so noise is drawn given that. A walk over each answer then drafts where serving would: behind
what the draft before it brought.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.distill.answers import ROUND, Answers, TrainBatch
from outrider.distill.features import TargetReader
from outrider.distill.losses import CHUNK_NUMBERS
from outrider.distill.students import Student

MOST_TOKENS = {"cpu": 16_384, "cuda": 131_072}  # of held-out text that one validation reads
Hits = NDArray[np.bool_]


@dataclass(slots=True)
class Acceptance:
    """By depth: drafted tokens whose forerunners were all accepted, and those accepted. A step emits one token more
    than it accepts.
    """

    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    steps: int = 0

    @property
    def rates(self) -> list[float]:
        return [a / max(r, 1) for a, r in zip(self.accepted, self.reached, strict=True)]

    @property
    def tokens_per_step(self) -> float:
        return 1 + sum(self.accepted) / max(self.steps, 1)

    def to_json(self) -> dict[str, object]:
        rates = [round(rate, 4) for rate in self.rates]
        return {"rates": rates, "reached": self.reached, "tokens_per_step": round(self.tokens_per_step, 3)}


@torch.no_grad()
def measure_acceptance(
    student: Student,
    reader: TargetReader,
    answers: Answers,
    rows: Sequence[int],
    tokens: int,
    depth: int,
    seed: int,
) -> dict[str, Acceptance]:
    """Of chains of `depth` on these conversations, in batches of `tokens` tokens: by "greedy" and "sampled"."""
    found: dict[str, Acceptance] = {}
    generator = torch.Generator(reader.model.device).manual_seed(seed)
    for some in _batches(answers, rows, tokens):
        batch = answers.batch(some)
        temperatures = [answers[row].temperature for row in some]
        hits = _hits(student, reader, batch, torch.tensor(temperatures), depth, generator)
        for row, temperature in enumerate(temperatures):
            kind = "sampled" if temperature > 0 else "greedy"
            walk(
                found.setdefault(kind, Acceptance([0] * depth, [0] * depth)), hits[:, row], _runs(batch, row)
            )
    return found


def held_out(answers: Answers, device: torch.device) -> list[int]:
    """Conversations to validate on: as many of those held out as a validation should take."""
    rows, taken = answers.rows(held_out=True), 0
    return [row for row in rows if (taken := taken + len(answers[row])) <= MOST_TOKENS[device.type]] or rows[
        :1
    ]


def _batches(answers: Answers, rows: Sequence[int], tokens: int) -> Iterator[list[int]]:
    batch: list[int] = []
    for row in sorted(rows, key=lambda row: len(answers[row])):
        if batch and (len(batch) + 1) * (len(answers[row]) + ROUND) > tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _hits(
    student: Student,
    reader: TargetReader,
    batch: TrainBatch,
    temperatures: Tensor,
    depth: int,
    generator: torch.Generator,
) -> Hits:
    """[depth, B, T]: whether the draft's token at that depth is the answer's token there. False outside answers."""
    features = reader.read(batch)
    states = student.states(batch, features, reader, depth, torch.float32)
    where, ahead = features.last.device, student.ahead
    found = torch.zeros(depth, *batch.ids.shape, dtype=torch.bool)
    head = student.head.float()
    words = torch.arange(len(head), device=where) if student.words is None else student.words
    rows, columns = batch.answered[:, ahead:].nonzero(as_tuple=True)
    hot = temperatures[rows] > 0
    chunk = max(1, CHUNK_NUMBERS[where.type] // reader.model.config.vocab)
    for b, i in (
        pair
        for part in (~hot, hot)
        for pair in zip(rows[part].split(chunk), columns[part].split(chunk), strict=True)
    ):
        came = batch.ids[b, i + ahead].to(where)
        divisor, noise = torch.ones(len(b), 1, device=where), None
        if len(b) and temperatures[b[0]] > 0:
            divisor = temperatures[b].to(where, torch.float32)[:, None]
            log_p = (reader.logits(features.last[b, i + ahead - 1]) / divisor).log_softmax(-1)
            noise = posterior_noise(log_p[:, words], words == came[:, None], generator)
        for step, state in enumerate(states):
            drawn = words[_draw(state[b, i].float() @ head.T / divisor, noise)]
            found[step, b, i + ahead] = drawn.eq(came).cpu()
    found[len(states) :] = found[len(states) - 1]  # what is not unrolled draws the same at every depth
    return found.numpy()


def _draw(scores: Tensor, noise: Tensor | None) -> Tensor:
    """What a drafter draws of logits [R, V]."""
    return (scores if noise is None else scores + noise).argmax(-1)


def posterior_noise(log_p: Tensor, came: Tensor, generator: torch.Generator) -> Tensor:
    """Gumbel noise [R, V] with which the target draws the tokens that came: log_p and where those are, [R, V].

    The largest of log p + G over all tokens is a Gumbel variable whatever token has it; the others are Gumbel
    variables below it. So V may be any part of the vocabulary.
    """
    free, best = (_gumbel((len(log_p), width), generator, log_p.device) for width in (log_p.shape[1], 1))
    below = -torch.logaddexp(-best, -(log_p + free))
    return torch.where(came, best, below) - log_p


def _gumbel(shape: tuple[int, int], generator: torch.Generator, device: torch.device) -> Tensor:
    uniform = torch.rand(shape, generator=generator, device=device).clamp_(1e-20, 1 - 2**-24)
    return -torch.log(-torch.log(uniform))


def _runs(batch: TrainBatch, row: int) -> list[tuple[int, int]]:
    """Stretches of answered tokens: where each begins and ends."""
    marks = np.flatnonzero(np.diff(batch.answered[row].numpy().astype(np.int8), prepend=0, append=0))
    return [(int(a), int(b)) for a, b in zip(marks[::2], marks[1::2], strict=True)]


def walk(found: Acceptance, hits: Hits, runs: list[tuple[int, int]]) -> None:
    """Count what serving would: the first token of an answer comes of its prompt, then each step drafts behind what
    the one before it emitted. hits [depth, T] say of the token at a place whether it is drawn at that depth.
    """
    depth = len(hits)
    for begin, end in runs:
        at = max(begin + 1, 2)  # the next token to be drafted; a head needs two before it
        while at < end:
            found.steps += 1
            count = 0
            while count < depth and at + count < end:
                found.reached[count] += 1
                if not hits[count, at + count]:
                    break
                found.accepted[count] += 1
                count += 1
            at += count + 1
