"""Quality: what a number format of the weights, or another file of the same model, changes against a reference.

The reference answers the prompts greedily. Each other model then reads the same tokens, prompt and answer, and its
next-token distributions are compared with the reference's at every token of the answers. It also answers by itself:
how far its greedy answers are the reference's is what users see.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from outrider.bench.compare import first_difference
from outrider.cache.table import SlotTable
from outrider.draft.reading import text_batch
from outrider.engine.llm import LLM
from outrider.errors import InvalidRequest
from outrider.model.decoder import Model, make_store
from outrider.types import SamplingParams, Speculation

CHUNK = 128  # rows of a pass
Tell = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Reference:
    prompts: list[list[int]]
    answers: list[list[int]]
    perplexity: float  # of the prompts
    vocab: int
    file: BinaryIO  # log-probabilities [tokens of all answers, vocab], float32

    def distributions(self) -> Iterator[np.ndarray]:
        """By prompt."""
        self.file.seek(0)
        for answer in self.answers:
            found = np.fromfile(self.file, np.float32, len(answer) * self.vocab)
            yield found.reshape(len(answer), self.vocab)


def make_reference(llm: LLM, prompts: Seq[list[int]], tokens: int, file: BinaryIO, tell: Tell) -> Reference:
    """The file takes `tokens` x vocabulary x 4 bytes for each prompt."""
    answers, surprise, read = [], 0.0, 0
    for i, prompt in enumerate(prompts):
        tell("reference", i / len(prompts))
        answers.append(greedy(llm, prompt, tokens))
        nats, found = llm.driver.run(partial(_read, llm.model, prompt, answers[-1]))
        surprise, read = surprise + nats, read + len(prompt) - 1
        found.numpy().tofile(file)
    file.flush()
    perplexity = math.exp(surprise / max(read, 1))
    return Reference(list(prompts), answers, perplexity, llm.model.config.vocab, file)


def measure_quality(llm: LLM, reference: Reference, tell: Tell) -> dict[str, Any]:
    """Perplexity of the prompts, agreement at the tokens of the reference's answers, and own answers."""
    if llm.model.config.vocab != reference.vocab:
        raise InvalidRequest(
            f"the models have vocabularies of {llm.model.config.vocab} and {reference.vocab} tokens: "
            "only versions of one model can be compared",
            "against",
        )
    surprise, read, same, kl, equal = 0.0, 0, 0, list[float](), list[int]()
    rows = zip(reference.prompts, reference.answers, reference.distributions(), strict=True)
    for i, (prompt, answer, expected) in enumerate(rows):
        tell("reading", i / len(reference.prompts))
        nats, found = llm.driver.run(partial(_read, llm.model, prompt, answer))
        surprise, read = surprise + nats, read + len(prompt) - 1
        theirs = torch.from_numpy(expected)
        same += int((found.argmax(1) == theirs.argmax(1)).sum())
        kl += (theirs.exp() * (theirs - found)).sum(1).clamp(min=0).tolist()
        at = first_difference(greedy(llm, prompt, len(answer)), answer)
        equal.append(len(answer) if at is None else at)
    tokens = sum(map(len, reference.answers))
    return {
        "perplexity": math.exp(surprise / max(read, 1)),
        "top1": same / tokens,
        "kl_mean": statistics.fmean(kl),
        "kl_p99": float(np.percentile(kl, 99)),
        "answers_equal": sum(n == len(a) for n, a in zip(equal, reference.answers, strict=True)),
        "answers": len(equal),
        "tokens_before_difference": statistics.fmean(equal),
    }


def greedy(llm: LLM, prompt: list[int], tokens: int) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=tokens, speculation=Speculation(drafter="none"))
    return list(llm.generate([prompt], params)[0].token_ids)


def _read(model: Model, prompt: list[int], answer: list[int]) -> tuple[float, Tensor]:
    """Surprise of the prompt's tokens in nats, and log-probabilities [tokens of the answer, vocabulary]."""
    text = [*prompt, *answer]
    store, table = make_store(model, len(text)), SlotTable(len(text), 1, len(text), reuse=False)
    row, _ = table.open([])
    surprise, found = 0.0, []
    for start in range(0, len(text) - 1, CHUNK):
        chunk = text[start : min(start + CHUNK, len(text) - 1)]
        table.extend(row, len(chunk))
        batch = text_batch(table, [row], [chunk], [start], last_only=False).to(model.device)
        scores = model.forward(batch, store).float().log_softmax(-1).cpu()
        after = torch.tensor(text[start + 1 : start + 1 + len(chunk)])
        inside = max(0, min(len(chunk), len(prompt) - 1 - start))  # rows that predict tokens of the prompt
        surprise -= float(scores[:inside].gather(1, after[:inside, None]).sum())
        found.append(scores[inside:].clone())
    return surprise, torch.cat(found)


def quality_table(report: dict[str, Any]) -> Iterator[str]:
    """Within 80 columns."""
    yield f"{'format':12} {'perplexity':>10} {'top-1':>8} {'KL mean':>9} {'KL p99':>9} {'equal':>9} {'tokens':>7}"
    yield f"{report['reference']:12} {report['reference_perplexity']:10.3f}   (reference)"
    for name, one in report["formats"].items():
        equal = f"{one['answers_equal']} of {one['answers']}"
        yield (
            f"{name:12} {one['perplexity']:10.3f} {100 * one['top1']:6.1f} % {one['kl_mean']:9.5f} "
            f"{one['kl_p99']:9.5f} {equal:>9} {one['tokens_before_difference']:7.1f}"
        )
    yield "perplexity of the prompts; top-1: same likeliest token; KL of next-token distributions, nats;"
    yield "equal: greedy answers that are the reference's; tokens: of an answer before it differs"
