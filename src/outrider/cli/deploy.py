"""`outrider deploy`: replicas of the models of a config file on Ray Serve, behind one address."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from typer.main import get_command

from outrider.cli.config import Config
from outrider.cli.options import DEPLOY, ENGINE, SAMPLING, SERVE, Draft, GenerationConfig, load_config, takes
from outrider.cli.output import needing, note
from outrider.cli.serve import model_table
from outrider.draft.names import check_parts, parse_draft
from outrider.errors import InvalidRequest, ModelNotFound
from outrider.serve.deploy_settings import DeployPlan, DeploySettings
from outrider.serve.model_spec import ModelSpec, check_table
from outrider.serve.settings import ServeSettings
from outrider.settings import Settings, cache_folder
from outrider.types import SamplingParams

File = Annotated[
    str,
    typer.Argument(
        metavar="FILE",
        is_eager=True,
        callback=load_config,
        help="The config file with the table of models, as outrider serve --config takes it.",
    ),
]


@takes(DEPLOY, SERVE, SAMPLING.without("max_tokens"), ENGINE)
def plan(
    config: File,  # the callback makes a Config of it
    draft: Draft = "auto",
    generation_config: GenerationConfig = "auto",
    *,
    params: SamplingParams,
    given: frozenset[str],
    settings: Settings,
    serve: ServeSettings,
    deploy: DeploySettings,
    rows: Mapping[str, Mapping[str, Any]],
) -> DeployPlan:
    """Run replicas of the models of a config file on Ray Serve, behind one OpenAI-compatible address.

    outrider deploy deploy/ray/models.toml
    """
    shared = ModelSpec("", "", draft, params, settings, serve, given)
    named = cast(Config, config).values.get("model")
    table = model_table(named and [named], shared, rows)
    check_table(table)
    for spec in table:
        check_parts(parse_draft(spec.draft), cache_folder())
        if spec.source.startswith((".", "/", "~")) and not Path(spec.source).expanduser().exists():
            raise ModelNotFound(
                f"{spec.name}: there is no file or folder {spec.source!r}, which every machine needs"
            )
    return DeployPlan(tuple((spec, rows[spec.name]["deploy"] if rows else deploy) for spec in table), serve)


@functools.wraps(plan)
def deploy(**typed: Any) -> None:
    made = plan(**typed)
    ray_app = _ray_app()
    from outrider.serve.server import bind  # brings packages that only a server needs

    with bind(made.serve):
        pass  # a taken port is known before Ray is started
    stopping = threading.Event()
    try:
        ray_app.run_application(ray_app.application(made), made.serve)
        for number in (signal.SIGINT, signal.SIGTERM):  # after Ray was started, which handles them itself
            signal.signal(number, lambda *_: stopping.set())
        names = ", ".join(spec.names[0] for spec in made.table)
        note(f"ready     http://{made.serve.host}:{made.serve.port}/v1 with {names}; Ctrl-C stops it")
        stopping.wait()
    finally:
        ray_app.stop()


def app(args: Mapping[str, str]) -> Any:
    """The application for `serve run outrider.cli.deploy:app file=models.toml`, and for Ray's own config files."""
    if set(args) != {"file"}:
        raise InvalidRequest(f"one argument is needed, file=FILE, not {sorted(args)}", "file")
    alone = typer.Typer(add_completion=False)
    alone.command()(plan)
    return _ray_app().application(get_command(alone).main([args["file"]], standalone_mode=False))


def _ray_app() -> Any:
    with needing("ray", "outrider deploy"):
        from outrider.serve import ray_app
    return ray_app
