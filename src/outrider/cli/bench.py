"""`outrider bench`: what plain decoding and speculation do on this machine, on the user's prompts or built-in
ones, with the model as it is or in the shape of a bigger one.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.bench.prompts import KINDS, LENGTHS
from outrider.cli.bench_quality import bench_quality, refuse_unused
from outrider.cli.flag import option
from outrider.cli.generate import Limit, Prompts
from outrider.cli.measure import (
    WIDTH,
    AsIfShape,
    DraftAsIf,
    DraftLayers,
    HtmlFile,
    JsonFile,
    Progress,
    Report,
    described,
    say_loading,
    warn_if_busy,
    writable,
    write_page,
)
from outrider.cli.options import DEFAULT_MODEL, ENGINE, SAMPLING, Draft, Model, takes
from outrider.cli.output import note, open_llm
from outrider.cli.tasks import TOKENS, TaskRow, Tasks, task_ids, task_rows
from outrider.errors import InvalidRequest
from outrider.settings import Settings
from outrider.types import SamplingParams

if TYPE_CHECKING:
    from outrider.bench.speculation import Comparison
    from outrider.engine.llm import LLM

EACH = 1  # built-in prompts of a task, or as many as make the largest batch
SECONDS = 60.0  # for repetitions, where no time is given
WITHIN = 2.0  # percent

Peer = Annotated[
    str | None,
    option(
        "peer", "Another engine to run on the same prompts. In turn with ours, on the CPU.", "transformers"
    ),
]
What = Annotated[
    str,
    option("what", "What to measure: speed, or what number formats of the weights change.",
           "all|plain|speculation|quality"),
]  # fmt: skip
Against = Annotated[
    str | None,
    option("against", "With --what quality: the model to compare with, such as the file before rounding. By default "
           "the same model, unrounded.", "MODEL"),
]  # fmt: skip
Formats = Annotated[
    str | None,
    option("formats", "With --what quality: the --weights to compare; by default every one of this device, with "
           "--against the one of --weights.", "NAME,NAME"),
]  # fmt: skip
Together = Annotated[int, option("together", "Requests at once.", min=2)]
Batches = Annotated[
    str, option("batches", "Batch sizes: prompts answered at once, one size after the other.", "N,N,...")
]
Groups = Annotated[
    int | None,
    option(
        "groups", "Batches to measure of each task and size, at most; by default all prompts once.", min=1
    ),
]
Methods = Annotated[
    str | None,
    option("methods", "What to compare with plain decoding: auto, a drafter, DRAFTER:auto. A drafter drafts as deep as "
           "--speculate says, else 4; auto as deep as pays. By default every drafter, and auto.", "NAME,NAME"),
]  # fmt: skip
Modes = Annotated[
    str | None,
    option("modes", "Compare how drafts are verified, with fidelity to plain decoding: coupled, rejection, lossy:0.3 "
           "(the least probability of an accepted token), or all for a curve of them.", "NAME,NAME|all"),
]  # fmt: skip
TaskTemperatures = Annotated[
    str | None,
    option("temperatures", "Temperatures of all tasks or of each; several are a curve. By default --temperature if "
           "that is given, else 0 for rewrite and json and 0.7 for the others.", "T,T|TASK=T,..."),
]  # fmt: skip
Within = Annotated[
    float,
    option(
        "within", "Repeat until each speed-up is known this well, in percent.", "PERCENT", min=0.1, max=100.0
    ),
]
Seconds = Annotated[
    float | None,
    option(
        "seconds",
        "Time to measure in, about; what was not begun by then is left out. By default everything once, and "
        "again within a minute.",
        "SEC",
        min=1.0,
    ),
]
Resume = Annotated[
    bool, option("resume", "Go on with the results that --json names, where an earlier run was cut short.")
]
Details = Annotated[
    bool,
    option(
        "details",
        "Print every figure: errors, acceptance, latencies, memory. --json and --html have them, too.",
    ),
]


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
    methods: Methods = None,
    modes: Modes = None,
    peer: Peer = None,
    what: What = "all",
    against: Against = None,
    formats: Formats = None,
    together: Together = 8,
    within: Within = WITHIN,
    seconds: Seconds = None,
    resume: Resume = False,
    details: Details = False,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
    *,
    params: SamplingParams,
    settings: Settings,
) -> None:
    """Measure speed on this machine: plain decoding, and what speculation brings. A server: outrider bench serve.

    outrider bench smollm2-135m --temperature 0 --max-tokens 128 --peer transformers
    """
    _check(what, peer, as_if, html_file, details, params)
    _check_modes(modes, methods, what, against or formats)
    sizes, by_task = batch_sizes(batches), task_temperatures(temperatures, params)
    rows = task_rows(prompts, limit, tasks, max(EACH, *sizes))
    if what == "quality":
        refuse_unused(
            methods=methods, groups=groups, seconds=seconds, resume=resume, temperatures=temperatures
        )
        bench_quality(model, against, formats, rows, params.max_tokens, settings, json_file)
        return
    asked = {
        "model": model, "draft": draft, "as_if": as_if, "draft_as_if": draft_as_if, "draft_layers": draft_layers,
        "prompts": prompts or "built-in", "limit": limit, "groups": groups, "max_tokens": params.max_tokens,
        "seed": params.seed, "methods": methods, "modes": modes,
    }  # fmt: skip
    page_file, earlier = writable(html_file), _earlier(resume, json_file, asked)
    report = Report("bench", json_file, **earlier)
    warn_if_busy()
    say_loading(model)
    with open_llm(model, draft, settings, as_if, draft_as_if, draft_layers) as llm:
        report |= described(llm) | {"asked": asked}
        comparison = _comparison(
            llm, rows, params, methods, modes, lengths=LENGTHS if prompts is None else {}, temperatures=by_task,
            batches=sizes, most=groups, seconds=seconds or SECONDS, bounded=seconds is not None, within=within / 100,
        )  # fmt: skip
        _measure(llm, comparison, what, peer, together, report)
    _deliver(report, page_file, details, few=prompts is None and limit is None)


def _deliver(report: Report, page_file: Path | None, details: bool, few: bool) -> None:
    """`few`: of the built-in prompts."""
    from outrider.bench.speculation_page import page

    if "memory" in report:
        _say_speculation(report, details)
    if "plain" in report:
        _say_plain(report["plain"])
    write_page(page_file, lambda: page(report))
    if few:
        _say_more()
    report.deliver()


def _comparison(
    llm: LLM,
    rows: Mapping[str, list[TaskRow]],
    params: SamplingParams,
    methods: str | None,
    modes: str | None,
    lengths: Mapping[str, float],
    **how: Any,
) -> Comparison:
    from outrider.bench.fidelity import modes_of
    from outrider.bench.speculation import Comparison, methods_of

    if modes:
        chosen = modes_of(params.speculation, modes.split(","))
    else:
        chosen = methods_of(llm, params, methods.split(",") if methods else None)
    tokens = params.max_tokens
    room = max(round(tokens * lengths.get(task, 1.0)) for task in rows)
    return Comparison(
        task_ids(llm, rows, tokens, room), params, chosen, lengths=lengths, fidelity=bool(modes), **how
    )


def _measure(llm: LLM, asked: Comparison, what: str, peer: str | None, together: int, report: Report) -> None:
    from outrider.bench.speculation import compare, left_out
    from outrider.bench.speed import memory_used

    flat = [ids for some in asked.tasks.values() for ids in some]
    stages = _stages(what, asked, together, len(flat) if peer else 0)

    def tell(found: dict[str, Any]) -> None:
        report["speculation"] = found
        report.keep()

    with Progress(stages) as progress:
        if what != "speculation":
            report["plain"] = _plain(llm, flat, asked.params, peer, together, progress)
            report.keep()
        if what != "plain":
            found = compare(llm, asked, report.get("speculation"), tell, progress.of("speculation"))
            report["left_out"] = left_out(found, asked)
            report["speculation"], report["memory"] = found, memory_used(llm)


def _earlier(resume: bool, json_file: str | None, asked: Mapping[str, Any]) -> dict[str, Any]:
    """What an earlier run found, if it asked the same."""
    if not resume:
        return {}
    if json_file in (None, "-"):
        raise InvalidRequest("--resume goes on with a file of results: name it with --json FILE", "resume")
    try:
        before = json.loads(Path(str(json_file)).expanduser().read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as problem:
        raise InvalidRequest(f"--resume: {json_file} cannot be read: {problem}", "resume") from None
    if not isinstance(before, dict) or before.get("kind") != "bench" or "asked" not in before:
        raise InvalidRequest(f"--resume: {json_file} does not hold results of bench", "resume")
    for name, value in asked.items():
        if before["asked"].get(name) != value:
            was = before["asked"].get(name)
            raise InvalidRequest(
                f"--resume: {json_file} was measured with {name} {was!r}, not {value!r}", name
            )
    certificates = [*before.get("resumed", ()), before["certificate"]]
    return {"speculation": before.get("speculation", {}), "resumed": certificates}


def _check(
    what: str,
    peer: str | None,
    as_if: str | None,
    html_file: str | None,
    details: bool,
    params: SamplingParams,
) -> None:
    """Refuse what cannot be measured, before anything is loaded."""
    if what not in ("all", "plain", "speculation", "quality"):
        raise typer.BadParameter("one of all, plain, speculation, quality", param_hint="--what")
    if what in ("plain", "quality") and html_file is not None:
        raise InvalidRequest(f"a page shows what speculation brings; leave out --what {what}", "html")
    if what in ("plain", "quality") and details:
        raise InvalidRequest(f"--details are of what speculation brings; leave out --what {what}", "details")
    if what == "quality" and (peer or as_if):
        raise InvalidRequest(
            "--what quality measures the model as it is: leave out --peer and --as-if", "what"
        )
    if peer not in (None, "transformers"):
        raise typer.BadParameter(f"unknown engine {peer!r}; known: transformers", param_hint="--peer")
    if peer is not None and as_if is not None:
        raise InvalidRequest("bench/peers.py runs other engines on an as-if model; leave out --peer", "peer")
    if params.n > 1:
        raise InvalidRequest("a benchmark gives one answer a prompt; leave out --n", "n")


def _check_modes(modes: str | None, methods: str | None, what: str, quality: str | None) -> None:
    if quality and what != "quality":
        raise InvalidRequest("--against and --formats go with --what quality", "what")
    if modes and (methods or what in ("plain", "quality")):
        raise InvalidRequest(
            f"--modes compares modes of speculation; leave out --methods and --what {what}", "modes"
        )


def _stages(what: str, asked: Comparison, together: int, against: int) -> Mapping[str, float]:
    """What each stage costs, in plain passes, roughly: for the time that is left."""
    stages: dict[str, float] = {}
    tokens = asked.params.max_tokens
    if what != "speculation":
        stages = {"rows": 100, "memory": 50, "together": 3 * tokens * (1 + together / 3)}
        stages |= {"peer": 4.0 * tokens * against} if against else {}
    runs = sum(len(cell.groups) * (cell.params.max_tokens + 20) for cell in asked.cells()) * len(
        asked.methods
    )
    return stages | ({"speculation": runs} if what != "plain" else {})


def batch_sizes(text: str) -> list[int]:
    sizes = [int(part) for part in text.split(",") if part.isdecimal()]
    if len(sizes) != len(text.split(",")) or not all(sizes):
        raise typer.BadParameter(f"{text!r} is not a list of numbers such as 1,4,16", param_hint="--batches")
    return sizes


def task_temperatures(text: str | None, params: SamplingParams) -> dict[str, list[float]]:
    """By task; "" is all of them. Nothing given: the tasks' own."""
    if text is None:
        return {} if params.temperature == SamplingParams().temperature else {"": [params.temperature]}
    found: dict[str, list[float]] = {}
    for part in text.split(","):
        task, _, number = part.rpartition("=")
        try:
            found.setdefault(task, []).append(replace(params, temperature=float(number)).temperature)
        except ValueError:
            hint = "--temperatures"
            raise typer.BadParameter(
                f"{part!r} is not T or TASK=T, such as chat=0.7", param_hint=hint
            ) from None
    return {task: list(dict.fromkeys(some)) for task, some in found.items()}


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


def _say_speculation(report: Mapping[str, Any], details: bool) -> None:
    """The headline first; every figure only where it was asked for."""
    from outrider.bench.fidelity import fidelity_table
    from outrider.bench.show import headline, latencies, overview, table, verdicts

    found = report["speculation"]
    if not found:
        return
    curve = ["", *fidelity_table(found)] if report["asked"]["modes"] else []
    figures = [*table(found), "", *latencies(found)] if details else overview(found)
    for line in (
        *textwrap.wrap(headline(found), WIDTH - 1),
        "",
        *figures,
        *curve,
        "",
        *verdicts(found, details),
    ):
        note(line)
    if details:
        memory = report["memory"]
        device = f", {memory['gpu_peak_gb']:.2f} GB of the GPU" if "gpu_peak_gb" in memory else ""
        cache = f"room for {memory['kv_cache_tokens']:.0f} tokens in {memory['kv_cache_gb']:.2f} GB of cache"
        note(f"memory: {memory['process_peak_gb']:.2f} GB at most{device}; {cache}")
    if left := report["left_out"]:
        note(f"time is up: {len(left)} not measured, {left[0]} first; --resume with --json goes on")


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
