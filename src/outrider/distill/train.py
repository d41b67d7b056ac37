"""Training: a draft learns the target's distribution on the target's own answers, one batch of them a step.

Everything is a function of the recipe, the answers and the step: a killed run resumes from the last checkpoint and ends
with the same weights. `curves.jsonl` says how it went, line by line.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from outrider.distill.acceptance import Acceptance, held_out, measure_acceptance
from outrider.distill.answers import Answers, TrainBatch
from outrider.distill.attention import flash_works
from outrider.distill.checkpoints import Counters, load_checkpoint, save_checkpoint
from outrider.distill.features import TargetReader
from outrider.distill.losses import Diverge, Losses, divergence, losses_and_gradients
from outrider.distill.recipe import Recipe
from outrider.distill.report import Report
from outrider.distill.students import Student, make_student
from outrider.engine.llm import LLM
from outrider.errors import OutriderError, UnsupportedModel
from outrider.load.token_shards import write_atomically
from outrider.model.decoder import Layered
from outrider.verify.rows import to_device

DRAFT, CHECKPOINTS, CURVES = "draft", "checkpoints", "curves.jsonl"
EPOCHS = 3  # where a recipe names no number of tokens
FLOOR = 0.05  # of the learning rate, at the end
BETAS = (0.9, 0.95)
LOG_STEPS = 10  # between two lines of the curves
# Where in a step the target has read the batch, the draft has its states, and the losses are known; the backward
# pass ends it. Rough shares of a head's step on a CPU, for the bar alone; nothing else depends on them.
READ, STATES, LOSSES = 0.1, 0.25, 0.55


class Diverged(OutriderError):
    """The loss is no number any more."""


def train(llm: LLM, recipe: Recipe, answers: Answers, out: Path, report: Report) -> Path:
    """Train what the recipe asks for on the answers; the folder of the draft, as serving loads it."""
    if not isinstance(llm.model, Layered):
        raise UnsupportedModel(
            "this target runs through transformers, and its hidden states cannot be read: only targets of Outrider's "
            "own decoder can be distilled"
        )
    student = make_student(recipe, llm.checkpoint, answers)
    if llm.model.device.type != "cpu":
        return Training(llm.model, student, recipe, answers, out, report).run()
    with on_the_cpu(llm.settings.threads):
        return Training(llm.model, student, recipe, answers, out, report).run()


@contextlib.contextmanager
def on_the_cpu(threads: int) -> Iterator[None]:
    """The engine leaves torch one thread, as its kernels have their own; gradients want all. And oneDNN takes fifty
    times as long as torch's own matmul for small matrices on some machines, and is nowhere faster in float32.
    """
    before = torch.get_num_threads(), bool(torch.backends.mkldnn.enabled)
    torch.set_num_threads(threads)
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.backends.mkldnn.enabled = before[1]  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Unread:
    """What a step came to, still where it was made: the norm of the gradients, losses and overlaps."""

    step: int
    rate: float
    numbers: Tensor


class Training:
    """One run: its student, its optimiser, its counters. Everything it writes is under `out`."""

    def __init__(
        self, model: Layered, student: Student, recipe: Recipe, answers: Answers, out: Path, report: Report
    ) -> None:
        self.student, self.recipe, self.answers, self.out, self.report = student, recipe, answers, out, report
        self.reader = TargetReader(model, student.taps, recipe.batch_tokens)
        self.device = model.device
        self.diverge = divergence if self.device.type == "cpu" else _fused_divergence()
        fast = recipe.dtype == "bfloat16" or (recipe.dtype == "auto" and self.device.type == "cuda")
        self.dtype = torch.bfloat16 if fast else torch.float32
        student.net.to(self.device)
        matrices = [p for p in student.net.parameters() if p.dim() > 1]
        others = [p for p in student.net.parameters() if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": recipe.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        fused = self.device.type == "cuda" or None
        self.optimiser = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=BETAS, fused=fused)
        self.total = recipe.train_tokens or EPOCHS * answers.tokens
        self.counters = Counters()
        self._unread: list[Unread] = []
        self._loss = math.nan  # as last read
        self._whole = True  # weights, moments and counters are of the same step
        self._saved = 0  # step of the last checkpoint

    def run(self) -> Path:
        self.counters = load_checkpoint(
            self.out / CHECKPOINTS, self.student.net, self.optimiser, self.report.note
        )
        self._saved = self.counters.step
        self._cut_curves()
        if self.device.type == "cuda" and self.dtype != torch.float32 and not flash_works(self.device):
            self.report.note(
                "torch's attention kernel for this device is not there or differs: training goes without"
            )
        started = time.perf_counter() - self.counters.seconds
        if not self.counters.step:
            shutil.rmtree(self._written())  # what cannot be saved is said before it is trained
            self._validate()
        self.report.begin("train", self.total, "tokens", self.counters.tokens)
        batches = self.answers.batches(self.recipe.batch_tokens, self.recipe.seed, self.counters.step)
        try:
            while self.counters.tokens < self.total:
                self._step(next(batches))
                self.counters.seconds = time.perf_counter() - started
                self._after_step(over=self.counters.tokens >= self.total)
        except KeyboardInterrupt:
            self._keep()
            raise
        finally:
            self.report.end()
        return self._save()

    def _keep(self) -> None:
        """Save the steps since the last checkpoint, unless the interruption fell into a change of the weights."""
        if self._whole and self.counters.step > self._saved:
            if self._unread:
                self._read()
            self._checkpoint()

    def _checkpoint(self) -> None:
        save_checkpoint(self.out / CHECKPOINTS, self.student.net, self.optimiser, self.counters)
        self._saved = self.counters.step

    def _step(self, batch: TrainBatch) -> None:
        """The host does not wait for the device; `_read` fetches the results of steps later."""
        rate = self.recipe.learning_rate * schedule(self.counters.tokens / self.total, self.recipe.warm_up)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.zero_grad(set_to_none=True)
        losses = self._backward(batch)
        norm = torch.nn.utils.clip_grad_norm_(self.student.net.parameters(), self.recipe.clip or math.inf)
        self._whole = False
        self.optimiser.step()
        self.counters.step += 1
        self.counters.tokens += batch.tokens
        self._unread.append(Unread(self.counters.step, rate, torch.cat([norm[None], *losses.means()])))
        self._whole = True

    def _within(self, batch: TrainBatch, begin: float, end: float) -> Callable[[float], None]:
        """Reports how far a part of a step is, by the share of that part; the part is from `begin` to `end`."""

        def report(share: float) -> None:
            done = self.counters.tokens + (begin + (end - begin) * share) * batch.tokens
            self._update(done)

        return report

    def _update(self, done: float) -> None:
        self.report.update(min(done, self.total), "" if math.isnan(self._loss) else f"loss {self._loss:.3f}")

    def _read(self) -> dict[str, Any]:
        """What the last step came to. Raises if any since the last reading came to no number: whatever is kept or said
        of the weights is read before.
        """
        found = torch.stack([one.numbers for one in self._unread]).tolist()
        for one, numbers in zip(self._unread, found, strict=True):
            if not math.isfinite(sum(numbers)):
                raise Diverged(
                    f"the loss is no number any more in step {one.step}; the last checkpoint is of a step before it, "
                    f"in {self.out / CHECKPOINTS}. Take a lower learning rate than {self.recipe.learning_rate:g}"
                )
        rate, (norm, *rest) = self._unread[-1].rate, found[-1]
        self._unread, half = [], len(rest) // 2
        self._loss = rest[0]
        return {"rate": rate, "norm": norm, "loss": rest[:half], "overlap": rest[half:]}

    @torch.enable_grad()  # a caller's program may have turned gradients off
    def _backward(self, batch: TrainBatch) -> Losses:
        """The gradients of a batch, through the hidden states: the logits' part is made in chunks."""
        features = self.reader.read(batch, self._within(batch, 0, READ))
        states = self.student.states(batch, features, self.reader, self.recipe.unroll, self.dtype)
        of_losses, back = self._within(batch, STATES, LOSSES), self._within(batch, LOSSES, 1)
        ahead, width = self.student.ahead, batch.ids.shape[1]
        rows, columns = self._places(batch)
        flat = to_device(rows * width + columns, self.device)
        deep = math.ceil(self.recipe.deep_share * len(rows))
        places = [flat, *[flat[:deep]] * (len(states) - 1)]
        last = features.last.flatten(0, 1)[flat + ahead - 1]
        targets = self.reader.probabilities(last, self.student.words, self.recipe.loss_temperature)

        def some(which: slice) -> Tensor:
            of_losses(which.start / len(last))
            return targets(which)

        losses, gradients, of_head = losses_and_gradients(
            self.recipe.loss,
            [state.detach().flatten(0, 1)[at] for state, at in zip(states, places, strict=True)],
            [to_device(one, self.device) for one in self._weights(columns, [len(at) for at in places])],
            self.student.head,
            some,
            self.dtype,
            self.diverge,
            self.recipe.loss_temperature,
        )
        whole = [torch.zeros_like(state) for state in states]
        for to, gradient, at in zip(whole, gradients, places, strict=True):
            to.flatten(0, 1)[at] = gradient
        for number, state in enumerate(reversed(states)):  # the last one's gradient is known first
            state.register_hook(partial(lambda share, _: back(share), number / len(states)))
        torch.autograd.backward(states, whole)
        if of_head is not None:
            head = self.student.head
            head.grad = of_head if head.grad is None else head.grad + of_head
        return losses

    def _places(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """Rows and columns of the states that learn; in random order, if later steps learn from the first of them."""
        rows, columns = batch.answered[:, self.student.ahead :].nonzero(as_tuple=True)
        if self.recipe.deep_share < 1:
            random = np.random.Generator(np.random.Philox(key=[self.recipe.seed, self.counters.step]))
            order = torch.from_numpy(random.permutation(len(rows)))
            rows, columns = rows[order], columns[order]
        return rows, columns

    def _weights(self, columns: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """Of the first `counts[k]` places of step k: its mean counts `decay` times that of the step before. Step k has
        no place before k.
        """
        shares = [self.recipe.decay**k for k in range(len(counts))]
        found = []
        for k, (share, count) in enumerate(zip(shares, counts, strict=True)):
            there = (columns[:count] >= k).float()
            found.append(there * (share / sum(shares) / max(1.0, float(there.sum()))))
        return found

    def _after_step(self, over: bool) -> None:
        c, r = self.counters, self.recipe
        due = {
            every: c.step % every == 0 or over for every in (LOG_STEPS, r.validate_steps, r.checkpoint_steps)
        }
        line = self._read() if any(due.values()) else {}
        self._update(c.tokens)
        if due[LOG_STEPS]:
            self._log(line)
        if due[r.validate_steps]:
            self._validate()
        if due[r.checkpoint_steps]:
            self._checkpoint()

    def _validate(self) -> None:
        r = self.recipe
        rows = held_out(self.answers, self.device)
        found = measure_acceptance(
            self.student, self.reader, self.answers, rows, r.batch_tokens, r.depth, r.seed
        )
        if found:
            self._log({"held_out": {kind: one.to_json() for kind, one in found.items()}})
            self.report.note(f"step {self.counters.step}: {_in_words(found)}")

    def _log(self, line: Mapping[str, Any]) -> None:
        c = self.counters
        whole = {"step": c.step, "tokens": c.tokens, "seconds": round(c.seconds, 2), **line}
        self.out.mkdir(parents=True, exist_ok=True)
        with (self.out / CURVES).open("a") as file:
            file.write(json.dumps(whole) + "\n")

    def _cut_curves(self) -> None:
        """Leave out what came after the checkpoint: it will come again."""
        file = self.out / CURVES
        if file.exists():
            kept = [one for one in read_curves(file) if 0 < self.counters.step >= one["step"]]
            write_atomically(file, "".join(json.dumps(one) + "\n" for one in kept).encode())

    def _save(self) -> Path:
        """A draft that is there is whole."""
        part, folder = self._written(), self.out / DRAFT
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
        return folder

    def _written(self) -> Path:
        """Writes the draft to a temporary folder beside its final place."""
        part = self.out / f".{DRAFT}.part"
        shutil.rmtree(part, ignore_errors=True)
        try:
            self.student.save(part)
        except (OSError, SafetensorError) as problem:
            shutil.rmtree(part, ignore_errors=True)
            raise OutriderError(
                f"the draft in {self.out} cannot be written: {problem} (the last checkpoint is kept: make room and run "
                "the same command again)"
            ) from None
        return part


def _fused_divergence() -> Diverge:
    from outrider.distill.losses_gpu import fused_divergence  # Triton comes with it

    return fused_divergence


def schedule(done: float, warm_up: float) -> float:
    """The learning rate's factor: up in a line, then down a cosine to its floor."""
    if done < warm_up:
        return max(done / warm_up, FLOOR)
    share = min((done - warm_up) / max(1 - warm_up, 1e-9), 1.0)
    return FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * share)) / 2


def read_curves(file: Path) -> list[dict[str, Any]]:
    """Lines of the curves; one that was being written when the run was killed is left out."""
    found = []
    for line in file.read_text().splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def _in_words(found: Mapping[str, Acceptance]) -> str:
    return "; ".join(
        f"{kind} accepts {' '.join(f'{rate:.2f}' for rate in one.rates)}, {one.tokens_per_step:.2f} tokens a step"
        for kind, one in sorted(found.items())
    )
