"""`outrider audit`: proves that guessing changes nothing, on the user's prompts or built-in ones."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.bench import tasks_of
from outrider.cli.generate import Json, Limit, Prompts
from outrider.cli.options import DEFAULT_MODEL, ENGINE, SAMPLING, Draft, Model, envvar, takes
from outrider.cli.output import note, open_llm, write
from outrider.errors import InvalidRequest
from outrider.settings import Settings
from outrider.types import SamplingParams

if TYPE_CHECKING:
    from outrider.bench.audit import Audit
    from outrider.engine.llm import LLM

TEMPERATURES = (0.0, 0.7, 1.2)

Temperatures = Annotated[
    str | None,
    typer.Option("--temperatures", envvar=envvar("temperatures"), show_envvar=False, metavar="T,T,...",
                 help="Temperatures to audit at, in turn; by default 0,0.7,1.2, or --temperature if that is given."),
]  # fmt: skip
Adversaries = Annotated[
    bool,
    typer.Option("--adversaries/--no-adversaries", envvar=envvar("adversaries"), show_envvar=False,
                 help="Also drafters that guess at random, wrongly, perfectly, with end-of-text, with duplicates."),
]  # fmt: skip
Tokens = Annotated[
    int | None,
    typer.Option("--tokens", min=1, envvar=envvar("tokens"), show_envvar=False,
                 help="Go on with fresh seeds until this many tokens were compared."),
]  # fmt: skip
Million = Annotated[
    bool,
    typer.Option(
        "--million", envvar=envvar("million"), show_envvar=False, help="The same as --tokens 1000000."
    ),
]


@takes(SAMPLING, ENGINE)
def audit(
    model: Model = DEFAULT_MODEL,
    draft: Draft = "auto",
    prompts: Prompts = None,
    limit: Limit = None,
    temperatures: Temperatures = None,
    adversaries: Adversaries = True,
    tokens: Tokens = None,
    million: Million = False,
    as_json: Json = False,
    *,
    params: SamplingParams,
    settings: Settings,
) -> None:
    """Run prompts plain and guessed in shared steps and compare every token. Exit status 0 only if all agree.

    outrider audit smollm2-135m --max-tokens 64
    """
    heat = _temperatures(temperatures, params)
    if params.n > 1:
        raise InvalidRequest("an audit compares one answer a prompt; leave out --n", "n")
    with open_llm(model, draft, settings) as llm:
        from outrider.bench.certificate import certificate

        tasks = [ids for task in tasks_of(llm, prompts, limit).values() for ids in task]
        report: dict[str, Any] = {"certificate": certificate(), "draft": llm.drafter}
        if params.speculation.mode == "rejection":
            holds = _distribution(llm, tasks, params, heat, report)
        elif params.speculation.mode == "lossy":
            raise typer.BadParameter("lossy promises nothing that could be audited", param_hint="--mode")
        else:
            holds = _identity(llm, tasks, params, heat, adversaries, 1_000_000 if million else tokens, report)
    write(json.dumps(report, indent=None if as_json else 2) + "\n")
    if not holds:
        raise typer.Exit(1)


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


def _identity(
    llm: LLM,
    prompts: list[list[int]],
    params: SamplingParams,
    temperatures: list[float],
    hostile: bool,
    target: int | None,
    report: dict[str, Any],
) -> bool:
    from outrider.bench.adversaries import adversaries
    from outrider.bench.audit import audit as run

    drafters = [name for name in llm.engine.drafters if name != "none"]
    drafters += list(adversaries(1, (), {})) if hostile else []
    spoken = 0.0

    def tell(found: Audit) -> None:
        nonlocal spoken
        if found.seconds - spoken > 10:
            spoken = found.seconds
            note(f"{found.compared} tokens compared, {found.differing} differ, {found.seconds:.0f} s")

    found = run(llm, prompts, drafters, temperatures, params, target, tell)
    report["identity"] = found.as_json()
    for d in found.divergences[:5]:
        note(
            f"prompt {d.prompt} at T={d.temperature:g}: {d.drafter} differs at position {d.position}: "
            f"{d.guessed} for {d.plain}, margin {d.margin:.2e}"
        )
    verdict = "identical" if not found.differing else f"{found.differing} DIFFER"
    note(f"{found.compared} tokens compared: {verdict}")
    return found.compared > 0 and found.differing == 0


def _distribution(
    llm: LLM,
    prompts: list[list[int]],
    params: SamplingParams,
    temperatures: list[float],
    report: dict[str, Any],
) -> bool:
    from outrider.bench.audit import same_distribution

    report["distribution"] = []
    for temperature in filter(None, temperatures):
        for number, prompt in enumerate(prompts[:3]):
            one = replace(params, temperature=temperature)
            found = same_distribution(llm, prompt, one, llm.drafter, draws=2048)
            report["distribution"].append({"prompt": number, "temperature": temperature, **found})
            note(f"prompt {number} at T={temperature:g}: p = {found['p_value']:.3g}")
    return bool(report["distribution"]) and all(one["holds"] for one in report["distribution"])
