"""Fidelity against speed: what the modes of verification keep of plain decoding, for the speed that they bring.

`equal` is the share of tokens before an answer's first difference from the plain answer. It measures fidelity at
temperature 0. Above, `rejection` writes other tokens of the same distribution; there the mean log-probability of the
emitted tokens under the target is the figure to compare, within its standard error. Equal means do not prove equal
distributions.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from outrider.bench.answering import Answers, answer
from outrider.bench.compare import cut
from outrider.bench.page import Series, chart
from outrider.engine.llm import LLM
from outrider.errors import InvalidRequest, suggest
from outrider.sampling_params import MODES
from outrider.types import SamplingParams, Speculation

Found = Mapping[str, Any]
THRESHOLDS = (0.5, 0.3, 0.1, 0.03)
ALL = ("coupled", "rejection", *(f"lossy:{threshold:g}" for threshold in THRESHOLDS))
LOSSY = "lossy:"


def modes_of(asked: Speculation, names: Seq[str]) -> dict[str, Speculation]:
    """`plain`, and for every name how drafts are verified: `coupled`, `rejection`, `lossy`, or `lossy:0.3`, which
    accepts a draft token whose probability is at least 0.3. `all` stands for a curve of them.
    """
    found = {"plain": Speculation(drafter="none")}
    for name in ALL if list(names) == ["all"] else names:
        mode, colon, threshold = name.partition(":")
        if mode not in MODES or (colon and mode != "lossy"):
            raise InvalidRequest(f"unknown mode {name!r:.40}{suggest(mode, MODES)}", "modes")
        found[name] = replace(asked, mode=mode)
        if colon:
            try:
                found[name] = replace(found[name], rule="threshold", threshold=float(threshold))
            except ValueError:
                raise InvalidRequest(
                    f"{name!r:.40} is not lossy:NUMBER, such as lossy:0.3", "modes"
                ) from None
    return found


def measure_fidelity(
    llm: LLM, groups: Seq[Seq[list[int]]], asked: Mapping[str, SamplingParams]
) -> dict[str, dict[str, float | None]]:
    """By method. All groups are answered once more, untimed, because log-probabilities cost time."""
    runs: dict[str, list[Answers]] = {
        name: [answer(llm, group, replace(params, logprobs=0)) for group in groups]
        for name, params in asked.items()
    }
    return {name: _fidelity(own, runs["plain"]) for name, own in runs.items()}


def _fidelity(own: Seq[Answers], plain: Seq[Answers]) -> dict[str, float | None]:
    differing = sum(a.run.differing(b.run) for a, b in zip(own, plain, strict=True))
    compared = sum(max(len(x), len(y)) for a, b in zip(own, plain, strict=True)
                   for x, y in zip(a.run.answers, b.run.answers, strict=True))  # fmt: skip
    means = [statistics.fmean(some) for run in own for some in run.logprobs]
    logprob = statistics.fmean(each for run in own for some in run.logprobs for each in some)
    reference = statistics.fmean(each for run in plain for some in run.logprobs for each in some)
    return {
        "equal": 1 - differing / compared,
        "logprob": logprob,
        "logprob_error": statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None,
        "likelihood": math.exp(logprob - reference),  # of a token, against plain decoding's; geometric means
    }


def fidelity_table(report: Found) -> Iterator[str]:
    """Within 80 columns."""
    yield f"{'task':14} {'batch':>5} {'mode':12} {'speed-up':>8} {'equal':>7} {'log-probability':>19}"
    for label, size, name, method in _with_fidelity(report):
        known, ratio = method["fidelity"], "" if name == "plain" else f"{method['ratio']:.2f}x"
        error = "?" if known["logprob_error"] is None else f"{known['logprob_error']:.3f}"
        likely = f"{known['logprob']:.3f} +- {error}"
        yield f"{cut(label, 14):14} {size:>5} {cut(name, 12):12} {ratio:>8} {100 * known['equal']:5.1f} % {likely:>19}"
    yield "equal: tokens before the first that differs from plain decoding's;"
    yield "log-probability: mean of the emitted tokens under the target, standard error"


def fidelity_charts(report: Found) -> Iterator[str]:
    """By task and batch: fidelity over speed-up, a line through the lossy thresholds and a point for the others."""
    for label, found in report.items():
        for size, batch in found["batches"].items():
            known = {name: one for name, one in batch["methods"].items() if "fidelity" in one}
            figure, up = (
                ("equal", "% of tokens equal")
                if found["temperature"] == 0
                else ("likelihood", "% of plain's probability")
            )
            lines: dict[str, list[str]] = {}
            for name in known:
                lines.setdefault("lossy" if name.startswith(LOSSY) else name, []).append(name)
            drawn = [
                Series(
                    line,
                    [known[name]["ratio"] for name in names],
                    [100 * known[name]["fidelity"][figure] for name in names],
                    names,
                )
                for line, names in lines.items()
            ]
            if drawn:
                most = math.ceil(max(x for one in drawn for x in one.xs))
                ticks = [(float(x), f"{x}x") for x in range(1, most + 1)]
                yield chart(f"{label}, batch {size}", drawn, ticks, "speed-up", up)


def _with_fidelity(report: Found) -> Iterator[tuple[str, str, str, Found]]:
    for label, found in report.items():
        for size, batch in found["batches"].items():
            for name, method in batch["methods"].items():
                if "fidelity" in method:
                    yield label, size, name, method
