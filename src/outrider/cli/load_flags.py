"""The flags of `outrider bench serve`."""

from __future__ import annotations

from typing import Annotated, Any

from outrider.cli.flag import option

HERE = "http://127.0.0.1:8000"
ROUNDS = 3  # of two servers or more, unless said


def _option(
    flag: str, kind: Any, text: str, metavar: str | None = None, name: str = "", **limits: Any
) -> Any:
    return Annotated[kind, option(name or flag.partition("/")[0].lstrip("-"), text, metavar, flag, **limits)]


Url = _option("--url", list[str], f"The server, {HERE} by default; two are compared in turn. Repeatable.", "URL",
              show_default=False)  # fmt: skip
ServedName = _option("--model", str | None, "The model's name; by default the first that it serves.", "NAME",
                     "served_name")  # fmt: skip
Endpoint = _option(
    "--endpoint", str | None, "What is asked; chat for --prompts, else completions.", "chat|completions"
)
Concurrency = _option(
    "--concurrency", str | None, "Requests kept in flight, 16 by default; several loads: 1,16,64.", "N,N,..."
)
Rate = _option(
    "--rate", str | None, "Requests a second that arrive by chance, or inf; several: 1,2,4.", "X,X,..."
)
Burstiness = _option(
    "--burstiness", float, "With --rate: 1 is Poisson, less comes in clusters.", "X", min=0.01
)
Burst = _option("--burst", int, "With --rate: so many arrive at once.", min=1)
Trace = _option(
    "--trace", str | None, "Arrivals and lengths: lines SECONDS INPUT OUTPUT, or JSON with at, input_tokens, "
    "output_tokens.", "FILE",
)  # fmt: skip
InputTokens = _option("--input-tokens", str, "Length of prompts that are made up; 64:4096 draws evenly, 64:4096:log "
                      "by orders of magnitude.", "N|A:B[:log]")  # fmt: skip
OutputTokens = _option("--output-tokens", str, "Longest answer, drawn like --input-tokens.", "N|A:B[:log]")
IgnoreEos = _option("--ignore-eos", bool, "Have answers go on to that length. Not every server can.")
Temperature = _option("--temperature", float, "Of every request.", min=0)
Seed = _option("--seed", int, "Of arrivals, lengths, prompts and sampling.")
ApiKey = _option(
    "--api-key",
    str | None,
    "A key to send. Others may see flags: prefer its variable, OUTRIDER_API_KEY.",
    "KEY",
)
Body = _option(
    "--body",
    list[str],
    "A field for every request, such as top_p=0.9. Repeatable.",
    "NAME=VALUE",
    show_default=False,
)
Requests = _option("--requests", int | None, "Requests of a load and round; by default 4 a slot.", min=1)
Seconds = _option("--seconds", float | None, "Begin no request after this; by default 30 with --rate.", "SEC",
                  min=0.1)  # fmt: skip
Warmup = _option("--warmup", int, "Requests before each load that are not counted.", min=0)
Rounds = _option(
    "--rounds", int | None, f"Times each load is run; by default 1, or {ROUNDS} for two servers.", min=1
)
Goodput = _option(
    "--goodput", str | None, "Count requests within these ms: ttft, itl, tpot, e2e.", "ttft=200,itl=50"
)
Clients = _option("--clients", int, "Processes that share the load, if one cannot follow it.", min=1, max=256)
Timeout = _option("--timeout", float, "Longest a request may take.", "SEC", min=0.1)
HtmlFile = _option("--html", str | None, "Write one page with plots and tables, too.", "FILE")
