"""How commands read their flags and explain themselves: other engines' flags are understood, misspelt ones are
answered with the nearest, and help shows the everyday flags on one screen (`--help-all`: all of them).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from typer.core import TyperCommand, TyperGroup

from outrider.cli.coming_from import COMMANDS, translated
from outrider.errors import InvalidRequest, closest

# What help shows of a command with many flags, in this order.
_SAMPLING = "speculation max_tokens temperature top_p seed stop"
_MACHINE = "weights device threads context config help"
_MEASURED = "model draft prompts limit tasks temperatures batches methods peer what seconds tokens"
_MEASURED += " price_per_hour what_if json_file temperature seed max_tokens speculation device help"
EVERYDAY = {
    "generate": f"model text prompts chat system draft show_origins stats as_json {_SAMPLING} {_MACHINE}",
    "chat": f"model system draft show_origins stats {_SAMPLING} {_MACHINE}",
    "serve": "model host port api_keys key_file allowed_hosts cors_origins served_name max_sequences cache_bytes"
    " weights device threads context draft speculation max_tokens temperature top_p log_format config help",
    "deploy": "config host port key_file min_replicas max_replicas target_requests replica_cpus replica_gpus draft"
    " cache_bytes weights device threads context help",
    "batch": "file out model draft weights device threads context max_sequences cache_bytes config help",
    "bench": _MEASURED,
    "audit": _MEASURED,
    "advise": _MEASURED,
    "bench serve": "url served_name concurrency rate trace prompts input_tokens output_tokens ignore_eos api_key"
    " requests seconds rounds goodput clients json_file html_file help",
    "distill": "model out stage prompts made_up shares temperatures answer_tokens kind continue_from shards layers"
    " loss batch_tokens train_tokens score_prompts device help",
    "improve": "target traffic out dry_run url api_key limit train_tokens learning_rate as_json device help",
}
# The commands, in the order in which people meet them.
ORDER = (
    *("demo", "generate", "chat", "serve", "deploy", "batch", "models", "pairs", "audit", "bench", "advise"),
    *("distill", "doctor", "keys", "draft", "help"),
)
OTHERWISE = f"model draft {_SAMPLING} {_MACHINE} json_file"
LINE = 200  # characters of a command's line in the list of commands
FEW = 14  # flags that need no choosing
TYPES = {"<float>": "X", "<int>": "N", "<int range>": "N", "<str>": "TEXT"}


class Command(TyperCommand):
    commands: Mapping[str, Any] = {}  # sub-commands by name, as `bench` has `serve`

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        if args and args[0] in self.commands:
            sub = self.commands[args[0]]
            return sub.make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        flags = {name: _takes_value(p) for p in self._options(ctx) for name in (*p.opts, *p.secondary_opts)}
        if "--help-all" in args[: args.index("--") if "--" in args else None]:
            ctx.meta["outrider.help_all"] = True
            print(ctx.get_help())
            ctx.exit()
        args = translated(args, flags, any(p.name == "model" for p in self.params))
        _check_names(args, flags, ctx.command_path)
        return super().parse_args(ctx, args)

    def _options(self, ctx: Any) -> list[Any]:
        return [p for p in self.get_params(ctx) if p.param_type_name == "option"]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Plain text in two columns: it fits a screen, and reads the same in a pipe."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        many = len(self._options(ctx)) > FEW
        if many and not ctx.meta.get("outrider.help_all"):
            by_name = {p.name: p for p in self.get_params(ctx)}
            names = EVERYDAY.get(self.name or "", OTHERWISE).split()
            with formatter.section("Everyday flags"):
                formatter.write_dl([_short(by_name[n], ctx) for n in names if n in by_name], col_max=26)
            formatter.write_paragraph()
            formatter.write_text(f"All {len(self._options(ctx))} flags: {ctx.command_path} --help-all")
            formatter.write_text("What a word means, such as draft or coupled: outrider help WORD")
            return
        for panel, some in self._panels(ctx).items():
            with formatter.section(panel):
                rows = [p.get_help_record(ctx) for p in some]
                formatter.write_dl([row for row in rows if row is not None], col_max=28)

    def _panels(self, ctx: Any) -> dict[str, list[Any]]:
        panels: dict[str, list[Any]] = {"Arguments": [], "Options": [], "Server": []}  # these come first
        for p in self.get_params(ctx):
            usual = "Arguments" if p.param_type_name == "argument" else "Options"
            panels.setdefault(getattr(p, "rich_help_panel", None) or usual, []).append(p)
        return {name: some for name, some in panels.items() if some}


class Group(TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if (
            not args and self.no_args_is_help
        ):  # as other tools made with click: help, and the status of wrong usage
            print(ctx.get_help(), file=sys.stderr)
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        places = {name: i for i, name in enumerate(ORDER)} if ctx.parent is None else {}
        return sorted(super().list_commands(ctx), key=lambda name: places.get(name, len(places)))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Each with the whole first sentence of its help, sub-commands of commands among them."""
        rows = []
        for name in self.list_commands(ctx):
            if (found := self.get_command(ctx, name)) is not None and not found.hidden:
                rows.append((name, found.get_short_help_str(LINE)))
                subs = found.commands if isinstance(found, Command) else {}
                rows += [(f"{name} {sub}", one.get_short_help_str(LINE)) for sub, one in subs.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0] if args else ""
        if name and not name.startswith("-") and self.get_command(ctx, name) is None:
            known = self.list_commands(ctx)
            if (answer := COMMANDS.get(name)) and ctx.parent is None:
                raise InvalidRequest(f"no command {name!r} here: {answer}", "command")
            near = closest(name, known)
            hint = f"; did you mean {near!r}?" if near else f"; commands: {', '.join(known)}"
            raise InvalidRequest(f"no command {name!r:.60}{hint}\nsee: {ctx.command_path} --help", "command")
        return super().resolve_command(ctx, args)


def _short(param: Any, ctx: Any) -> tuple[str, str]:
    flags, text = param.get_help_record(ctx) or (param.make_metavar(ctx), param.help or "")
    if param.param_type_name == "argument":
        flags = flags.split()[0]
    for kind, letter in TYPES.items():
        flags = flags.replace(kind, letter)
    sentence = re.split(r"(?<!\.)\.(?= [A-Z]| +\[|$)|  \[", text)[0]
    default = re.search(r"\[default: ([^][]*?)[\])]", text)
    plain = default is None or default[1].startswith("(") or default[1] in ("0", "auto")
    return flags, sentence if plain or default is None else f"{sentence} [{default[1]}]"


def _takes_value(param: Any) -> bool:
    return not param.is_flag and not param.count


def _check_names(args: list[str], flags: dict[str, bool], path: str) -> None:
    """Refuse an unknown flag with the one that was meant."""
    left = iter(args)
    for arg in left:
        name, equals, _ = arg.partition("=")
        if arg == "--":
            return
        if name.startswith("--") and name not in flags:
            near = closest(name, flags)
            hint = f"; did you mean {near}?" if near else ""
            raise InvalidRequest(
                f"no such option: {name:.60}{hint}\nsee: {path} --help-all", name.lstrip("-")
            )
        if flags.get(name) and not equals:
            next(left, None)
