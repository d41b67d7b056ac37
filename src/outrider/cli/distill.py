"""`outrider distill`: make a draft for a target of the target's own answers, and score it as it will serve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.flag import Flag, flags_of, help_of, option
from outrider.cli.measure import HtmlFile, say_loading, writable, write_page
from outrider.cli.options import DEFAULT_MODEL, ENGINE, Flags, Model, takes
from outrider.cli.output import note
from outrider.distill.recipe import STAGES, Recipe, read_count
from outrider.errors import InvalidRequest
from outrider.load.cards import FILE, read_card
from outrider.load.find import find
from outrider.settings import Settings, cache_folder


def read_numbers(kind: type) -> Callable[[str], tuple[Any, ...]]:
    """`0,0.7,1` -> `(0.0, 0.7, 1.0)`."""

    def read(text: str) -> tuple[Any, ...]:
        try:
            return () if text == "auto" else tuple(kind(part) for part in text.split(","))
        except ValueError:
            example = "2,14,27" if kind is int else "0,0.7,1"
            raise ValueError(f"{text!r} is not a list of numbers such as {example}") from None

    return read


def read_shares(pairs: Sequence[str]) -> dict[str, float]:
    """`["code=0.3"]` -> `{"code": 0.3}`."""
    shares = {}
    for pair in pairs:
        task, _, share = pair.rpartition("=")
        try:
            shares[task] = float(share)
        except ValueError:
            task = ""
        if not task:
            raise ValueError(f"{pair!r} is not TASK=SHARE, such as code=0.3")
    return shares


@dataclass(frozen=True, slots=True)
class RecipeFlags(Flags):
    """Flags of one stage: several make one recipe."""

    def build(self, typed: dict[str, Any]) -> Any:
        values = {flag.name: typed.pop(flag.name) for flag in self.flags}
        return {flag.name: flag.value(values[flag.name]) for flag in self.flags}


_FLAGS = flags_of(
    Recipe,
    *(
        Flag(name, str, help_of(Recipe, name), read, metavar, default=default)
        for name, read, metavar, default in (
            ("temperatures", read_numbers(float), "T,T,...", "0,0.7,1"),
            ("score_temperatures", read_numbers(float), "T,T,...", "0,0.7"),
            ("taps", read_numbers(int), "auto|I,I,...", "auto"),
            ("answer_tokens", read_count, "N", "20M"),
            ("batch_tokens", read_count, "N", "16384"),
            ("train_tokens", read_count, "N", "0"),
        )
    ),
    Flag(
        "shares",
        list[str],
        "Share of conversations of a task, made-up included; the others as they come. Repeatable.",
        read_shares,
        "TASK=SHARE",
        ("--share",),
    ),
    without=("target",),
)
_STAGE_OF = {one.name: one.metadata["stage"] for one in fields(Recipe)}


def _stage_flags(stage: str, panel: str) -> RecipeFlags:
    flags = tuple(flag for flag in _FLAGS if _STAGE_OF[flag.name] == stage)
    return RecipeFlags(stage, panel, Recipe, flags)  # type: ignore[arg-type]


ANSWER, TRAIN, SCORE = map(_stage_flags, STAGES, ("Answers", "Training", "Score"))

# What does not fit training, or is the recipe's here, is left out.
_PLACE = {
    *("device", "weights", "threads", "cache_bytes"),
    *("gpu_memory_utilization", "max_sequences", "step_rows", "kernels"),
}
PLACE = replace(ENGINE, flags=tuple(flag for flag in ENGINE.flags if flag.name in _PLACE))

Out = Annotated[
    str, option("out", "Where everything is kept. The same command resumes where it ended.", "DIR")
]
Stage = Annotated[
    str | None, option("stage", "Only this stage; by default all that are not complete.", "|".join(STAGES))
]
Processes = Annotated[
    int,
    option(
        "processes",
        "Processes that answer at once, each with its own target. The answers are the same.",
        "N",
        min=1,
    ),
]


@takes(ANSWER, TRAIN, SCORE, PLACE)
def distill(
    model: Model = DEFAULT_MODEL,
    *,
    out: Out,
    stage: Stage = None,
    processes: Processes = 1,
    html_file: HtmlFile = None,
    answer: dict[str, Any],
    train: dict[str, Any],
    score: dict[str, Any],
    settings: Settings,
) -> None:
    """Make a draft for a model: the model answers, the draft learns from that, and is scored as it will serve.

    outrider distill smollm2-135m --prompts prompts.jsonl --made-up 10000 --out drafts/smollm2
    """
    if stage is not None and stage not in STAGES:
        raise typer.BadParameter(f"{stage!r} is not {', '.join(STAGES)}", param_hint="--stage")
    if html_file is not None and stage not in (None, STAGES[-1]):
        raise InvalidRequest(f"--html shows the score of a draft; leave out --stage {stage}", "html")
    recipe = Recipe.of({"target": model, **answer, **train, **score})
    page_file = writable(html_file)
    find(model, cache_folder())  # an unknown name fails before torch loads
    say_loading(model)
    from outrider.distill.folder import Folder
    from outrider.distill.report import default_report
    from outrider.distill.run import distill as run

    folder = Path(out).expanduser()
    try:
        stages = STAGES if stage is None else (stage,)
        draft = run(recipe, folder, settings, default_report(), stages, processes)
    except KeyboardInterrupt:
        kept = Folder(folder).kept()
        note(
            f"stopped. Kept in {folder}: {kept}. The same command goes on from there"
            if kept
            else "stopped. Nothing is finished yet: the same command begins again"
        )
        raise
    if page_file is not None and not (draft / FILE).exists():
        raise InvalidRequest(
            "--html shows the score of a draft, which there is once all stages are complete", "html"
        )
    if (draft / FILE).exists():
        from outrider.bench.report_pages import score_page

        write_page(page_file, lambda: score_page(read_card(draft)))
        note(f"try it: outrider bench {model} --draft {draft}")
        note(f"have it taken by itself: outrider pairs add {draft} --name {folder.resolve().name}")
