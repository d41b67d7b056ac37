"""`outrider bench serve`: load for any server that speaks OpenAI's API, and what its clients then see."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from outrider.cli.flag import option
from outrider.cli.generate import Limit, Prompts
from outrider.cli.measure import HtmlFile, JsonFile, Progress, Report, writable, write_page
from outrider.cli.output import note
from outrider.errors import InvalidRequest, OutriderError
from outrider.load.prompts import Row, make_row, read_rows

if TYPE_CHECKING:
    from outrider.bench.serve.arrivals import Due
    from outrider.bench.serve.conversations import Conversations
    from outrider.bench.serve.run import Plan, Shape


HERE = "http://127.0.0.1:8000"
ROUNDS = 3  # of two servers or more, unless said
TURNS = 20  # of a conversation


Url = Annotated[
    list[str] | None,
    option(
        "url",
        f"The server, {HERE} by default; two are compared in turn. Repeatable.",
        "URL",
        show_default=False,
    ),
]
ServedName = Annotated[
    str | None,
    option("served_name", "The model's name; by default the first that it serves.", "NAME", "--model"),
]
Endpoint = Annotated[
    str | None, option("endpoint", "What is asked; chat for --prompts, else completions.", "chat|completions")
]
Concurrency = Annotated[
    str | None,
    option("concurrency", "Requests kept in flight, 16 by default; several loads: 1,16,64.", "N,N,..."),
]
Rate = Annotated[
    str | None,
    option("rate", "Requests a second that arrive at random times, or inf; several: 1,2,4.", "X,X,..."),
]
Burstiness = Annotated[
    float, option("burstiness", "With --rate: 1 is Poisson, less comes in clusters.", "X", min=0.01)
]
Burst = Annotated[int, option("burst", "With --rate: requests that arrive at once.", min=1)]
Trace = Annotated[
    str | None,
    option(
        "trace",
        "Arrivals and lengths: lines SECONDS INPUT OUTPUT, or JSON with at, input_tokens, output_tokens.",
        "FILE",
    ),
]
InputTokens = Annotated[
    str,
    option(
        "input_tokens",
        "Length of prompts that are made up; 64:4096 draws evenly, 64:4096:log by orders of magnitude.",
        "N|A:B[:log]",
    ),
]
OutputTokens = Annotated[
    str, option("output_tokens", "Longest answer, drawn like --input-tokens.", "N|A:B[:log]")
]
IgnoreEos = Annotated[bool, option("ignore_eos", "Have answers go on to that length. Not every server can.")]
Temperature = Annotated[float, option("temperature", "Of every request.", min=0)]
Seed = Annotated[int, option("seed", "Of arrivals, lengths, prompts and sampling.")]
ApiKey = Annotated[
    str | None,
    option("api_key", "A key to send. Others may see flags: prefer its variable, OUTRIDER_API_KEY.", "KEY"),
]
Body = Annotated[
    list[str] | None,
    option(
        "body", "A field for every request, such as top_p=0.9. Repeatable.", "NAME=VALUE", show_default=False
    ),
]
Requests = Annotated[
    int | None, option("requests", "Requests of a load and round; by default 4 a slot.", min=1)
]
Seconds = Annotated[
    float | None, option("seconds", "Begin no request after this; by default 30 with --rate.", "SEC", min=0.1)
]
ConversationCount = Annotated[
    int | None,
    option(
        "conversations",
        "Conversations of --turns turns, each of which sends all that was said before, instead of single requests.",
        min=1,
    ),
]
Turns = Annotated[int, option("turns", "Turns of a conversation, of --input-tokens each.", min=2, max=1000)]
SystemTokens = Annotated[
    str | None, option("system_tokens", "Length of a system prompt of conversations.", "N|A:B[:log]")
]
Systems = Annotated[int, option("systems", "Different system prompts that they share.", min=1)]
Warmup = Annotated[int, option("warmup", "Requests before each load that are not counted.", min=0)]
Rounds = Annotated[
    int | None, option("rounds", f"Times each load is run; by default 1, or {ROUNDS} for two servers.", min=1)
]
Goodput = Annotated[
    str | None, option("goodput", "Count requests within these ms: ttft, itl, tpot, e2e.", "ttft=200,itl=50")
]
Clients = Annotated[
    int, option("clients", "Processes that share the load, if one cannot follow it.", min=1, max=256)
]
Timeout = Annotated[float, option("timeout", "Longest a request may take.", "SEC", min=0.1)]


def bench_serve(
    url: Url = None,
    served_name: ServedName = None,
    endpoint: Endpoint = None,
    concurrency: Concurrency = None,
    rate: Rate = None,
    burstiness: Burstiness = 1.0,
    burst: Burst = 1,
    trace: Trace = None,
    prompts: Prompts = None,
    limit: Limit = None,
    input_tokens: InputTokens = "256",
    output_tokens: OutputTokens = "128",
    ignore_eos: IgnoreEos = False,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    api_key: ApiKey = None,
    body: Body = None,
    requests: Requests = None,
    seconds: Seconds = None,
    conversations: ConversationCount = None,
    turns: Turns = TURNS,
    system_tokens: SystemTokens = None,
    systems: Systems = 1,
    warmup: Warmup = 4,
    rounds: Rounds = None,
    goodput: Goodput = None,
    clients: Clients = 1,
    timeout: Timeout = 600.0,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """Put load on any OpenAI-compatible server and measure what clients see.

    outrider bench serve --url http://127.0.0.1:8000 --concurrency 1,16 --ignore-eos
    """
    from outrider.bench.serve.arrivals import Lengths, read_trace
    from outrider.bench.serve.figures import Bounds
    from outrider.bench.serve.http import Server
    from outrider.bench.serve.run import Plan

    dues = read_trace(trace, requests) if trace else []
    shapes = _shapes(concurrency, rate, dues, burstiness != 1 or burst != 1)
    talks = _conversations(
        conversations, turns, system_tokens, systems, prompts or rate or trace or requests, endpoint
    )
    path, rows = _asked("chat" if talks else endpoint, prompts, limit)
    servers = [Server.of(one, api_key) for one in url or [HERE]]
    fields: dict[str, Any] = {"temperature": temperature, **({"ignore_eos": True} if ignore_eos else {})}
    plan = Plan(
        servers, shapes, path, served_name, rows, Lengths.of(input_tokens, "input_tokens"),
        Lengths.of(output_tokens, "output_tokens"), dues, {**fields, **_fields(body or ())}, seed, burstiness, burst,
        conversations or requests, seconds, warmup, rounds or (ROUNDS if len(servers) > 1 else 1), clients, timeout,
        talks, Bounds.of(goodput),
    )  # fmt: skip
    _run(plan, json_file, html_file, api_key)


def _run(plan: Plan, json_file: str | None, html_file: str | None, secret: str | None) -> None:
    from outrider.bench.serve.page import page
    from outrider.bench.serve.run import check_plan, measure
    from outrider.bench.serve.show import lines
    from outrider.engine.certificate import certificate

    check_plan(plan)
    page_file = writable(html_file)
    report = Report("serve", json_file)
    report["certificate"] = certificate()
    if secret:  # which may stand in the command, in quotes
        command = report["certificate"]["command"].replace(shlex.quote(secret), "***").replace(secret, "***")
        report["certificate"]["command"] = command
    report["settings"] = _described(plan)

    def keep(found: dict[str, Any]) -> None:
        report.update(found)
        report.keep()

    with Progress({"load": 1.0}) as progress:
        report |= measure(plan, progress.of("load"), keep)
    for line in lines(report):
        note(line)
    write_page(page_file, lambda: page(report))
    report.deliver()
    if all(server["failed"] == server["requests"] for load in report["loads"] for server in load["servers"]):
        raise OutriderError("no request was answered")


def _described(plan: Plan) -> dict[str, Any]:
    prompts = f"{len(plan.rows)} rows of a file" if plan.rows else f"made up, {plan.input} tokens"
    if plan.trace:
        prompts = f"{prompts}; lengths by the trace where it has them"
    if plan.conversations:
        prompts = f"{plan.requests} {plan.conversations} of {plan.input} tokens"
    return {
        "endpoint": plan.path,
        "prompts": prompts,
        "output_tokens": str(plan.output),
        "fields": dict(plan.fields),
        "seed": plan.seed,
        "warmup": plan.warmup,
        "rounds": plan.rounds,
        "clients": plan.clients,
        "burstiness": plan.burstiness,
        "burst": plan.burst,
    }


def _conversations(
    count: int | None, turns: int, tokens: str | None, systems: int, others: object, endpoint: str | None
) -> Conversations | None:
    from outrider.bench.serve.arrivals import Lengths
    from outrider.bench.serve.conversations import Conversations

    if count is None:
        if tokens or systems != 1 or turns != TURNS:
            said = "--turns, --system-tokens and --systems go with --conversations"
            raise InvalidRequest(said, "turns")
        return None
    if others or endpoint not in (None, "chat"):
        said = "--conversations makes chat requests in a closed loop: leave out --prompts, --rate, --trace, --requests"
        raise InvalidRequest(f"{said} and other endpoints", "conversations")
    return Conversations(turns, Lengths.of(tokens, "system_tokens") if tokens else None, systems)


def _shapes(concurrency: str | None, rate: str | None, dues: Sequence[Due], bursts: bool) -> list[Shape]:
    """The loads, of the one kind that was asked for."""
    from outrider.bench.serve.run import Shape

    given = [
        flag for flag, value in (("--concurrency", concurrency), ("--rate", rate), ("--trace", dues)) if value
    ]
    if len(given) > 1:
        raise InvalidRequest(f"give one of {' and '.join(given)}, not both", "rate")
    if bursts and rate is None:
        raise InvalidRequest("--burstiness and --burst go with --rate", "burstiness")
    if dues:
        return [Shape("trace")]
    if rate is not None:
        return [Shape("rate", value) for value in _numbers(rate, "rate")]
    values = _numbers(concurrency or "16", "concurrency")
    if not all(value == int(value) if math.isfinite(value) else False for value in values):
        raise InvalidRequest(
            f"--concurrency {concurrency!r:.40} is not a list of whole numbers", "concurrency"
        )
    return [Shape("concurrency", value) for value in values]


def _numbers(text: str, flag: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [0.0]
    if not all(value > 0 for value in values):
        raise InvalidRequest(f"--{flag} {text!r:.40} is not a list of numbers above 0, such as 1,4,16", flag)
    return values


def _asked(endpoint: str | None, prompts: str | None, limit: int | None) -> tuple[str, list[dict[str, Any]]]:
    from outrider.bench.serve.asked import CHAT, COMPLETIONS

    if endpoint not in (None, "chat", "completions"):
        raise InvalidRequest(f"--endpoint {endpoint!r:.40} is not chat or completions", "endpoint")
    if prompts is None:
        return (CHAT if endpoint == "chat" else COMPLETIONS), []
    chat = endpoint != "completions"
    rows = [make_row(name, value, chat or None, chat) for name, value in read_rows(prompts, sys.stdin, limit)]
    if not rows:
        raise InvalidRequest(f"{prompts} holds no prompts", "prompts")
    if not chat and any(row.prompt is None for row in rows):
        raise InvalidRequest(
            f"{prompts} has conversations, which --endpoint completions cannot ask", "endpoint"
        )
    if several := sum(len(row.turns) > 1 for row in rows):
        note(f"{several} of {len(rows)} rows have several turns; the first of each is asked")
    return (CHAT if chat else COMPLETIONS), [_part(row) for row in rows]


def _part(row: Row) -> dict[str, Any]:
    if row.prompt is not None:
        return {"prompt": row.prompt}
    return {"messages": [*row.messages] or [{"role": "user", "content": row.turns[0]}]}


def _fields(pairs: Sequence[str]) -> dict[str, Any]:
    """`top_p=0.9`, `stop=["x"]`, or a whole object in JSON."""
    fields: dict[str, Any] = {}
    for pair in pairs:
        if pair.lstrip().startswith("{"):
            try:
                fields |= json.loads(pair)
            except ValueError as problem:
                raise InvalidRequest(f"--body {pair!r:.60} is not JSON: {problem}", "body") from None
            continue
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise InvalidRequest(f"--body {pair!r:.60} is not NAME=VALUE or a JSON object", "body")
        try:
            fields[name.strip()] = json.loads(value)
        except ValueError:  # a word
            fields[name.strip()] = value
    if "stream" in fields:
        raise InvalidRequest("answers are always streamed; leave stream out of --body", "body")
    return fields
