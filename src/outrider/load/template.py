"""A model's chat template: messages in, the text of the conversation out.

The template comes with the model and is not trusted: it runs in jinja2's immutable sandbox, and with limits
on time and on the size of what it makes, so that it can neither reach out nor hang. Whatever it raises is a
`TemplateFailed`. Turning the text into tokens is for tokenizer.py.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from outrider.errors import InvalidRequest, TemplateFailed
from outrider.load.tokenizer import Tokenizer

MAX_SOURCE = 1 << 20  # characters
MAX_TEXT = 8 << 20  # characters of output, and of any string on the way
MAX_ITEMS = 100_000  # in a range or a list
MAX_BITS = 4096  # of a whole number
MAX_SECONDS = 5.0
MARK = "\ufdd0"  # a noncharacter, which no text has: literal.py breaks control tokens with it
_ESCAPED_MARK = re.compile(r"(?<!\\)((?:\\\\)*)\\ufdd0")

_deadline: ContextVar[float] = ContextVar("deadline", default=float("inf"))


class ChatTemplate:
    """Compiled on first use, so that a model with a broken template still serves plain prompts."""

    def __init__(self, source: str, bos: str | None = None, eos: str | None = None) -> None:
        self.source = source
        self.bos = bos or ""
        self.eos = eos or ""

    @classmethod
    def for_tokenizer(cls, source: str | None, tokenizer: Tokenizer) -> ChatTemplate | None:
        """With that tokenizer's own special tokens; None for a model that has no template."""
        if source is None:
            return None
        bos = "" if tokenizer.bos_id is None else tokenizer.token_string(tokenizer.bos_id)
        eos = tokenizer.token_string(tokenizer.eos_ids[0]) if tokenizer.eos_ids else ""
        return cls(source, bos, eos)

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        if len(self.source) > MAX_SOURCE:
            raise TemplateFailed(f"the chat template is longer than {MAX_SOURCE} characters", "messages")
        return _Sandbox().from_string(self.source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        names = {"bos_token": self.bos, "eos_token": self.eos, "tools": tools, "documents": None, **extra}
        clean = checked_messages(messages)
        limit = _deadline.set(time.monotonic() + MAX_SECONDS)
        try:
            chunks = self._template.generate(
                messages=clean, add_generation_prompt=add_generation_prompt, **names
            )
            return _bounded_join(chunks)
        except TemplateFailed:
            raise
        except RecursionError:
            raise TemplateFailed("the chat template failed: it recurses without end", "messages") from None
        except Exception as problem:  # template code can raise anything at all
            what = str(problem) or type(problem).__name__
            raise TemplateFailed(f"the chat template failed: {what}", "messages") from None
        finally:
            _deadline.reset(limit)


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """A list of `{"role": str, "content": str, ...}`; contents given as parts become one text."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidRequest("messages must be a list of at least one message", "messages")
    return [_checked_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _checked_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} must be an object, not {type(message).__name__}", where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{where} needs a role, such as 'user'", f"{where}.role")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        content = ""  # a turn that only calls tools says nothing
    if isinstance(content, (list, tuple)):
        content = "\n".join(_checked_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    if not isinstance(content, str):
        raise InvalidRequest(
            f"{where} needs a content that is a text or a list of text parts", f"{where}.content"
        )
    return {**message, "content": content}


def _checked_part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or part.get("type", "text") != "text":
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise InvalidRequest(f"{where} is of type {kind!r}; only text is supported", where)
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where} has no text", where)
    return text


# ------------------------------------------------------------------------------------------------ the limits


def _tick() -> None:
    if time.monotonic() > _deadline.get():
        raise SecurityError(f"it ran longer than {MAX_SECONDS:g} s")


def _refuse_text() -> SecurityError:
    return SecurityError(f"it makes a text longer than {MAX_TEXT} characters")


def _bounded_join(parts: Iterable[str]) -> str:
    kept, size = [], 0
    for part in parts:
        kept.append(part)
        size += len(part)
        if size > MAX_TEXT:
            raise _refuse_text()
        _tick()
    return "".join(kept)


def _checked(value: Any) -> Any:
    """Refuse a text or number that is too large. Cheap: containers are looked into only by `_as_text`."""
    if isinstance(value, str):
        if len(value) > MAX_TEXT:
            raise _refuse_text()
    elif isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise SecurityError(f"it makes a number of more than {MAX_BITS} bits")
    return value


def _as_text(value: Any) -> Any:
    """Refuse what is about to become text if that would be too long. A list within itself many times over is
    small until it is written out."""
    if isinstance(value, (list, tuple, dict, set)):
        _check_nest(value)
    return _checked(value)


def _check_nest(value: Any) -> None:
    stack, items, text = [value], 0, 0
    while stack:
        item = stack.pop()
        items += 1
        if isinstance(item, str):
            text += len(item)
        elif isinstance(item, dict):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, (list, tuple, set)):
            stack.extend(item)
        if items + len(stack) > 10 * MAX_ITEMS or text > MAX_TEXT:
            raise SecurityError("it makes a list or object that is too large")


def _bounded_range(*args: int) -> range:
    numbers = range(*args)
    if len(numbers) > MAX_ITEMS:
        raise SecurityError(f"range() of more than {MAX_ITEMS} items")
    return numbers


_bounded_range.__name__ = "range"  # what a refusal calls it


def _ticking(items: Any) -> Iterator[Any]:
    """Every `for` of a template runs over this, so that loops without output meet the deadline too."""
    for item in items:
        _tick()
        yield item


def _power(left: Any, right: Any) -> Any:
    if abs(right) > MAX_BITS or (isinstance(left, int) and left.bit_length() * abs(right) > MAX_BITS):
        raise SecurityError(f"{left} ** {right} is too large")
    return left**right


def _product(left: Any, right: Any) -> Any:
    for many, times in ((left, right), (right, left)):
        limit = MAX_TEXT if isinstance(many, str) else MAX_ITEMS
        if isinstance(many, (str, list, tuple)) and isinstance(times, int) and len(many) * times > limit:
            raise SecurityError("it repeats a text or list too often")
    return _checked(left * right)


def _sum(left: Any, right: Any) -> Any:
    if isinstance(left, str) and isinstance(right, str) and len(left) + len(right) > MAX_TEXT:
        raise _refuse_text()
    if isinstance(left, list) and isinstance(right, list) and len(left) + len(right) > MAX_ITEMS:
        raise SecurityError(f"it makes a list of more than {MAX_ITEMS} items")
    return left + right


def _remainder(left: Any, right: Any) -> Any:
    if isinstance(left, str):
        _check_call(left, "format", right if isinstance(right, tuple) else (right,), {})
    return left % right


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {"*": _product, "**": _power, "+": _sum, "%": _remainder}


def _check_call(subject: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse, before it runs, a call that would make something huge of small things."""
    _tick()
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > MAX_TEXT:
            raise SecurityError(f"{name}() with the number {value}")
        if name in _GROWTH:
            _as_text(value)
    if isinstance(subject, str) and name in _GROWTH and _GROWTH[name](subject, args) > MAX_TEXT:
        raise _refuse_text()


def _replaced_size(subject: str, args: Sequence[Any]) -> int:
    if len(args) < 2:
        return 0
    old, new = str(args[0]), str(args[1])
    return len(subject) + (subject.count(old) if old else len(subject) + 1) * len(new)


def _joined_size(subject: str, args: Sequence[Any]) -> int:
    items = args[0] if args and isinstance(args[0], (list, tuple)) else ()
    return sum(len(str(item)) + len(subject) for item in items)


def _formatted_size(subject: str, args: Sequence[Any]) -> int:
    """At most: every field is as wide as the widest number written in the format, or takes every argument."""
    widest = max((int(digits[:9]) for digits in re.findall(r"\d+", subject)), default=0)
    largest = max((arg if isinstance(arg, int) else len(str(arg)) for arg in args), default=0)
    return len(subject) + len(re.findall(r"[{%]", subject)) * (widest + largest)


# How long the text of a call will be, where small arguments can make a long one.
_GROWTH: dict[str, Callable[[str, Sequence[Any]], int]] = {
    "replace": _replaced_size,
    "join": _joined_size,
    "format": _formatted_size,
}

# Filters that pick from a list or object and write none of it out.
_KEEP_SHAPE = frozenset(
    (
        *(
            "attr",
            "batch",
            "count",
            "d",
            "default",
            "dictsort",
            "first",
            "groupby",
            "items",
            "last",
            "length",
        ),
        *("list", "map", "max", "min", "random", "reject", "rejectattr", "reverse", "select", "selectattr"),
        *("slice", "sort", "sum", "unique"),
    )
)


def _guarded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # Some filters are handed the context or environment before the value they filter.
    at = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        subject, rest = (args[at], args[at + 1 :]) if len(args) > at else (None, ())
        if name not in _KEEP_SHAPE:
            _as_text(subject)
        if name == "join":
            items = list(_ticking(subject))
            separator = str(rest[0] if rest else kwargs.get("d", ""))
            _check_call(separator, "join", [items], {})
            args = (*args[:at], items, *rest)
        elif name in ("indent", "wordwrap", "center", "batch", "slice", "truncate", "round"):
            _check_widths(name, subject, [*rest, *kwargs.values()])
        else:
            _check_call(subject, name, rest, kwargs)
        return _checked(function(*args, **kwargs))

    return guarded


def _check_widths(name: str, subject: Any, values: Sequence[Any]) -> None:
    _tick()
    lines = subject.count("\n") + 1 if isinstance(subject, str) else 1
    for value in values:
        width = value if isinstance(value, int) else len(value) if isinstance(value, str) else 0
        if width * lines > MAX_ITEMS:
            raise SecurityError(f"{name} with a width of {width}")


# -------------------------------------------------------------------------------------------- the environment


class _Compiler(CodeGenerator):
    """Writes Python from a template; `~` is made to pass the limits."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - jinja2's name
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it only renders what it holds."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    code_generator_class = _Compiler
    intercepted_binops = frozenset(_OPERATORS)
    concat = staticmethod(_bounded_join)  # what captured blocks and macros join with

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _Generation],
            finalize=_as_text,
        )
        self.filters["tojson"] = _tojson
        for name, function in list(self.filters.items()):
            self.filters[name] = _guarded_filter(name, function)
        self.filters["_ticking"] = _ticking
        self.globals.pop("lipsum", None)
        self.globals |= {
            "range": _bounded_range,
            "raise_exception": _raise,
            "strftime_now": lambda form: datetime.datetime.now().strftime(form),
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "_ticking", [], [], None, None, lineno=loop.lineno)
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _tick()
        return _OPERATORS[operator](left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        name = getattr(function, "__name__", "")
        _check_call(getattr(function, "__self__", None), name, args, kwargs)
        return _checked(super().call(context, function, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` reaches `call` wrapped, without the text it formats: check that here."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def guarded(*args: Any, **kwargs: Any) -> str:
            _check_call(value.__self__, "format", (*args, *kwargs.values()), {})
            return wrapped(*args, **kwargs)

        return guarded

    def joined(self, parts: Sequence[Any]) -> str:
        """`a ~ b`."""
        return _bounded_join(str(_as_text(part)) for part in parts)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes for HTML, which no model was trained on."""
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return _ESCAPED_MARK.sub(rf"\1{MARK}", text) if ensure_ascii else text
