"""One round for the draft of a running server: train it further on kept traffic, score it, compare it with the one in
use. Whether the server then swaps is the caller's decision.

Everything is under one folder, and the same command resumes where the last run ended:

    traffic/     a copy of the kept shards, as the server goes on writing; deleted once the draft is scored
    draft/ ...   as `outrider distill --continue` leaves it
    gate.json    the comparison, and which draft it was made against
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from outrider.distill.folder import Folder, read_json, write_json
from outrider.distill.recipe import Recipe
from outrider.distill.report import Report
from outrider.distill.run import distill, summarised
from outrider.distill.shadow import Comparison, compare, held_conversations, traffic_folders
from outrider.load.token_shards import read_shards, shard_paths
from outrider.settings import Settings


def plan_round(folder: Folder, traffic: Path, limit: int) -> dict[str, Any]:
    """What the round has to learn from and which stages are complete. Writes nothing; raises if the traffic held out
    is too little to compare with.
    """
    folders = traffic_folders(traffic)
    held = held_conversations(folders, limit)
    known = summarised(row for each in folders for row in read_shards(each))
    done = {"train": folder.train, "score": folder.card, "gate": folder.gate}
    return {
        "conversations": known["conversations"],
        "answered_tokens": known["answered"],
        "compared": len(held),
        "complete": [stage for stage, file in done.items() if file.exists()],
    }


def train_candidate(
    recipe: Recipe, folder: Folder, traffic: Path, settings: Settings, report: Report
) -> Path:
    """Train and score a candidate on a copy of the traffic. A round that was begun goes on from its own draft: the one
    in use may have changed since.
    """
    copy = folder.path / "traffic"
    if folder.recipe.exists():
        recipe = replace(recipe, continue_from=read_json(folder.recipe)["recipe"]["continue_from"])
    if not (folder.card.exists() or copy.exists()):
        _copy_shards(traffic_folders(traffic), copy)
    draft = distill(replace(recipe, shards=(str(copy),)), folder.path, settings, report, ("train", "score"))
    shutil.rmtree(copy, ignore_errors=True)
    return draft.resolve()


def gate(
    target: str, running: Path, folder: Folder, traffic: Path, limit: int, settings: Settings
) -> Comparison:
    """The candidate against the draft in use on held-out traffic; read from the folder if it was made before."""
    made_for = {"running": str(running), "limit": limit}
    if folder.gate.exists() and (kept := read_json(folder.gate))["made_for"] == made_for:
        return Comparison(**kept["comparison"])
    found = compare(target, running, folder.draft, traffic_folders(traffic), limit, settings=settings)
    write_json(folder.gate, {"made_for": made_for, "comparison": asdict(found)})
    return found


def _copy_shards(folders: list[Path], into: Path) -> None:
    """All or nothing, for the owner alone, as the server keeps them."""
    part = into.with_name(f"{into.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(mode=0o700, parents=True)
    for folder in folders:
        (own := part / folder.name).mkdir(mode=0o700)
        for path in shard_paths(folder).values():
            with contextlib.suppress(FileNotFoundError):  # the server deletes the oldest
                shutil.copyfile(path, own / path.name)
    part.rename(into)
