"""`outrider serve`: the model behind an OpenAI-compatible HTTP server."""

from __future__ import annotations

import typer

from outrider.cli.options import DEFAULT_MODEL, ENGINE, SAMPLING, SERVE, Draft, GenerationConfig, Model, takes
from outrider.draft.names import check_parts, parse_draft
from outrider.errors import OutriderError, install
from outrider.serve.settings import ServeSettings
from outrider.settings import Settings, cache_folder
from outrider.types import SamplingParams


@takes(SERVE, SAMPLING.without("max_tokens"), ENGINE)
def serve(
    model: Model = DEFAULT_MODEL,
    draft: Draft = "auto",
    generation_config: GenerationConfig = "auto",
    *,
    params: SamplingParams,
    given: frozenset[str],
    settings: Settings,
    serve: ServeSettings,
) -> None:
    """Answer OpenAI clients over HTTP. Sampling flags are the defaults of requests that leave them open.

    outrider serve smollm2-135m --port 8000
    """
    raise typer.Exit(serve_model(model, draft, params, settings, serve, given))


def serve_model(
    model: str,
    draft: str,
    params: SamplingParams,
    settings: Settings,
    serve: ServeSettings,
    given: frozenset[str] = frozenset(),
) -> int:
    """Serves until asked to stop. Returns the exit code."""
    check_parts(parse_draft(draft), cache_folder())
    try:
        from outrider.serve.server import run_server  # brings packages that only a server needs
    except ModuleNotFoundError as missing:
        if (missing.name or "").split(".")[0] == "outrider":
            raise
        raise OutriderError(
            f"a server needs {missing.name}, which is not installed; {install('serve')}"
        ) from None
    return run_server(model, draft, params, settings, serve, given)
