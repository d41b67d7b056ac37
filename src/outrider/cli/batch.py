"""`outrider batch`: a file of requests, answered without a server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.flag import option
from outrider.cli.options import DEFAULT_MODEL, ENGINE, Draft, takes
from outrider.cli.output import needing, note
from outrider.draft.names import check_parts, parse_draft
from outrider.settings import Settings, cache_folder

File = Annotated[
    Path, typer.Argument(metavar="FILE", help="Requests, a line each, as OpenAI's batches have them.")
]
Out = Annotated[
    Path | None, option("out", "Where the answers go; by default FILE.answers.jsonl.", "FILE", "--out", "-o")
]
Model = Annotated[
    str, option("model", "A folder, a .gguf file, an alias, or a hub id such as org/name.", "MODEL")
]


@takes(ENGINE)
def batch(
    file: File,
    out: Out = None,
    model: Model = DEFAULT_MODEL,
    draft: Draft = "auto",
    *,
    settings: Settings,
) -> None:
    """Answer a file of requests without a server. A second run goes on where the first was stopped.

    outrider batch requests.jsonl --model smollm2-135m
    """
    check_parts(parse_draft(draft), cache_folder())
    with needing("serve", "outrider batch"):
        from outrider.serve.batch_alone import run_batch
    out = file.with_name(f"{file.stem}.answers.jsonl") if out is None else out
    shown = _shown if sys.stderr.isatty() else lambda counts: None
    counts = run_batch(file, out, model, draft, settings, shown)
    note(f"{counts['completed']} answered, {counts['failed']} refused: {out}")


def _shown(counts: dict[str, int]) -> None:
    done = counts["completed"] + counts["failed"]
    print(f"\r{done} of {counts['total']} ", end="", file=sys.stderr, flush=True)
