"""From a request's grammar to llguidance's matcher, within limits. No torch, so that the trial process starts quickly.

llguidance bounds most of its work, but it follows references and rules by recursion, and a stack overflow ends the
process. So the depth is measured first, and compiling has a thread of its own with a large enough stack. Matching does
not recurse.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeVar

from outrider.errors import InvalidRequest, OutriderError, install
from outrider.sampling_params import JSON_SPELLING
from outrider.verify.grammar_depth import lark_depth, schema_depth

# Remainders the numbers of a grammar may have to be distinguished by, all `multipleOf` together: as many states
# are made while compiling, and llguidance has no limit of its own (ten million take a minute and gigabytes).
MOST_REMAINDERS = 100_000
# Levels of schemas or rules within each other, references followed; one takes 2 to 5 KB of stack.
DEEPEST = 800
# Random texts on which a grammar is tried: how many, and how long each and all together may be.
WALKS = 3
WALK_TOKENS = 64
WALK_SECONDS = 1.0
STACK = 64 << 20  # bytes for compiling; touched only as far as needed

T = TypeVar("T")
_starting = threading.Lock()  # the size of a stack is set for the whole process


class Matchers:
    """Makes matchers for one tokenizer. Made once: reading the vocabulary takes about half a second."""

    def __init__(
        self, tokenizer_json: str, vocab: int, ends: Sequence[int], deepest: int = DEEPEST, stack: int = STACK
    ) -> None:
        try:
            import llguidance  # an extra: only structured output needs it
            from llguidance.gbnf_to_lark import any_to_lark
        except ImportError:
            raise OutriderError(f"structured output needs llguidance; {install('grammar')}") from None
        self._matcher, self._to_lark = llguidance.LLMatcher, any_to_lark
        self._tokenizer = llguidance.LLTokenizer(tokenizer_json, n_vocab=vocab, eos_token=list(ends))
        self._deepest, self._stack, self._ends = deepest, stack, frozenset(ends)

    def make(self, grammar: Mapping[str, Any]) -> Any:
        """From `{"json_schema": ...}`, `{"json_object": true}`, `{"regex": ...}`, `{"choice": [...]}` or
        `{"lark": ...}`.
        """
        ((kind, value),) = grammar.items()
        try:
            source = self._source(kind, value)
        except (Exception, RecursionError) as wrong:  # the readers of each form raise their own
            raise InvalidRequest(f"grammar: {kind} cannot be read: {wrong}", "grammar") from None
        matcher, problem = _with_stack(self._stack, lambda: self._compiled(source))
        if problem:
            raise InvalidRequest(f"grammar: {kind} does not compile: {problem}", "grammar")
        return matcher

    def _compiled(self, source: str) -> tuple[Any, str]:
        matcher = self._matcher(self._tokenizer, source, log_level=0)
        if not matcher.is_error():
            try:
                matcher.compute_bitmask()  # endless recursion shows at the first mask
            except Exception as error:
                return matcher, first_line(f"{type(error).__name__}: {error}")
        return matcher, first_line(matcher.get_error())

    def failure_in_use(self, matcher: Any) -> str | None:
        """What breaks the matcher on each of a few random texts that its grammar allows; None if one goes well. Some
        limits of llguidance are met only while a text is written.
        """
        failure, until = None, time.monotonic() + WALK_SECONDS
        for seed in range(WALKS):
            walker, draw = matcher.deep_copy(), random.Random(seed)
            for _ in range(WALK_TOKENS):
                token = self._some_token(walker.compute_bitmask(), draw)
                if walker.is_error() or token is None or time.monotonic() > until:
                    break
                walker.consume_token(token)
            if not walker.is_error():
                return None
            failure = first_line(walker.get_error())
        return failure

    def _some_token(self, bits: bytes, draw: random.Random) -> int | None:
        """The first that is allowed from a random place on; none if that is an end."""
        at = draw.randrange(len(bits))
        turned = bits[at:] + bits[:at]
        if not (found := turned.lstrip(b"\0")):
            return None
        place = (len(turned) - len(found) + at) % len(bits)
        token = 8 * place + draw.choice([bit for bit in range(8) if found[0] >> bit & 1])
        return None if token in self._ends else token

    def _source(self, kind: str, value: Any) -> str:
        if kind == "json_schema":
            schema = value if isinstance(value, str) else json.dumps(value)
            _check_remainders(_multiples(schema))
            read = json.loads(schema)
            self._check_depth(schema_depth(read))
            return self._matcher.grammar_from_json_schema(_spelled(read))
        if kind == "json_object":
            return self._matcher.grammar_from_json_schema(_spelled({"type": "object"}))
        if kind == "regex":
            return self._matcher.grammar_from_regex(value)
        if kind == "choice":
            # One terminal: as many rules would be too many for the parser from two thousand on.
            return self._matcher.grammar_from_lark(
                "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice) for choice in dict.fromkeys(value))
            )
        lark = self._to_lark(value)  # GBNF becomes Lark, Lark stays
        _check_remainders(_embedded_multiples(lark))
        self._check_depth(lark_depth(lark) + max(map(schema_depth, _embedded(lark)), default=0))
        return self._matcher.grammar_from_lark(lark)

    def _check_depth(self, depth: int) -> None:
        if depth > self._deepest:
            raise ValueError(
                f"it is {depth} levels deep, references and rules followed; at most {self._deepest} are allowed"
            )


def _with_stack(size: int, work: Callable[[], T]) -> T:
    """The result of some work in a thread with a stack of that size."""
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:
            failure.append(error)

    with _starting:
        usual = threading.stack_size(size)
        try:
            thread = threading.Thread(target=run, name="grammar-compiler", daemon=True)
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


def _spelled(schema: Any) -> str:
    """The schema, with canonical white space unless it sets its own."""
    return json.dumps({"x-guidance": JSON_SPELLING, **schema} if isinstance(schema, dict) else schema)


def _multiples(text: str) -> Iterator[Any]:
    """Every `multipleOf` in the JSON that a text begins with."""
    found: list[Any] = []

    def note(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found.extend(value for name, value in pairs if name == "multipleOf")
        return dict(pairs)

    read = json.JSONDecoder(object_pairs_hook=note, parse_int=Decimal, parse_float=Decimal)
    read.raw_decode(text.lstrip())
    return iter(found)


def _embedded_multiples(lark: str) -> Iterator[Any]:
    """The same of every schema in a grammar. What cannot be read is none, or will not be read by llguidance."""
    for mark in re.finditer("%json", lark):
        with contextlib.suppress(ValueError, ArithmeticError, RecursionError):
            yield from _multiples(lark[mark.end() :])


def _check_remainders(multiples: Iterator[Any]) -> None:
    """Powers of ten cost nothing: what counts is a number's digits without the zeros at its end."""
    digits = {
        int("".join(map(str, number.normalize().as_tuple().digits)))
        for number in multiples
        if isinstance(number, Decimal) and number.is_finite()
    }
    if math.prod(digits) > MOST_REMAINDERS:
        raise ValueError(f"multipleOf asks for more than {MOST_REMAINDERS} remainders to be distinguished")


def _embedded(lark: str) -> Iterator[Any]:
    """The schemas in a grammar that can be read."""
    for mark in re.finditer("%json", lark):
        with contextlib.suppress(ValueError, RecursionError):
            yield json.JSONDecoder().raw_decode(lark[mark.end() :].lstrip())[0]


def first_line(message: str) -> str:
    """Everything after it is the matcher's inner state."""
    return message.strip().partition("\n")[0]
