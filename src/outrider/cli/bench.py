"""`outrider bench`: what plain decoding and speculation do on this machine, on the user's prompts or built-in
ones, with the model as it is or in the shape of a bigger one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.bench.prompts import KINDS
from outrider.cli.generate import Limit, Prompts
from outrider.cli.measure import (
    AsIfShape,
    DraftAsIf,
    DraftLayers,
    JsonFile,
    Progress,
    Report,
    Tasks,
    described,
    say_loading,
    task_ids,
    task_texts,
    warn_if_busy,
)
from outrider.cli.options import DEFAULT_MODEL, ENGINE, SAMPLING, Draft, Model, envvar, takes
from outrider.cli.output import note, open_llm
from outrider.errors import InvalidRequest
from outrider.settings import Settings
from outrider.types import SamplingParams

if TYPE_CHECKING:
    from outrider.engine.llm import LLM

NOISY = 0.4  # the lowest speed-up this far below the median
EACH = 2  # built-in prompts of a task; with so many tokens an answer, about a minute for the built-in model
TOKENS = 64

Peer = Annotated[
    str | None,
    typer.Option(
        "--peer",
        envvar=envvar("peer"),
        show_envvar=False,
        metavar="transformers",
        help="Another engine to run on the same prompts. In turn with ours, on the CPU.",
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
Batches = Annotated[
    str,
    typer.Option("--batches", envvar=envvar("batches"), show_envvar=False, metavar="N,N,...",
                 help="Batch sizes: prompts answered at once, one size after the other."),
]  # fmt: skip
Groups = Annotated[
    int | None,
    typer.Option("--groups", min=1, envvar=envvar("groups"), show_envvar=False,
                 help="Batches to measure of each task and size, at most; by default all prompts once."),
]  # fmt: skip
Ways = Annotated[
    str | None,
    typer.Option("--ways", envvar=envvar("ways"), show_envvar=False, metavar="NAME,NAME",
                 help="What to compare with plain decoding: auto, a drafter, DRAFTER:auto. A drafter drafts as deep as "
                      "--speculate says, else 4; auto as deep as pays. By default every drafter, and auto."),
]  # fmt: skip
TaskTemperatures = Annotated[
    str | None,
    typer.Option("--temperatures", envvar=envvar("temperatures"), show_envvar=False, metavar="T|TASK=T,...",
                 help="Temperature of all tasks or of each. By default --temperature if that is given, else 0 for "
                      "rewrite and 0.7 for the others."),
]  # fmt: skip


@takes(SAMPLING, ENGINE, max_tokens=TOKENS)
def bench(
    model: Model = DEFAULT_MODEL,
    draft: Draft = "auto",
    as_if: AsIfShape = None,
    draft_as_if: DraftAsIf = None,
    draft_layers: DraftLayers = None,
    prompts: Prompts = None,
    limit: Limit = None,
    tasks: Tasks = None,
    temperatures: TaskTemperatures = None,
    batches: Batches = "1",
    groups: Groups = None,
    ways: Ways = None,
    peer: Peer = None,
    what: What = "all",
    together: Together = 8,
    json_file: JsonFile = None,
    *,
    params: SamplingParams,
    settings: Settings,
) -> None:
    """Measure speed on this machine: plain decoding, and what speculation brings. A server: outrider bench serve.

    outrider bench smollm2-135m --temperature 0 --max-tokens 128 --peer transformers
    """
    _check(what, peer, as_if, params)
    sizes, heat = batch_sizes(batches), task_temperatures(temperatures, params)
    report, texts = Report("bench", json_file), task_texts(prompts, limit, tasks, EACH)
    warn_if_busy()
    say_loading(model)
    with open_llm(model, draft, settings, as_if, draft_as_if, draft_layers) as llm:
        from outrider.bench.speculation import compare, group_count, ways_of

        asked = task_ids(llm, texts)
        report |= described(llm)
        chosen = ways_of(llm, params, ways.split(",") if ways else None)
        flat = [p for task in asked.values() for p in task]
        runs = len(chosen) * sum(
            group_count(len(some), size, groups) for some in asked.values() for size in sizes
        )
        stages = _stages(what, params.max_tokens, together, len(flat) if peer else 0, runs)

        def tell(found: dict[str, Any]) -> None:
            report["speculation"] = found
            report.keep()

        with Progress(stages) as progress:
            if what != "speculation":
                report["plain"] = _plain(llm, flat, params, peer, together, progress)
                report.keep()
                progress.clear()
                _say_plain(report["plain"])
            if what != "plain":
                say = progress.of("speculation")
                found = compare(llm, asked, params, chosen, heat, sizes, groups, tell, say)
        if what != "plain":
            _say_speculation(found)
    if prompts is None and limit is None:
        _say_more()
    report.deliver()


def _check(what: str, peer: str | None, as_if: str | None, params: SamplingParams) -> None:
    """Refuse what cannot be measured, before anything is loaded."""
    if what not in ("all", "plain", "speculation"):
        raise typer.BadParameter("one of all, plain, speculation", param_hint="--what")
    if peer not in (None, "transformers"):
        raise typer.BadParameter(f"unknown engine {peer!r}; known: transformers", param_hint="--peer")
    if peer is not None and as_if is not None:
        raise InvalidRequest("bench/peers.py runs other engines on an as-if model; leave out --peer", "peer")
    if params.n > 1:
        raise InvalidRequest("a benchmark gives one answer a prompt; leave out --n", "n")


def _stages(what: str, tokens: int, together: int, against: int, runs: int) -> Mapping[str, float]:
    """What each stage costs, in plain passes, roughly: for the time that is left."""
    stages: dict[str, float] = {}
    if what != "speculation":
        stages = {"rows": 100, "memory": 50, "together": 3 * tokens * (1 + together / 3)}
        stages |= {"peer": 4.0 * tokens * against} if against else {}
    return stages | ({"speculation": runs * (tokens + 20)} if what != "plain" else {})


def batch_sizes(text: str) -> list[int]:
    sizes = [int(part) for part in text.split(",") if part.isdecimal()]
    if len(sizes) != len(text.split(",")) or not all(sizes):
        raise typer.BadParameter(f"{text!r} is not a list of numbers such as 1,4,16", param_hint="--batches")
    return sizes


def task_temperatures(text: str | None, params: SamplingParams) -> dict[str, float]:
    """By task; "" is all of them. Nothing given: the tasks' own."""
    if text is None:
        return {} if params.temperature == SamplingParams().temperature else {"": params.temperature}
    found = {}
    for part in text.split(","):
        task, _, number = part.rpartition("=")
        try:
            found[task] = replace(params, temperature=float(number)).temperature
        except ValueError:
            hint = "--temperatures"
            raise typer.BadParameter(
                f"{part!r} is not T or TASK=T, such as chat=0.7", param_hint=hint
            ) from None
    return found


def _plain(
    llm: LLM,
    prompts: list[list[int]],
    params: SamplingParams,
    peer: str | None,
    together: int,
    progress: Progress,
) -> dict[str, Any]:
    from outrider.bench import speed
    from outrider.bench.peers import Transformers

    if peer is not None and llm.model.device.type == "cuda":
        raise InvalidRequest("--peer compares on the CPU; on a GPU bench/peers.py does", "peer")
    rows = speed.rows_cost(llm, 256, progress.of("rows"))
    report: dict[str, Any] = {"rows": rows}
    if llm.model.device.type == "cpu":
        progress.of("memory")("the machine's memory bandwidth", 0)
        report["memory"] = llm.driver.run(lambda: speed.memory_limit(llm, rows["pass_ms"]["1"] / 1e3))
    short = sorted(prompts, key=len)[:together]
    report["together"] = speed.concurrency(
        llm, short, params.max_tokens, together, tell=progress.of("together")
    )
    if peer is not None:
        progress.of("peer")("opening transformers", 0)
        theirs = llm.driver.run(lambda: Transformers.open(llm.checkpoint.path, llm.settings.threads))
        off = replace(params, temperature=0)
        report["peer"] = {"name": f"transformers {theirs.version}"}
        report["peer"] |= speed.against_peer(llm, theirs, prompts, off.max_tokens, progress.of("peer"))
    return report


def _say_speculation(found: dict[str, Any]) -> None:
    from outrider.bench.speculation import spread, table

    for line in table(found):
        note(line)
    if spread(found) > NOISY:
        note("warning: speed-ups vary much between groups: short answers, or a busy machine")


def _say_more() -> None:
    count = sum(map(len, KINDS.values()))
    note(f"more thorough: --limit {count} --max-tokens {4 * TOKENS}, or your own prompts: --prompts FILE")


def _say_plain(found: dict[str, Any]) -> None:
    several = {m: r for m, r in found["rows"]["ratio_to_one_row"].items() if m != "1"}
    times = ", ".join(f"{r:.2f}x" for r in several.values())
    note(f"a pass over {', '.join(several)} tokens takes {times} as long as over one")
    if "memory" in found:
        limit = found["memory"]
        note(
            f"memory bandwidth: {limit['reached_gb_s']:.1f} of {limit['read_gb_s']:.1f} GB/s reached in a pass"
        )
    at_once = found["together"]
    rates = f"{at_once['one_tok_s']:.1f} and {at_once['all_tok_s']:.1f} tok/s"
    note(f"plain decoding, one request and {at_once['together']} at once: {rates} ({at_once['ratio']:.2f}x)")
    if "peer" in found:
        peer = found["peer"]
        rates = f"{peer['ours_tok_s']:.1f} and {peer['peer_tok_s']:.1f} tok/s"
        note(f"Outrider and {peer['name']}: {rates} ({peer['decode_ratio']:.2f}x)")
