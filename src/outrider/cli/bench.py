"""`outrider bench`: what plain decoding and guessing do on this machine, on the user's prompts or built-in
ones.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.generate import Json, Limit, Prompts
from outrider.cli.options import DEFAULT_MODEL, ENGINE, SAMPLING, Draft, Model, envvar, takes
from outrider.cli.output import note, open_llm, write
from outrider.cli.prompts import read_rows
from outrider.settings import Settings
from outrider.types import SamplingParams

if TYPE_CHECKING:
    from outrider.engine.llm import LLM

Peer = Annotated[
    str | None,
    typer.Option(
        "--peer",
        envvar=envvar("peer"),
        show_envvar=False,
        metavar="transformers",
        help="Run this engine on the same prompts in turn with ours.",
    ),
]
What = Annotated[
    str,
    typer.Option(
        "--what",
        envvar=envvar("what"),
        show_envvar=False,
        metavar="all|plain|speculation",
        help="What to measure.",
    ),
]
Together = Annotated[
    int,
    typer.Option("--together", min=2, envvar=envvar("together"), show_envvar=False, help="Requests at once."),
]


@takes(SAMPLING, ENGINE)
def bench(
    model: Model = DEFAULT_MODEL,
    draft: Draft = "auto",
    prompts: Prompts = None,
    limit: Limit = None,
    peer: Peer = None,
    what: What = "all",
    together: Together = 8,
    as_json: Json = False,
    *,
    params: SamplingParams,
    settings: Settings,
) -> None:
    """Measure speed here: plain decoding, rows, requests at once, and what guessing buys.

    outrider bench smollm2-135m --temperature 0 --max-tokens 128 --peer transformers
    """
    if what not in ("all", "plain", "speculation"):
        raise typer.BadParameter("one of all, plain, speculation", param_hint="--what")
    if peer not in (None, "transformers"):
        raise typer.BadParameter(f"unknown engine {peer!r}; known: transformers", param_hint="--peer")
    with open_llm(model, draft, settings) as llm:
        from outrider.bench.certificate import certificate  # torch is loaded by now

        tasks = tasks_of(llm, prompts, limit)
        report: dict[str, Any] = {"certificate": certificate()}
        if what != "speculation":
            report["plain"] = _plain(
                llm, [p for task in tasks.values() for p in task], params, peer, together
            )
        if what != "plain":
            from outrider.bench.speculation import compare

            report["speculation"] = compare(llm, tasks, params, note)
    write(json.dumps(report, indent=None if as_json else 2) + "\n")


def tasks_of(llm: LLM, prompts: str | None, limit: int | None) -> dict[str, list[list[int]]]:
    """Prompts as token ids by task, first turns only; built-in ones if there is no file."""
    from outrider.bench.prompts import KINDS

    if prompts is None:
        rows = [(task, text) for task, texts in KINDS.items() for text in texts]
    else:
        rows = [_first_turn(value) for _, value in read_rows(prompts, sys.stdin, limit)]
    tasks: dict[str, list[list[int]]] = {}
    for task, text in rows[:limit]:
        chat = llm.template is not None
        ids = llm.chat_ids([{"role": "user", "content": text}]) if chat else llm.tokenizer.encode(text)
        tasks.setdefault(task, []).append(ids)
    return tasks


def _first_turn(value: str | dict[str, Any]) -> tuple[str, str]:
    if isinstance(value, str):
        return "text", value
    task = str(value.get("task", "text"))
    if "turns" in value:
        return task, value["turns"][0]
    if "messages" in value:
        return task, next(m["content"] for m in value["messages"] if m.get("role") == "user")
    return task, str(value.get("prompt", ""))


def _plain(
    llm: LLM, prompts: list[list[int]], params: SamplingParams, peer: str | None, together: int
) -> dict[str, Any]:
    from outrider.bench import speed
    from outrider.bench.peers import Transformers

    note("rows")
    rows = llm.driver.run(lambda: speed.rows_cost(llm, context=256))
    report: dict[str, Any] = {
        "rows": rows,
        "memory": llm.driver.run(lambda: speed.memory_limit(llm, rows["pass_ms"]["1"] / 1e3)),
    }
    note(f"{together} requests at once")
    short = sorted(prompts, key=len)[:together]
    report["together"] = speed.concurrency(llm, short, params.max_tokens, together)
    if peer is not None:
        note("against transformers")
        theirs = llm.driver.run(lambda: Transformers(llm.checkpoint.path, llm.settings.threads))
        off = replace(params, temperature=0)
        report["peer"] = {"name": f"transformers {theirs.version}"}
        report["peer"] |= speed.against_peer(llm, theirs, prompts, off.max_tokens, note)
    return report
