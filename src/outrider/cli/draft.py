"""`outrider draft`: shows, swaps, rolls back and improves the draft of a running server."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.command import Command
from outrider.cli.distill import ANSWER, PLACE, SCORE, TRAIN
from outrider.cli.flag import option
from outrider.cli.options import takes
from outrider.cli.output import note, write
from outrider.distill.recipe import Recipe
from outrider.errors import InvalidRequest, OutriderError
from outrider.load.cards import card_from_json
from outrider.settings import Settings

if TYPE_CHECKING:
    from outrider.distill.shadow import Comparison

draft = typer.Typer(help="See, swap and improve the draft of a running server.", no_args_is_help=True)

TIMEOUT = 600.0  # seconds; weights are read and packed meanwhile

Url = Annotated[str, option("url", "Where the server is.", "URL")]
ApiKey = Annotated[
    str | None,
    option(
        "api_key", "An admin key, if the server has keys. Others may see flags: prefer its variable.", "KEY"
    ),
]
Json = Annotated[
    bool,
    option("json", "The server's answer as it is."),
]
DraftOf = Annotated[
    str | None,
    option("draft_of", "Whose draft; by default that of the server's first model.", "NAME", "--model"),
]
Target = Annotated[str, option("model", "The model served.", "MODEL", "--target")]
Traffic = Annotated[
    str, option("keep_traffic", "What the server kept, as its --keep-traffic has it.", "DIR", "--traffic")
]
Limit = Annotated[int, option("limit", "Most conversations to compare on.", min=4)]
HERE = "http://127.0.0.1:8000"
# Of a distillation, what a round may choose: the draft's shape is that of the one in use.
_ROUND = {
    *(
        "context",
        "seed",
        "loss",
        "unroll",
        "learning_rate",
        "batch_tokens",
        "train_tokens",
        "checkpoint_steps",
    ),
    *("dtype", "score_limit", "score_tokens"),
}
ROUND = replace(
    TRAIN,
    argument="how",
    flags=tuple(flag for group in (ANSWER, TRAIN, SCORE) for flag in group.flags if flag.name in _ROUND),
)


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
    model: DraftOf = None,
) -> None:
    """Draft with other weights of the same shape from the next step on. Requests go on, and no token changes.

    outrider draft swap candidate
    """
    _tell(_ask(url, "/v1/draft/swap", api_key, {"path": path, **_named(model)}), as_json)


@draft.command()
def rollback(url: Url = HERE, api_key: ApiKey = None, as_json: Json = False, model: DraftOf = None) -> None:
    """Draft with the weights before the last swap again.

    outrider draft rollback
    """
    _tell(_ask(url, "/v1/draft/rollback", api_key, _named(model)), as_json)


def _named(model: str | None) -> dict[str, Any]:
    return {} if model is None else {"model": model}


@draft.command()
def promote(
    candidate: Annotated[str, typer.Argument(help="A folder beneath one of the server's --draft-folder.")],
    target: Target,
    traffic: Traffic,
    limit: Limit = 64,
    url: Url = HERE,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Score a candidate against the draft in use on held-out traffic, with an engine here; swap only if it is better.

    outrider draft promote drafts/candidate --target smollm2-135m --traffic traffic
    """
    from outrider.distill.shadow import compare, traffic_folders  # brings torch
    from outrider.load.heads import is_eagle

    path = Path(candidate).expanduser().resolve()
    kind = "eagle" if is_eagle(path) else "lm"
    running = _in_use(url, api_key, kind)
    folders = traffic_folders(Path(traffic).expanduser())
    found = compare(target, Path(running["path"]), path, folders, limit)
    _tell(_swap_if_better(found, path, url, api_key), as_json)


@takes(ROUND, PLACE)
def improve(
    target: Target,
    traffic: Traffic,
    out: Annotated[
        str,
        option("out", "Folder of this round, beneath one of the server's --draft-folder.", "DIR"),
    ],
    limit: Limit = 64,
    dry_run: Annotated[bool, option("dry_run", "Say what would be done, and do none of it.")] = False,
    url: Url = HERE,
    api_key: ApiKey = None,
    as_json: Json = False,
    *,
    how: dict[str, Any],
    settings: Settings,
) -> None:
    """Train the draft in use further on kept traffic, score it, and swap it in if it is better on what was held out.

    The same command resumes an interrupted round. Exit status 1 if the draft in use stays.

    outrider draft improve --target smollm2-135m --traffic traffic --out drafts/round-1
    """
    running = _in_use(url, api_key)
    from outrider.distill.folder import Folder
    from outrider.distill.improve import gate, plan_round, train_candidate
    from outrider.distill.report import default_report

    folder, kept = Folder(Path(out).expanduser().resolve()), Path(traffic).expanduser()
    in_use = Path(running["path"])
    if in_use == folder.draft:
        note(f"{folder.draft} is in use already: the round is over")
        _tell(_ask(url, "/v1/draft", api_key), as_json)
        return
    recipe = Recipe.of(
        {
            "target": target,
            "kind": running["drafter"],
            "continue_from": str(in_use),
            "shards": (str(kept),),
            **how,
        }
    )
    planned = plan_round(folder, kept, limit)
    note(f"draft in use: {running['drafter']}, {in_use}")
    note(
        f"kept traffic: {planned['conversations']} conversations, {planned['answered_tokens']} tokens of answers; "
        f"{planned['compared']} held-out conversations to compare with"
    )
    if dry_run:
        note(f"complete in {folder.path}: {', '.join(planned['complete']) or 'nothing'}")
        note("next: train, score, compare, and swap only if better; nothing was written (--dry-run)")
        if as_json:
            write(json.dumps({"running": str(in_use), **planned}) + "\n")
        return
    candidate = train_candidate(recipe, folder, kept, settings, default_report())
    found = gate(target, in_use, folder, kept, limit, settings)
    _tell(_swap_if_better(found, candidate, url, api_key), as_json)


draft.command(cls=Command)(improve)


def _in_use(url: str, api_key: str | None, kind: str = "") -> dict[str, Any]:
    """The draft in use, of this kind; without one, the only draft there is."""
    drafts = _ask(url, "/v1/draft", api_key)["data"]
    found = [one for one in drafts if kind in ("", one["drafter"])]
    if len(found) != 1:
        kinds = " and ".join(one["drafter"] for one in drafts) or "none that has weights of its own"
        raise InvalidRequest(
            f"this needs one draft {kind or 'to improve'}, and the server has {kinds}", "url"
        )
    return dict(found[0])


def _swap_if_better(found: Comparison, candidate: Path, url: str, api_key: str | None) -> dict[str, Any]:
    note(str(found))
    if not found.better:
        note("that is not better by more than its uncertainty: the draft in use stays")
        raise typer.Exit(1)
    return _ask(url, "/v1/draft/swap", api_key, {"path": str(candidate)})


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
