"""Flags shared by commands, once: each is a field of one of three settings objects, with its default.

`@takes(SAMPLING, ENGINE)` gives a command those flags, and `--config`, and hands it finished `params` and
`settings`.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Container, Sequence
from dataclasses import MISSING, Field, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.config import Config, read_config
from outrider.cli.flag import Flag, envvar, flags_of, help_of, option, read_bytes
from outrider.errors import InvalidRequest
from outrider.load.sampling import GENERATION_CONFIGS, NAMES
from outrider.sampling_params import SamplingParams, Speculation
from outrider.serve.deploy_settings import DeploySettings
from outrider.serve.settings import ServeSettings
from outrider.settings import Settings

DEFAULT_MODEL = "smollm2-135m"


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
    builds: type[SamplingParams] | type[Settings] | type[ServeSettings] | type[DeploySettings]
    flags: tuple[Flag, ...]
    join: Callable[[dict[str, Any]], dict[str, Any]] = dict  # from flags to fields, where they differ

    def without(self, name: str) -> Flags:
        """The same flags but one, for a command that has a flag of that name."""
        return replace(self, flags=tuple(flag for flag in self.flags if flag.name != name))

    def parameters(self, by_model: Container[str] = ()) -> list[inspect.Parameter]:
        defaults = {field.name: _default(field) for field in fields(self.builds)}
        return [
            flag.parameter(self.panel, flag.default or defaults.get(flag.name), flag.name in by_model)
            for flag in self.flags
        ]

    def build(self, typed: dict[str, Any]) -> SamplingParams | Settings | ServeSettings | DeploySettings:
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
        *flags_of(
            SamplingParams,
            Flag("logit_bias", list[str], "Add VALUE to a token's logit. Repeatable.", read_bias, "ID=VALUE"),
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
                "grammar",
                str | None,
                "The answer's form: json_object, json_schema=@FILE, regex=..., choice=a|b, lark=@FILE.",
                read_grammar,
                "KIND=VALUE",
            ),
            without=("mark_special",),
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
    ),
    _join_speculation,
)
_CACHE = Flag("cache_bytes", str, help_of(Settings, "cache_bytes"), _by_device, "auto|SIZE", default="auto")
_BATCH = Flag(
    "draft_max_batch", str, help_of(Settings, "draft_max_batch"), _auto_or_whole, "auto|N", default="auto"
)
ENGINE = Flags("settings", "Engine", Settings, flags_of(Settings, _CACHE, _BATCH))
_MEMORY = Flag(
    "memory_bytes", str, help_of(ServeSettings, "memory_bytes"), _by_device, "auto|SIZE", default="auto"
)
SERVE = Flags("serve", "Server", ServeSettings, flags_of(ServeSettings, _MEMORY))
DEPLOY = Flags("deploy", "Replicas", DeploySettings, flags_of(DeploySettings))

# What a table of a config file groups.
TABLES = {"sampling": SAMPLING, "engine": ENGINE, "serve": SERVE, "deploy": DEPLOY}


def load_config(context: typer.Context, file: str | None) -> Config:
    """Runs before any other flag is settled: what the file says becomes the command's defaults."""
    config = Config()
    if file is not None and not context.resilient_parsing:
        tables = {name: {flag.name: flag for flag in group.flags} for name, group in TABLES.items()}
        config = read_config(file, tables)
    values = dict(config.values)
    for several in (param.name for param in context.command.params if param.nargs == -1 and param.name):
        # Click would split the variable at blanks, which a path may hold.
        if (value := os.environ.get(envvar(several)) or values.get(several)) is not None:
            values[several] = [value]
    context.default_map = {**(context.default_map or {}), **values}
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
            callback=load_config,
        ),
    ],
)


def takes(*groups: Flags, **defaults: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the flags of `groups` and --config; it is called with what they build.

    One with a parameter `given` gets the names of those parameters that a model may set and the user did set. One
    with a parameter `rows` gets the same objects once for each model of the config file, with its own settings.
    `defaults` are this command's own, by the flags' names.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        arguments = {group.argument for group in groups}
        own = inspect.signature(command, eval_str=True).parameters
        by_model = NAMES if "given" in own else ()
        made = {*arguments, "given", "rows"}
        kept = [p.replace(kind=p.KEYWORD_ONLY) for n, p in own.items() if n not in made]
        config = () if "config" in own else (_CONFIG,)
        flags = [*config, *(p for group in groups for p in group.parameters(by_model))]
        flags = [p.replace(default=defaults.get(p.name, p.default)) for p in flags]

        @functools.wraps(command)
        def called(**typed: Any) -> Any:
            config = typed.pop("config")
            try:
                built = _built(groups, by_model, typed)
            except InvalidRequest as problem:
                raise config.blame(problem, typed) from None
            if "rows" in own:
                built["rows"] = {n: _row(groups, by_model, typed, n, config) for n in config.models}
            return command(**built, **({"config": config} if "config" in own else {}))

        called.__signature__ = inspect.Signature([*kept, *flags])  # type: ignore[attr-defined]
        called.__annotations__ = {p.name: p.annotation for p in (*kept, *flags)}
        return called

    return decorate


def _built(groups: Sequence[Flags], by_model: Container[str], used: dict[str, Any]) -> dict[str, Any]:
    """What a command is called with: the objects of its groups of flags, and its other parameters."""
    others = dict(used)
    if by_model:
        ours = used["generation_config"] == "none"
        others["given"] = frozenset(n for n in NAMES if ours or used[n] is not None)
    objects = {group.argument: group.build(others) for group in groups}
    return {**others, **objects}


def _row(
    groups: Sequence[Flags], by_model: Container[str], used: dict[str, Any], model: str, config: Config
) -> dict[str, Any]:
    """What the model's own table says, over what is set for all models."""
    try:
        return _built(groups, by_model, {**used, "model": model, **config.models[model]})
    except (InvalidRequest, typer.BadParameter) as problem:
        raise InvalidRequest(
            f"{config.file}: [models.{model}]: {problem}", getattr(problem, "param", None)
        ) from None


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
