"""`outrider draft`: which draft a running server drafts with; another one in its place; the one before again."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from outrider.cli.flag import option
from outrider.cli.output import note, write
from outrider.errors import InvalidRequest, OutriderError
from outrider.load.cards import card_from_json

draft = typer.Typer(help="See and swap the draft of a running server.", no_args_is_help=True)

TIMEOUT = 600.0  # seconds; weights are read and packed meanwhile

Url = Annotated[str, option("url", "Where the server is.", "URL")]
ApiKey = Annotated[
    str | None,
    option(
        "api_key", "An admin key, if the server has keys. Others may see flags: prefer its variable.", "KEY"
    ),
]
Json = Annotated[bool, option("json", "The server's answer as it is.")]
HERE = "http://127.0.0.1:8000"


@draft.command()
def show(url: Url = HERE, api_key: ApiKey = None, as_json: Json = False) -> None:
    """Tell which draft is in use, since when, how often it is accepted, and what its card says.

    outrider draft show
    """
    _tell(_ask(url, "/v1/draft", api_key), as_json)


@draft.command()
def swap(
    path: Annotated[str, typer.Argument(help="A folder beneath one of the server's --draft-folder.")],
    url: Url = HERE,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Draft with other weights of the same shape from the next step on. Requests go on, and no token changes.

    outrider draft swap candidate
    """
    _tell(_ask(url, "/v1/draft/swap", api_key, {"path": path}), as_json)


@draft.command()
def rollback(url: Url = HERE, api_key: ApiKey = None, as_json: Json = False) -> None:
    """Draft with the weights before the last swap again.

    outrider draft rollback
    """
    _tell(_ask(url, "/v1/draft/rollback", api_key, {}), as_json)


@draft.command()
def promote(
    candidate: Annotated[str, typer.Argument(help="A folder beneath one of the server's --draft-folder.")],
    target: Annotated[str, option("model", "The model served.", "MODEL", "--target")],
    traffic: Annotated[
        str, option("keep_traffic", "What the server kept, as its --keep-traffic has it.", "DIR", "--traffic")
    ],
    limit: Annotated[int, option("limit", "Most conversations.", min=4)] = 64,
    url: Url = HERE,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Score a candidate against the draft in use on held-out traffic, with an engine here; swap only if it is better.

    outrider draft promote drafts/candidate --target smollm2-135m --traffic traffic
    """
    from outrider.distill.shadow import compare, traffic_folders  # brings torch
    from outrider.draft.table import is_eagle

    path = Path(candidate).expanduser().resolve()
    kind = "eagle" if is_eagle(path) else "lm"
    running = [one for one in _ask(url, "/v1/draft", api_key)["data"] if one["drafter"] == kind]
    if not running:
        raise InvalidRequest(
            f"{candidate} is a draft of kind {kind}, and the server drafts with none", "candidate"
        )
    folders = traffic_folders(Path(traffic).expanduser())
    found = compare(target, Path(running[0]["path"]), path, folders, limit)
    note(str(found))
    if not found.better:
        note("that is not better by more than its uncertainty: the draft in use stays")
        raise typer.Exit(1)
    _tell(_ask(url, "/v1/draft/swap", api_key, {"path": str(path)}), as_json)


def _ask(url: str, route: str, key: str | None, body: dict[str, Any] | None = None) -> dict[str, Any]:
    import urllib.error  # with what they import, a tenth of a second that no other command should spend
    import urllib.request

    if not url.startswith(("http://", "https://")):
        raise InvalidRequest(f"--url {url!r} does not begin with http:// or https://", "url")
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url.rstrip("/").removesuffix("/v1") + route, data, headers)
    try:
        with urllib.request.urlopen(asked, timeout=TIMEOUT) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as refused:
        raise OutriderError(f"the server at {url} refused: {_reason(refused, refused.code)}") from None
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "reason", problem)
        raise OutriderError(f"no server of Outrider answers at {url}: {reason}") from None


def _reason(refused: IO[bytes], status: int) -> str:
    try:
        return str(json.load(refused)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {status}"


def _rate(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def _tell(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        write(json.dumps(answer) + "\n")
        return
    if not answer["data"]:
        write("no draft with weights of its own is in use\n")
    for one in answer["data"]:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one["since"]))
        write(f"{one['drafter']}\t{one['path']}\tsince {since}\n")
        score = card_from_json(one["card"]).score if one["card"] else None
        promised = (score.first_accept_rate, score.target_probability) if score else (None, None)
        for name, card in zip(("acceptance", "target_probability"), promised, strict=True):
            write(f"\t{name.replace('_', ' ')}: {_rate(one[name])} lately, {_rate(card)} by its card\n")
        if one["previous"]:
            write(f"\tbefore it: {one['previous']}\n")
