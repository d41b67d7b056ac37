"""What a user may ask of one request: `SamplingParams`, and in it `Speculation`. Complete and valid once built.

A bad value is an error that names itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.errors import InvalidRequest, brief, invalid, suggest, suggesting
from outrider.fields import check_fields, known_options, setting

MODES: tuple[str, ...] = ("coupled", "rejection", "lossy")
RULES: tuple[str, ...] = ("typical", "threshold")
# One way to write JSON, the one json.dumps has: a weak model must not lose itself in whitespace.
JSON_SPELLING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
GRAMMARS: tuple[str, ...] = ("json_schema", "json_object", "regex", "choice", "lark")

MAX_NODES = 63  # one 64-bit ancestor mask a row, one bit to spare for the sign
MAX_ALTERNATIVES = 20
MAX_CHOICES = 128


@suggesting
@dataclass(frozen=True, slots=True)
class Speculation:
    """How one request wants speculation to be done. What is left open (None) the engine decides, step by step."""

    drafter: str | None = None  # a name, several joined by '+', or "none": never draft
    depth: int | None = setting(None, 0, MAX_NODES)  # longest path
    nodes: int | None = setting(None, 0, MAX_NODES)  # draft tokens a step
    tree: tuple[int, ...] | None = None  # a fixed shape: children of each node, by depth
    mode: str = setting("coupled", known=MODES)
    block: bool = True  # rejection on a chain: verify the whole block rather than token by token
    rule: str = setting("typical", known=RULES)  # of lossy
    threshold: float = setting(
        0.3, 0, 1
    )  # lossy: the least probability of an accepted token, under either rule
    delta: float = setting(0.09, 0, 1)  # lossy, typical: how far below the entropy's bound it may fall
    explain: bool = False  # say of every step why it was done as it was

    def __post_init__(self) -> None:
        if self.tree is not None:
            object.__setattr__(self, "tree", _shape(self.tree))
        check_fields(self)

    @property
    def off(self) -> bool:
        return self.drafter == "none" or self.nodes == 0 or self.depth == 0

    @classmethod
    def of(cls, value: Any) -> Speculation:
        """From what users write, in Python, on the command line and in requests alike.

        None, True or "auto": the engine decides. False or "off": never draft. A number: at most so deep. Or the
        fields, as a mapping or as text: "depth=4,mode=coupled".
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            value = _from_text(value)
        if value is None or value is True:
            return cls()
        if value is False:
            return cls(drafter="none")
        if isinstance(value, int):
            return cls(depth=value)
        if not isinstance(value, Mapping):
            raise invalid("speculation", f"is {FORMS}, not {type(value).__name__}")
        return cls(**known_options(cls, value, "speculation option"))


FORMS = "auto, off, a number, true, false or fields such as depth=4,mode=coupled"


def _from_text(text: str) -> bool | int | dict[str, Any]:
    """What a user wrote as text: a word, a number or fields."""
    words = {"auto": True, "on": True, "true": True, "off": False, "none": False, "false": False}
    if (word := text.strip().lower()) in words:
        return words[word]
    if word.isdecimal() and len(word) < 10:
        return int(word)
    options: dict[str, Any] = {}
    for pair in text.split(",") if len(text) < 300 else [""]:
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not name or name in options:
            raise invalid("speculation", f"is {FORMS}, not {text!r:.60}")
        try:
            options[name] = value if name == "tree" else json.loads(value)
        except ValueError:
            options[name] = value
    return options


def _shape(value: Any) -> tuple[int, ...]:
    """A tree's branching by depth, a list or "3x2x1", small enough for one mask a row."""
    if isinstance(value, str):
        value = [int(k) if re.fullmatch(r"\d{1,3}", k) else 0 for k in value.split("x", MAX_NODES)]
    if isinstance(value, (list, tuple)) and len(value) > MAX_NODES:
        raise invalid("tree", f"has more than {MAX_NODES} levels; at most {MAX_NODES} nodes fit a step")
    if not isinstance(value, (list, tuple)) or not value or not all(type(k) is int and k > 0 for k in value):
        raise invalid("tree", "must be a list of whole numbers, children by depth, such as [3, 2, 1]")
    nodes, level = 0, 1
    for children in value:
        level *= children
        nodes += level
        if nodes > MAX_NODES:  # stop here: the product of many large numbers takes hours
            raise invalid("tree", f"has more than {MAX_NODES} nodes; at most {MAX_NODES} fit a step")
    return tuple(value)


@suggesting
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What the user asked. Complete and valid once built; a bad value is an error that names itself."""

    temperature: float = setting(1.0, 0, 100, help="Randomness; 0 takes the likeliest token.")
    top_k: int = setting(0, 0, help="Keep the k likeliest tokens; 0 keeps all.")
    top_p: float = setting(
        1.0, above=0, high=1, help="Keep the likeliest tokens that reach this probability together."
    )
    min_p: float = setting(0.0, 0, 1, help="Drop tokens less likely than this share of the likeliest.")
    repetition_penalty: float = setting(
        1.0, above=0, high=100, help="Divide the logits of tokens in prompt or output."
    )
    frequency_penalty: float = setting(
        0.0, -100, 100, help="Subtract this for every time a token was written."
    )
    presence_penalty: float = setting(0.0, -100, 100, help="Subtract this once a token was written.")
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits of these tokens
    bad_words: tuple[str, ...] = setting(
        (), 1, flag="--bad-word", metavar="TEXT", help="A word never to write. Repeatable."
    )
    seed: int | None = setting(
        None, -(2**63), 2**64 - 1, help="The same seed gives the same answer; drawn if not given."
    )
    n: int = setting(1, 1, MAX_CHOICES, flag="-n --n", help="Answers a prompt.")
    max_tokens: int = setting(256, 1, help="Longest answer, in tokens.")
    min_tokens: int = setting(0, 0, help="Shortest answer, in tokens.")
    stop: tuple[str, ...] = setting((), 1, metavar="TEXT", help="End before this text. Repeatable.")
    stop_token_ids: tuple[int, ...] = setting(
        (), 0, flag="--stop-token-id", metavar="ID", help="End at this token. Repeatable."
    )
    include_stop: bool = setting(False, flag="--include-stop", help="Keep the stop text in the answer.")
    ignore_eos: bool = setting(False, flag="--ignore-eos", help="Write on past the model's own end.")
    logprobs: int | None = setting(
        None, 0, MAX_ALTERNATIVES, help=f"Log-probabilities, and 0-{MAX_ALTERNATIVES} alternatives a token."
    )
    prompt_logprobs: int | None = setting(
        None, 0, MAX_ALTERNATIVES, help="The same for the prompt's own tokens."
    )
    speculation: Speculation = field(default_factory=Speculation)  # or whatever Speculation.of takes
    prediction: str | None = setting(
        None, metavar="TEXT", help="What the answer is expected to be; drafts follow it."
    )
    mark_special: bool = False  # special tokens are in the text, between marks: for readers of channels
    grammar: Mapping[str, Any] | None = None  # one of GRAMMARS and its value, such as {"regex": "[0-9]+"}

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, ())
        check_fields(self)
        if self.min_tokens > self.max_tokens:
            raise invalid(
                "min_tokens", f"must be between 0 and {self.max_tokens} (max_tokens), got {self.min_tokens}"
            )
        if self.grammar is not None:
            _one_grammar(self.grammar)
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        object.__setattr__(self, "speculation", Speculation.of(self.speculation))

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping of names, refusing unknown ones with a suggestion."""
        return cls(**known_options(cls, options, "option"))

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


def _one_grammar(value: Any) -> None:
    if not isinstance(value, Mapping) or len(value) != 1:
        raise invalid("grammar", f"must be a mapping with one of {', '.join(GRAMMARS)}")
    ((kind, body),) = value.items()
    if kind not in GRAMMARS:
        raise InvalidRequest(f"unknown grammar {brief(kind)}{suggest(kind, GRAMMARS)}", "grammar")
    if kind == "choice":
        _strings_of(body, "grammar choice")
    elif kind in ("regex", "lark") and not isinstance(body, str):
        raise invalid("grammar", f"{kind} must be a string")


def _strings_of(value: Any, name: str) -> None:
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(s, str) and s for s in value):
        raise invalid(name, "must be a list of non-empty strings")


def _bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise invalid("logit_bias", "must map token ids to numbers")
    try:
        bias = {int(token): float(weight) for token, weight in value.items()}
    except (TypeError, ValueError):
        raise invalid("logit_bias", "must map token ids to numbers") from None
    for token, weight in bias.items():
        if token < 0 or not -100 <= weight <= 100:
            raise InvalidRequest(f"logit_bias[{token}] must be in [-100, 100], got {weight}", "logit_bias")
    return bias
