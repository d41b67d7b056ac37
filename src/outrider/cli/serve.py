"""`outrider serve`: models behind an OpenAI-compatible HTTP server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer

from outrider.cli.options import DEFAULT_MODEL, ENGINE, SAMPLING, SERVE, Draft, GenerationConfig, takes
from outrider.cli.output import needing
from outrider.draft.names import check_parts, parse_draft
from outrider.serve.model_spec import ModelSpec, read_model
from outrider.serve.settings import ServeSettings
from outrider.settings import Settings, cache_folder
from outrider.types import SamplingParams

Models = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        help="A folder, a .gguf file, an alias, or a hub id such as org/name; NAME=MODEL names it. Repeatable; "
        f"{DEFAULT_MODEL} by default.",
    ),
]


@takes(SERVE, SAMPLING.without("max_tokens"), ENGINE)
def serve(
    model: Models = None,
    draft: Draft = "auto",
    generation_config: GenerationConfig = "auto",
    *,
    params: SamplingParams,
    given: frozenset[str],
    settings: Settings,
    serve: ServeSettings,
    rows: Mapping[str, Mapping[str, Any]],
) -> None:
    """Answer OpenAI clients over HTTP. Sampling flags are the defaults of requests that leave them open.

    outrider serve smollm2-135m --port 8000
    """
    shared = ModelSpec("", "", draft, params, settings, serve, given)
    raise typer.Exit(serve_table(model_table(model, shared, rows), serve))


def model_table(
    models: Sequence[str] | None, shared: ModelSpec, rows: Mapping[str, Mapping[str, Any]]
) -> list[ModelSpec]:
    """The models that were named, else all of the config file. One that the file names has the settings it says."""
    table = []
    for text in models or rows or (DEFAULT_MODEL,):
        if (row := rows.get(text)) is not None:
            own = {name: row[name] for name in ("draft", "params", "settings", "serve", "given")}
            table.append(ModelSpec(text, row["model"], **own))
        else:
            name, source = read_model(text)
            table.append(replace(shared, name=name, source=source))
    return table


def serve_table(table: Sequence[ModelSpec], serve: ServeSettings) -> int:
    """Serves until asked to stop. Returns the exit code."""
    for spec in table:
        check_parts(parse_draft(spec.draft), cache_folder())
    with needing("serve", "a server"):
        from outrider.serve.server import run_server
    return run_server(table, serve)
