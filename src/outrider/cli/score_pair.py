"""`outrider pairs score`: how often a draft is accepted and what that brings, by the engine that serves it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.card_words import score_table
from outrider.cli.flag import option
from outrider.cli.generate import Prompts
from outrider.cli.measure import Report, warn_if_busy
from outrider.cli.options import ENGINE, takes
from outrider.cli.output import note, open_llm, write
from outrider.cli.tasks import task_ids, task_rows
from outrider.errors import InvalidRequest
from outrider.load.cards import FILE, Card, read_card, tokens_trained, write_card
from outrider.load.find import find
from outrider.load.json_files import read_json
from outrider.load.pairs import HOW_IT_WAS_MADE, fingerprint
from outrider.settings import Settings, cache_folder

if TYPE_CHECKING:
    from outrider.load.checkpoint import Checkpoint

BUILT_IN = "chat,code,maths,rewrite"  # tasks, where no prompts are given

Target = Annotated[str, typer.Argument(metavar="TARGET", help="The model that is drafted for.")]
ScoredDraft = Annotated[str, typer.Argument(metavar="DRAFT", help="An EAGLE head or a smaller model.")]
Each = Annotated[int, option("each", "Prompts of a task, at most.", min=1)]
Temperatures = Annotated[str, option("temperatures", "Temperatures, in turn.", "T,T,...")]
Depth = Annotated[int, option("depth", "Draft tokens of a chain.", min=1)]
TreeNodes = Annotated[int, option("tree_nodes", "Nodes of a tree, at most.", min=1)]
MaxTokens = Annotated[int, option("max_tokens", "Longest answer, in tokens.", min=2)]
Timed = Annotated[int, option("timed", "Prompts of a task to time, one by one; 0: no speed-up.", min=0)]
Seed = Annotated[int, option("seed", "Of the first prompt; the next has the next.")]
Out = Annotated[
    str | None, option("out", f"Where to write {FILE}; by default beside the draft's weights.", "DIR")
]
Licence = Annotated[str | None, option("licence", "Of the draft's weights, for the card.", "TEXT")]
JsonFile = Annotated[str | None, option("json", "Write the card as JSON here as well; - is stdout.", "FILE")]


@takes(ENGINE)
def score(
    target: Target,
    draft: ScoredDraft,
    prompts: Prompts = None,
    each: Each = 16,
    temperatures: Temperatures = "0,0.7",
    depth: Depth = 5,
    tree_nodes: TreeNodes = 24,
    max_tokens: MaxTokens = 128,
    timed: Timed = 2,
    seed: Seed = 0,
    out: Out = None,
    licence: Licence = None,
    json_file: JsonFile = None,
    *,
    settings: Settings,
) -> None:
    """Score a draft on prompts, by task and temperature, and write its card. Exit status 1 if a token differs.

    outrider pairs score smollm2-135m my-head --prompts mine.jsonl --max-tokens 64
    """
    chosen = _temperatures(temperatures)
    report = Report("pairs score", json_file)
    folder = find(draft, cache_folder())
    place = _place(out, draft, folder)
    warn_if_busy()
    with open_llm(target, str(folder), settings) as llm:
        from outrider.distill.report import default_report
        from outrider.distill.score import ScoreOptions, make_card, score_open

        before, training = _card_before(folder, llm.checkpoint), _training(folder)
        given = task_rows(prompts, None, None if prompts else BUILT_IN)
        rows = {task: some[:each] for task, some in given.items()}
        asked = task_ids(llm, rows, max_tokens, room=0)  # what is too long is left out
        options = ScoreOptions(chosen, depth, tree_nodes, max_tokens, timed, seed)
        found = score_open(llm, asked, options, default_report())
        card = make_card(llm.checkpoint, _name(target), folder, found, **training)
    if before is not None:
        said = {name: getattr(before, name) for name in ("licence", "trained_tokens", "recipe")}
        kept = {name: value for name, value in said.items() if value is not None}
        card = replace(card, target=replace(card.target, name=before.target.name), **kept)
    card = replace(card, licence=licence or card.licence)
    for line in score_table(found):
        write(line + "\n") if json_file != "-" else note(line)
    if place is None:
        note(f"no card was written: {folder} is no folder of yours; --out DIR says where")
    else:
        place.mkdir(parents=True, exist_ok=True)
        note(f"written to {write_card(place, card)}; outrider pairs add {place} makes it the default")
    report["card"] = card.as_json()
    report.deliver()
    if any(one.differing for one in found.tasks):
        raise typer.Exit(1)


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not T,T,... such as 0,0.7", param_hint="--temperatures"
        ) from None


def _place(out: str | None, draft: str, folder: Path) -> Path | None:
    """Where the card goes: beside weights that were given by their folder, not into the hub's cache."""
    if out is not None:
        return Path(out).expanduser()
    given = Path(draft).expanduser()
    return folder if given.is_dir() else None


def _card_before(folder: Path, target: Checkpoint) -> Card | None:
    """What is known of the draft already; one made for another target has no business here."""
    if not (folder / FILE).exists():
        return None
    card = read_card(folder)
    if card.target.fingerprint != fingerprint(target):
        raise InvalidRequest(
            f"{folder / FILE} says that this draft was made for {card.target.name}, another model than "
            f"{target.path.name}; move the card away to score it all the same",
            "draft",
        )
    return card


def _training(folder: Path) -> dict[str, Any]:
    """What a card says of the training, where `distill` left how the draft was made beside it."""
    made = read_json(folder / HOW_IT_WAS_MADE, optional=True) if folder.is_dir() else {}
    recipe = json.dumps(made["recipe"], indent=2) + "\n" if "recipe" in made else None  # Recipe.text
    digest = None if recipe is None else hashlib.sha256(recipe.encode()).hexdigest()
    return {"trained_tokens": tokens_trained(made), "recipe": digest}


def _name(target: str) -> str:
    """As users give it; a path only by its last part."""
    return Path(target).name if Path(target).expanduser().exists() else target
