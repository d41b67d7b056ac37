"""Flags shared by commands, once: each is a field of one of three settings objects, with its default.

`@takes(SAMPLING, ENGINE)` gives a command those flags, and `--config`, and hands it finished `params` and
`settings`.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Container, Sequence
from dataclasses import MISSING, Field, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.config import Config, read_config
from outrider.cli.flag import Flag, envvar, option
from outrider.errors import InvalidRequest
from outrider.load.sampling import GENERATION_CONFIGS, NAMES
from outrider.sampling_params import MAX_ALTERNATIVES, SamplingParams, Speculation
from outrider.serve.settings import ServeSettings
from outrider.settings import Settings

DEFAULT_MODEL = "smollm2-135m"


def read_bytes(text: str) -> int:
    """`512M` -> 536870912."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write 1073741824, 512M or 1.5G")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def _by_device(text: str) -> int:
    return 0 if text == "auto" else read_bytes(text)


def _auto_or_whole(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal():
        raise ValueError(f"{text!r} is neither auto nor a whole number")
    return int(text)


def read_bias(pairs: Sequence[str]) -> dict[int, float]:
    """`["13=-100", "42=1.5"]` -> `{13: -100.0, 42: 1.5}`."""
    bias = {}
    for pair in pairs:
        token, _, weight = pair.partition("=")
        try:
            bias[int(token)] = float(weight)
        except ValueError:
            raise ValueError(f"{pair!r} is not TOKEN_ID=NUMBER, such as 42=-1.5") from None
    return bias


def read_speculation(text: str) -> Speculation:
    """As in Python and in requests."""
    try:
        return Speculation.of(text)
    except InvalidRequest as problem:
        raise ValueError(str(problem)) from None


def read_tree(text: str) -> dict[str, Any]:
    """`auto`, a number of nodes to grow, or children by depth: `3x2x1`."""
    if text == "auto":
        return {}
    if not re.fullmatch(r"\d{1,9}(x\d{1,9})*", text):
        raise ValueError(f"{text!r:.60} is not auto, a number of nodes, or children by depth such as 3x2x1")
    return {"tree": [int(k) for k in text.split("x")]} if "x" in text else {"nodes": int(text)}


def read_grammar(text: str | None) -> dict[str, Any] | None:
    """`regex=[0-9]+`, `choice=yes|no`, `json_object`, or `json_schema=` and `lark=` with text or @FILE."""
    if text is None:
        return None
    kind, _, value = text.partition("=")
    if value.startswith("@"):
        try:
            value = Path(value[1:]).expanduser().read_text(encoding="utf-8")
        except OSError as problem:
            raise ValueError(f"{value[1:]} cannot be read: {problem.strerror}") from None
    return {kind: value.split("|") if kind == "choice" else True if kind == "json_object" else value}


def _join_speculation(options: dict[str, Any]) -> dict[str, Any]:
    """--speculate, --tree and --mode are one field."""
    tree, mode, given = options.pop("tree"), options.pop("mode"), options["speculation"]
    more = {**tree, **({} if mode == "coupled" else {"mode": mode})}
    if given.off and more:
        raise InvalidRequest("--speculate off leaves nothing for --tree and --mode to do", "speculate")
    options["speculation"] = replace(given, **more)
    return options


@dataclass(frozen=True, slots=True)
class Flags:
    """The flags that build one object, and the name a command takes it by."""

    argument: str
    panel: str
    builds: type[SamplingParams] | type[Settings] | type[ServeSettings]
    flags: tuple[Flag, ...]
    join: Callable[[dict[str, Any]], dict[str, Any]] = dict  # from flags to fields, where they differ

    def without(self, name: str) -> Flags:
        """For a command whose own flag has that name."""
        return replace(self, flags=tuple(flag for flag in self.flags if flag.name != name))

    def parameters(self, by_model: Container[str] = ()) -> list[inspect.Parameter]:
        defaults = {field.name: _default(field) for field in fields(self.builds)}
        return [
            flag.parameter(self.panel, flag.default or defaults.get(flag.name), flag.name in by_model)
            for flag in self.flags
        ]

    def build(self, typed: dict[str, Any]) -> SamplingParams | Settings | ServeSettings:
        values = {flag.name: typed.pop(flag.name) for flag in self.flags}
        read = {flag.name: flag.value(values[flag.name]) for flag in self.flags}
        return self.builds.of(self.join({n: v for n, v in read.items() if v is not None or n not in NAMES}))


def _default(field: Field[Any]) -> Any:
    """As the command line has it: everything that can be repeated is a list."""
    value = field.default if field.default is not MISSING else ()
    return list(value) if isinstance(value, tuple) else value


SAMPLING = Flags(
    "params",
    "Sampling",
    SamplingParams,
    (
        Flag("temperature", float, "Randomness; 0 takes the likeliest token."),
        Flag("top_k", int, "Keep the k likeliest tokens; 0 keeps all."),
        Flag("top_p", float, "Keep the likeliest tokens that reach this probability together."),
        Flag("min_p", float, "Drop tokens less likely than this share of the likeliest."),
        Flag("repetition_penalty", float, "Divide the logits of tokens in prompt or output."),
        Flag("frequency_penalty", float, "Subtract this for every time a token was written."),
        Flag("presence_penalty", float, "Subtract this once a token was written."),
        Flag("logit_bias", list[str], "Add VALUE to a token's logit. Repeatable.", read_bias, "ID=VALUE"),
        Flag("bad_words", list[str], "A word never to write. Repeatable.", tuple, "TEXT", ("--bad-word",)),
        Flag("seed", int | None, "The same seed gives the same answer; drawn if not given."),
        Flag("n", int, "Answers a prompt.", spelled=("-n", "--n")),
        Flag("max_tokens", int, "Longest answer, in tokens."),
        Flag("min_tokens", int, "Shortest answer, in tokens."),
        Flag("stop", list[str], "End before this text. Repeatable.", tuple, "TEXT"),
        Flag(
            "stop_token_ids", list[int], "End at this token. Repeatable.", tuple, "ID", ("--stop-token-id",)
        ),
        Flag("include_stop", bool, "Keep the stop text in the answer.", spelled=("--include-stop",)),
        Flag("ignore_eos", bool, "Write on past the model's own end.", spelled=("--ignore-eos",)),
        Flag("logprobs", int | None, f"Log-probabilities, and 0-{MAX_ALTERNATIVES} alternatives a token."),
        Flag("prompt_logprobs", int | None, "The same for the prompt's own tokens."),
        Flag(
            "speculation",
            str,
            "Speculate: as deep as pays, not at all, at most N deep, or NAME=VALUE,...",
            read_speculation,
            "auto|off|N",
            ("--speculate",),
            "auto",
        ),
        Flag(
            "tree",
            str,
            "Draft a tree: of N nodes, or of a fixed shape.",
            read_tree,
            "auto|N|AxBxC",
            default="auto",
        ),
        Flag("mode", str, "How drafts are verified.", metavar="coupled|rejection|lossy", default="coupled"),
        Flag(
            "prediction", str | None, "What the answer is expected to be; drafts follow it.", metavar="TEXT"
        ),
        Flag(
            "grammar",
            str | None,
            "The answer's form: json_object, json_schema=@FILE, regex=..., choice=a|b, lark=@FILE.",
            read_grammar,
            "KIND=VALUE",
        ),
    ),
    _join_speculation,
)

_SPECIAL = ("--special-tokens-in-text/--no-special-tokens-in-text",)
_REUSE = ("--prefix-reuse/--no-prefix-reuse",)

ENGINE = Flags(
    "settings",
    "Engine",
    Settings,
    (
        Flag("device", str, "Where to run.", metavar="auto|cpu|cuda"),
        Flag("dtype", str, "Number format of computation and KV cache.", metavar="auto|float32|bfloat16"),
        Flag(
            "weights",
            str,
            "Number format of weights: auto, float32, bfloat16; on a GPU also fp8, int8, int4.",
            metavar="FORMAT",
        ),
        Flag(
            "draft_weights",
            str,
            "The same for a draft model; auto: as --weights, on a CPU bfloat16.",
            metavar="FORMAT",
        ),
        Flag("threads", int, "Threads; 0 means the cores this process may use."),
        Flag("context", int, "Longest prompt and answer together; 0 means the model's own."),
        Flag("cache_bytes", str, "Memory for the KV cache.", _by_device, "auto|SIZE", default="auto"),
        Flag(
            "gpu_memory_utilization",
            float | None,
            "Share of a GPU's memory for weights, graphs and KV cache together; 0.92 by default.",
            metavar="F",
        ),
        Flag("max_sequences", int, "Sequences that share a step; 0 means by device."),
        Flag("step_rows", int, "Rows of a step; longer prompts are prefilled in chunks; 0 means by device."),
        Flag(
            "prefill_slowdown",
            float | None,
            "Time that prompt chunks may add to a step, relative to the step without them; inf: no bound. By device.",
            metavar="F",
        ),
        Flag(
            "draft_max_batch",
            str,
            "Draft only in steps of up to N sequences; auto: measured costs decide.",
            _auto_or_whole,
            "auto|N",
            default="auto",
        ),
        Flag("draft_max_depth", int, "Deepest draft; the planner measures which depth pays.", metavar="N"),
        Flag("draft_max_temperature", float, "Draft nothing above this temperature.", metavar="F"),
        Flag(
            "objective",
            str,
            "Most tokens per second of all requests, or least time per token of each.",
            metavar="throughput|latency",
        ),
        Flag(
            "release_draft",
            bool,
            "Release a draft that has not paid for some thousand steps, and its memory.",
            spelled=("--release-draft/--keep-draft",),
        ),
        Flag("prefix_reuse", bool, "Reuse cached prompt prefixes.", spelled=_REUSE),
        Flag(
            "special_tokens_in_text",
            bool,
            "Let messages hold control tokens by their strings; by default they stay text.",
            spelled=_SPECIAL,
        ),
        Flag("kernels", str, "Kernels of the forward pass on a CPU.", metavar="auto|c|torch"),
    ),
)

_PADDING = ("--stream-padding/--no-stream-padding",)
_LOG_PROMPTS = ("--log-prompts/--no-log-prompts",)

SERVE = Flags(
    "serve",
    "Server",
    ServeSettings,
    (
        Flag("host", str, "Address to listen on; 0.0.0.0 lets other machines in.", metavar="ADDRESS"),
        Flag("port", int, "Port to listen on; 0 takes any free one."),
        Flag("served_name", str | None, "Another name for the model, for clients.", metavar="NAME"),
        Flag(
            "api_keys",
            list[str],
            "A key clients must send. Repeatable. Others may see flags: prefer its variable or --key-file.",
            tuple,
            "KEY",
            ("--api-key",),
        ),
        Flag("key_file", str | None, "Keys by their hashes; see outrider keys.", metavar="FILE"),
        Flag(
            "allowed_hosts",
            list[str],
            "A name clients may reach the server by; * is any. Repeatable. By default local names when "
            "listening locally, else any.",
            tuple,
            "HOST",
            ("--allowed-host",),
        ),
        Flag(
            "cors_origins",
            list[str],
            "A web page's origin that may call the server; * is any. Repeatable.",
            tuple,
            "ORIGIN",
            ("--cors-origin",),
        ),
        Flag(
            "max_tokens",
            int | None,
            "Longest answer of requests that set no length; by default a quarter of the context.",
        ),
        Flag("max_body_bytes", str, "Largest request.", read_bytes, "SIZE", default="8M"),
        Flag("max_schema_bytes", str, "Largest JSON schema or grammar.", read_bytes, "SIZE", default="64K"),
        Flag("max_queued_requests", int, "Requests that may wait; more are sent away."),
        Flag("max_queued_tokens", int, "Tokens of prompts that may wait; more are sent away."),
        Flag("max_connections", int, "Connections that may be open; more are sent away."),
        Flag(
            "max_connections_per_peer",
            int,
            "The same for one address; 0: no limit. Not for this machine's own.",
        ),
        Flag("request_timeout", float, "Longest a request may take.", metavar="SEC"),
        Flag("body_timeout", float, "Longest a request's body may take to arrive.", metavar="SEC"),
        Flag("header_timeout", float, "Longest a request's headers may take to arrive.", metavar="SEC"),
        Flag("write_timeout", float, "Drop a client that reads nothing for this long.", metavar="SEC"),
        Flag("grammar_timeout", float, "Longest a grammar may take to compile.", metavar="SEC"),
        Flag("drain_seconds", float, "How long running requests may go on after Ctrl-C.", metavar="SEC"),
        Flag("engine_restarts", int, "Times in ten minutes a failed engine is started again."),
        Flag("metrics_compat", str, "Metrics under another server's names too.", metavar="none|vllm"),
        Flag(
            "price_per_hour",
            float | None,
            "What an hour of this machine costs: /metrics then has the cost of a million tokens.",
            metavar="F",
        ),
        Flag("stream_padding", bool, "Pad streamed events; their sizes then say nothing.", spelled=_PADDING),
        Flag("ping_seconds", float, "Time between signs of life on silent streams; 0: none.", metavar="SEC"),
        Flag("log_format", str, "How log lines are written.", metavar="text|json"),
        Flag("log_level", str, "What to log: debug, info, warning or error, and worse.", metavar="LEVEL"),
        Flag("log_prompts", bool, "Log what users write, too.", spelled=_LOG_PROMPTS),
        Flag(
            "draft_folders",
            list[str],
            "A folder whose drafts may take the place of the one in use; see outrider draft. Repeatable.",
            tuple,
            "DIR",
            ("--draft-folder",),
        ),
        Flag(
            "keep_traffic",
            str | None,
            "Keep tokens of requests by keys that are marked for it here, to train drafts on.",
            metavar="DIR",
        ),
        Flag("keep_traffic_bytes", str, "Most to keep; the oldest goes.", read_bytes, "SIZE", default="1G"),
    ),
)

# What a table of a config file groups.
TABLES = {"sampling": SAMPLING, "engine": ENGINE, "serve": SERVE}


def _load_config(context: typer.Context, file: str | None) -> Config:
    """Runs before any other flag is settled: what the file says becomes the command's defaults."""
    if file is None or context.resilient_parsing:
        return Config()
    tables = {name: {flag.name: flag for flag in group.flags} for name, group in TABLES.items()}
    config = read_config(file, tables)
    context.default_map = {**(context.default_map or {}), **config.values}
    return config


_CONFIG = inspect.Parameter(
    "config",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        str | None,
        option(
            "config",
            "A TOML file of settings; flags and variables win over it.",
            "FILE",
            is_eager=True,
            callback=_load_config,
        ),
    ],
)


def takes(*groups: Flags, **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of `groups` and --config; it is called with what they build.

    One with a parameter `given` gets the names of those parameters that a model may set and the user did set.
    `defaults` are this command's own, by the flags' names.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        arguments = {group.argument for group in groups}
        own = inspect.signature(command, eval_str=True).parameters
        by_model = NAMES if "given" in own else ()
        kept = [p.replace(kind=p.KEYWORD_ONLY) for n, p in own.items() if n not in {*arguments, "given"}]
        flags = [_CONFIG, *(p for group in groups for p in group.parameters(by_model))]
        flags = [p.replace(default=defaults.get(p.name, p.default)) for p in flags]

        @functools.wraps(command)
        def called(**typed: Any) -> None:
            config, used = typed.pop("config"), dict(typed)
            if by_model:
                ours = used["generation_config"] == "none"
                typed["given"] = frozenset(n for n in by_model if ours or used[n] is not None)
            try:
                built = {group.argument: group.build(typed) for group in groups}
            except InvalidRequest as problem:
                raise config.blame(problem, used) from None
            command(**typed, **built)

        called.__signature__ = inspect.Signature([*kept, *flags])  # type: ignore[attr-defined]
        called.__annotations__ = {p.name: p.annotation for p in (*kept, *flags)}
        return called

    return decorate


def _known_generation_config(text: str) -> str:
    if text not in GENERATION_CONFIGS:
        raise typer.BadParameter(f"{text!r} is not {' or '.join(GENERATION_CONFIGS)}")
    return text


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        envvar=envvar("model"),
        show_envvar=False,
        help="A folder, a .gguf file, an alias, or a hub id such as org/name.",
    ),
]
Draft = Annotated[
    str,
    option(
        "draft",
        "The drafter: auto (paired with the model, else lookup), none, lookup, early_exit, or a smaller model; "
        "a+b for both.",
        "NAME",
    ),
]
GenerationConfig = Annotated[
    str,
    option(
        "generation_config",
        "Sampling defaults: the model's own, or none of them.",
        "auto|none",
        callback=_known_generation_config,
        rich_help_panel=SAMPLING.panel,
    ),
]
System = Annotated[str | None, option("system", "The system prompt.", None, "--system", "-s")]
ShowOrigins = Annotated[
    bool, option("show", "Colour each token by where it came from: accepted, recovered, bonus, or plain.")
]
ShowStats = Annotated[bool, option("stats", "Tokens, times and rates, on stderr.")]
