"""`outrider audit`: proves that speculation changes nothing, on the user's prompts or built-in ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from outrider.cli.flag import option
from outrider.cli.generate import Limit, Prompts
from outrider.cli.measure import (
    AsIfShape,
    DraftAsIf,
    DraftLayers,
    HtmlFile,
    JsonFile,
    Progress,
    Report,
    described,
    say_loading,
    writable,
    write_page,
)
from outrider.cli.options import DEFAULT_MODEL, ENGINE, SAMPLING, Draft, Model, takes
from outrider.cli.output import note, open_llm
from outrider.cli.tasks import Tasks, task_ids, task_rows
from outrider.errors import InvalidRequest
from outrider.settings import Settings
from outrider.types import SamplingParams

if TYPE_CHECKING:
    from outrider.bench.arrivals import Traffic
    from outrider.bench.audit import Audit, Extent
    from outrider.engine.llm import LLM

F = TypeVar("F", "Audit", "Traffic")

TEMPERATURES = (0.0, 0.7, 1.2)
EACH = 2  # built-in prompts of a task

Temperatures = Annotated[
    str | None,
    option(
        "temperatures",
        "Temperatures to audit at, in turn; by default 0,0.7,1.2, or --temperature if that is given.",
        "T,T,...",
    ),
]
Adversaries = Annotated[
    bool,
    option(
        "adversaries",
        "Also drafters that draft at random, wrongly, perfectly, with end-of-text, with duplicates.",
        None,
        "--adversaries/--no-adversaries",
    ),
]
Tokens = Annotated[
    int | None, option("tokens", "Go on with fresh seeds until this many tokens were compared.", min=1)
]
Seconds = Annotated[float | None, option("seconds", "Go on with fresh seeds for this long.", min=1)]
Million = Annotated[bool, option("million", "The same as --tokens 1000000.")]
Arrivals = Annotated[
    bool,
    option(
        "arrivals",
        "Under traffic: requests of many kinds arrive while others decode, some are aborted; each "
        "answer is compared with the same request's, answered alone and plainly.",
    ),
]


@takes(SAMPLING, ENGINE)
def audit(
    model: Model = DEFAULT_MODEL,
    draft: Draft = "auto",
    as_if: AsIfShape = None,
    draft_as_if: DraftAsIf = None,
    draft_layers: DraftLayers = None,
    prompts: Prompts = None,
    limit: Limit = None,
    tasks: Tasks = None,
    temperatures: Temperatures = None,
    adversaries: Adversaries = True,
    arrivals: Arrivals = False,
    tokens: Tokens = None,
    million: Million = False,
    seconds: Seconds = None,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
    *,
    params: SamplingParams,
    settings: Settings,
) -> None:
    """Run prompts plainly and speculatively, in batches, and compare every token. Exit status 0 only if all agree.

    outrider audit smollm2-135m --max-tokens 64
    """
    chosen = _temperatures(temperatures, params)
    if params.n > 1:
        raise InvalidRequest("an audit compares one answer a prompt; leave out --n", "n")
    mode = params.speculation.mode
    if mode == "lossy":
        raise typer.BadParameter("lossy promises nothing that could be audited", param_hint="--mode")
    if arrivals and mode != "coupled":
        raise typer.BadParameter(f"arrivals are compared token by token, which {mode} does not promise; "
                                 "leave out one of the two", param_hint="--mode")  # fmt: skip
    if mode == "rejection" and (tokens or million or seconds):
        raise typer.BadParameter("the number of samples that rejection is tested with is fixed; leave out --tokens, "
                                 "--million and --seconds", param_hint="--mode")  # fmt: skip
    page_file = writable(html_file)
    report, rows = Report("audit", json_file), task_rows(prompts, limit, tasks, EACH)
    say_loading(model)
    opened = open_llm(model, draft, settings, as_if, draft_as_if, draft_layers)
    with opened as llm, _one_process(model, settings, mode) as reference:
        asked = [ids for some in task_ids(llm, rows, params.max_tokens).values() for ids in some]
        report |= described(llm)
        if mode == "rejection":
            holds = _distribution(llm, asked, params, chosen, report)
        else:
            from outrider.bench.audit import Extent

            extent = Extent(1_000_000 if million else tokens, seconds)
            holds = _compared(llm, reference, asked, params, chosen, adversaries, extent, arrivals, report)
    from outrider.bench.report_pages import audit_page

    write_page(page_file, lambda: audit_page(report, model))
    if "interrupted" in report:
        report.keep()
        raise KeyboardInterrupt  # what was found has been said
    report.deliver()
    if not holds:
        raise typer.Exit(1)


def _one_process(model: str, settings: Settings, mode: str) -> contextlib.AbstractContextManager[LLM | None]:
    """What a model that ranks share is compared with token by token. None: it is in one process anyway."""
    if settings.tensor_parallel == 1 or mode == "rejection":
        return contextlib.nullcontext()
    return open_llm(model, "lookup", replace(settings, tensor_parallel=1))


def _temperatures(text: str | None, params: SamplingParams) -> list[float]:
    if text is None:
        given = params.temperature
        return list(TEMPERATURES) if given == SamplingParams().temperature else [given]
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a list of numbers such as 0,0.7", param_hint="--temperatures"
        ) from None


def _compared(
    llm: LLM,
    reference: LLM | None,
    prompts: list[list[int]],
    params: SamplingParams,
    temperatures: list[float],
    hostile: bool,
    extent: Extent,
    arrivals: bool,
    report: Report,
) -> bool:
    from outrider.bench.arrivals import audit_arrivals
    from outrider.bench.audit import audit as audit_batches

    asked = (llm, prompts, hostile, temperatures, params, extent)
    if not arrivals:
        return _verdict(_watched("identity", report, lambda tell: audit_batches(*asked, tell, reference)), "")
    found = _watched("arrivals", report, lambda tell: audit_arrivals(*asked, tell, reference))
    for kind, why in found.left_out.items():
        note(f"left out: {kind}: {why}")
    note(", ".join(f"{number} {kind}" for kind, number in found.requests.items()))
    wrong = f", {found.differing_logprobs} DIFFER" if found.differing_logprobs else ""
    note(f"{found.logprobs} log-probabilities compared{wrong}")
    amount = f" of {found.requests.total()} requests ({found.aborted} aborted)"
    return _verdict(found, amount) and not found.differing_logprobs


def _watched(stage: str, report: Report, run: Callable[[Callable[..., None]], F]) -> F:
    """What `run` finds; it is shown and kept as it comes. After Ctrl-C it is what was found until then."""
    kept_at, latest = 0.0, list[F]()

    def note_progress(found: F, done: float, what: str = "") -> None:
        nonlocal kept_at
        latest[:] = [found]
        differing = f", {found.differing} DIFFER" if found.differing else ""
        compared = f"{found.compared} tokens compared, {found.drafted.total()} drafted{differing}"
        say(f"{compared}; {what}" if what else compared, done)
        if found.seconds - kept_at > 10:
            kept_at = found.seconds
            report[stage] = found.as_json()
            report.keep()

    with Progress({stage: 1}) as progress:
        say: Callable[[str, float], None] = progress.of(stage)
        say("nothing compared yet", 0.0)
        try:
            found = run(note_progress)
        except KeyboardInterrupt:
            if not latest:
                raise
            [found] = latest
            report["interrupted"] = True
    if "interrupted" in report:
        note("stopped before the end")
    report[stage] = found.as_json()
    return found


def _verdict(found: Audit | Traffic, of_what: str) -> bool:
    for d in found.divergences[:5]:
        note(
            f"prompt {d.prompt} at T={d.temperature:g}: {d.method} differs at position {d.position}: "
            f"{d.speculative} for {d.plain}, margin {d.margin:.2e}"
        )
    drafted = found.drafted.total()
    agreed = "identical" if not found.differing else f"{found.differing} DIFFER"
    said = agreed if drafted else "NOTHING WAS PUT TO THE TEST"
    note(f"{found.compared} tokens{of_what} compared, {drafted} drafted: {said}")
    return found.compared > 0 and drafted > 0 and found.differing == 0


def _distribution(
    llm: LLM,
    prompts: list[list[int]],
    params: SamplingParams,
    temperatures: list[float],
    report: dict[str, Any],
) -> bool:
    from outrider.bench.audit import same_distribution

    report["distribution"] = []
    pairs = [(t, number) for t in filter(None, temperatures) for number in range(len(prompts[:3]))]
    with Progress({"distribution": 1}) as progress:
        for place, (temperature, number) in enumerate(pairs):
            what = f"prompt {number} at T={temperature:g}"
            progress.of("distribution")(f"{what}: 2048 answers, plain and speculative", place / len(pairs))
            one = replace(params, temperature=temperature)
            found = same_distribution(llm, prompts[number], one, llm.drafter, draws=2048)
            report["distribution"].append({"prompt": number, "temperature": temperature, **found})
            progress.clear()
            note(f"{what}: p = {found['p_value']:.3g}")
    return bool(report["distribution"]) and all(one["holds"] for one in report["distribution"])
