"""`outrider advise`: which draft to use, before deploying; measured on this machine, or from numbers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from outrider.cli.bench import TaskTemperatures, batch_sizes, task_temperatures
from outrider.cli.flag import option
from outrider.cli.generate import Limit, Prompts
from outrider.cli.measure import (
    HtmlFile,
    JsonFile,
    Progress,
    Report,
    described,
    say_loading,
    warn_if_busy,
    writable,
    write_page,
)
from outrider.cli.options import DEFAULT_MODEL, ENGINE, SAMPLING, Model, takes
from outrider.cli.output import note, open_llm
from outrider.cli.tasks import TOKENS, TaskRow, Tasks, task_ids, task_rows
from outrider.draft.names import check_parts, parse_draft
from outrider.errors import InvalidRequest
from outrider.settings import Settings, cache_folder
from outrider.types import SamplingParams

if TYPE_CHECKING:
    from outrider.bench.advise import Measured

EACH = 2  # built-in prompts of a task
SECONDS = 60.0
CANDIDATES = ("auto", "lookup", "early_exit")


Drafts = Annotated[
    list[str] | None,
    option(
        "draft",
        "A candidate: lookup, early_exit, a smaller model, an EAGLE head, auto (the target's pair), a+b, none, "
        "synthetic:0.8,0.7. Repeatable; "
        "by default the pair, where there is one, lookup and early_exit.",
        "NAME",
    ),
]
WhatIfText = Annotated[
    str | None,
    option(
        "what_if",
        "No model, numbers alone: 'acceptance=0.7,0.6 depth=4 cost=0.1 batch=16', and rows=1:1,80:1.6 (of a "
        "mixture of experts experts=128:8) and tok_s=40 where they are known.",
        "TEXT",
    ),
]
Price = Annotated[
    str | None, option("price_per_hour", "What an hour of this machine costs, for prices of tokens.", "X")
]
Seconds = Annotated[float, option("seconds", "Time to measure in, about.", "SEC", min=1.0)]
Batches = Annotated[str, option("batches", "Batch sizes to advise on.", "N,N,...")]


@takes(SAMPLING, ENGINE, max_tokens=TOKENS)
def advise(
    model: Model = DEFAULT_MODEL,
    draft: Drafts = None,
    prompts: Prompts = None,
    limit: Limit = None,
    tasks: Tasks = None,
    temperatures: TaskTemperatures = None,
    batches: Batches = "1,4,16,64",
    seconds: Seconds = SECONDS,
    price_per_hour: Price = None,
    what_if: WhatIfText = None,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
    *,
    params: SamplingParams,
    settings: Settings,
) -> None:
    """Say which draft to use and how deep, before deploying: measured here, on your prompts.

    outrider advise smollm2-135m --draft lookup --prompts mine.jsonl
    """
    price = _price(price_per_hour)
    page_file = writable(html_file)
    report = Report("advise", json_file)
    if what_if is not None:
        _deliver(report, page_file, "from numbers alone", _what_if(what_if, price, report))
        return
    sizes, by_task = batch_sizes(batches), task_temperatures(temperatures, params)
    if any(len(some) > 1 for some in by_task.values()):
        raise InvalidRequest("advise takes one temperature a task; run it once for each", "temperatures")
    drafts = list(dict.fromkeys(draft or CANDIDATES))
    for one in drafts:
        check_parts(parse_draft(one), cache_folder())
    rows = task_rows(prompts, limit, tasks, EACH)
    _check(params)
    warn_if_busy()
    say_loading(model)
    if not settings.max_sequences:
        settings = replace(settings, max_sequences=max(64, *sizes))
    said = _measure(
        model,
        [one for one in drafts if one != "none"],
        rows,
        by_task,
        sizes,
        seconds,
        price,
        report,
        params,
        settings,
    )
    _deliver(report, page_file, model, said)


def _deliver(report: Report, page_file: Path | None, model: str, said: list[str]) -> None:
    from outrider.bench.report_pages import advise_page

    write_page(page_file, lambda: advise_page(report, model, said))
    report.deliver()


def _check(params: SamplingParams) -> None:
    asked = params.speculation
    if params.n > 1:
        raise InvalidRequest("one answer a prompt is measured; leave out --n", "n")
    if asked.off or asked.depth or asked.nodes or asked.tree or asked.drafter:
        raise InvalidRequest(
            "advise tries drafts of several depths; leave out --speculate and --tree", "speculate"
        )


def _what_if(numbers: str, price: float | None, report: Report) -> list[str]:
    """What the page says in words."""
    from outrider.bench.what_if import what_if_table
    from outrider.draft.what_if import WhatIf

    asked = WhatIf.of(numbers)
    rows = asked.answer(price)
    for line in what_if_table(asked, rows):
        note(line)
    report["what_if"] = rows
    best = max(rows, key=lambda row: row["best_speedup"])
    return [f"{best['best_speedup']:.2f}x at best: drafts of {best['best_depth']}, batch {best['batch']}"]


def _measure(
    model: str,
    drafts: Sequence[str],
    rows: dict[str, list[TaskRow]],
    temperatures: dict[str, list[float]],
    sizes: list[int],
    seconds: float,
    price: float | None,
    report: Report,
    params: SamplingParams,
    settings: Settings,
) -> list[str]:
    """The advice in words, which is printed, too."""
    from outrider.bench.advice import advise, prices, said, table
    from outrider.bench.advise import Session, in_turn
    from outrider.bench.speculation import temperatures_of
    from outrider.bench.what_if import price_table

    session = Session(sizes, seconds=seconds, candidates=max(1, len(drafts)))
    found: list[Measured] = []
    parameters = 0
    with Progress(dict.fromkeys(drafts, 1.0)) as progress:
        for opened, candidates in _together(drafts):
            with open_llm(model, opened, settings) as llm:
                if not found:
                    report |= described(llm)
                parameters = llm.model.config.parameters
                ids = task_ids(llm, rows, params.max_tokens)
                asked = in_turn(
                    ids, lambda task: replace(params, temperature=temperatures_of(task, temperatures)[0])
                )
                for one in candidates:
                    name = "lookup" if one == "lookup" else llm.drafter
                    if one == "auto" and llm.pair is None and "lookup" in drafts:
                        session.candidates -= 1  # without a pair it is lookup
                        continue
                    found.append(session.measure(llm, one, name, asked, progress.of(one)))
                    report["drafts"] = [each.as_json() for each in found]
                    report.keep()
    advice = advise(model, parameters, found, seconds)
    report["advice"] = advice.as_json()
    if price is not None:
        report["prices"] = prices(found, price)
    priced = price_table(report["prices"]) if found and price is not None else ()
    words = list(said(advice))
    for line in (*(table(found) if found else ()), *priced, *words):
        note(line)
    return words


def _together(drafts: Sequence[str]) -> list[tuple[str, list[str]]]:
    """What to open a model with, and the candidates that it serves: lookup is there beside any other."""
    opened = [one for one in drafts if one != "lookup"] or list(drafts)
    return [(one, [d for d in drafts if d == one or (d == "lookup" and one == opened[0])]) for one in opened]


def _price(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        price = float(text)
    except ValueError:
        price = -1.0
    if not 0 < price < float("inf"):
        raise InvalidRequest(
            f"--price-per-hour is a number above 0, such as 2.5, not {text!r:.40}", "price_per_hour"
        )
    return price
