"""The words of Outrider. Read this first; every other file speaks them.

A user's `Request` becomes one `Sequence` per choice. Each step gives every picked sequence some known
tokens and a `Draft` of zero or more guessed ones; the runner packs them into one flat `Batch`; the target
turns it into logits; verify turns those into one `Verdict` a sequence; a `StepRecord` says what it cost.

No torch here: a `Batch` holds tensors but only the model and verify look inside.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from outrider.errors import InvalidRequest, suggest, suggesting

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort", "error"]
Origin = Literal["plain", "accepted", "recovered", "bonus"]

Mode = Literal["coupled", "rejection", "lossy"]
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
    """How one request wants to be guessed. What is left open (None) the engine decides, step by step."""

    drafter: str | None = None  # a name, several joined by '+', or "none": never guess
    depth: int | None = None  # longest path
    nodes: int | None = None  # guesses a step
    tree: tuple[int, ...] | None = None  # a fixed shape: children of each node, by depth
    mode: str = "coupled"
    block: bool = True  # rejection on a chain: verify the whole block rather than token by token
    rule: str = "typical"  # lossy: typical | threshold
    threshold: float = 0.3  # lossy: the least probability a guess must have, under either rule
    delta: float = 0.09  # lossy, typical: how far below the entropy's bound it may fall

    def __post_init__(self) -> None:
        for name in ("depth", "nodes"):
            if getattr(self, name) is not None:
                _whole(self, name, 0, MAX_NODES)
        if self.tree is not None:
            object.__setattr__(self, "tree", _shape(self.tree))
        for name, known in (("mode", MODES), ("rule", RULES)):
            value = getattr(self, name)
            if value not in known:
                raise InvalidRequest(f"unknown {name} {value!r}{suggest(str(value), known)}", name)
        if self.drafter is not None and not isinstance(self.drafter, str):
            raise InvalidRequest("drafter must be a name", "drafter")
        _flag(self, "block")
        _number(self, "threshold", 0.0, 1.0)
        _number(self, "delta", 0.0, 1.0)

    @property
    def off(self) -> bool:
        return self.drafter == "none" or self.nodes == 0 or self.depth == 0

    @classmethod
    def of(cls, value: Any) -> Speculation:
        """From what users write, in Python, on the command line and in requests alike.

        None, True or "auto": the engine decides. False or "off": never guess. A number: at most so deep. Or the
        fields, as a mapping or as text: "depth=4,mode=coupled".
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            value = _spoken(value)
        if value is None or value is True:
            return cls()
        if value is False:
            return cls(drafter="none")
        if isinstance(value, int):
            return cls(depth=value)
        if not isinstance(value, Mapping):
            raise InvalidRequest(f"speculation is {SPOKEN}, not {type(value).__name__}", "speculation")
        return cls(**_known(cls, value, "speculation option"))


SPOKEN = "auto, off, a number, true, false or fields such as depth=4,mode=coupled"


def _spoken(text: str) -> bool | int | dict[str, Any]:
    """Words for what is not text."""
    words = {"auto": True, "on": True, "true": True, "off": False, "none": False, "false": False}
    if (word := text.strip().lower()) in words:
        return words[word]
    if word.isdecimal() and len(word) < 10:
        return int(word)
    options: dict[str, Any] = {}
    for pair in text.split(",") if len(text) < 300 else [""]:
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not name or name in options:
            raise InvalidRequest(f"speculation is {SPOKEN}, not {text!r:.60}", "speculation")
        try:
            options[name] = value if name == "tree" else json.loads(value)
        except ValueError:
            options[name] = value
    return options


def _shape(value: Any) -> tuple[int, ...]:
    """A tree's branching by depth, a list or "3x2x1", small enough for one mask a row."""
    if isinstance(value, str) and re.fullmatch(r"\d{1,3}(x\d{1,3})*", value):
        value = [int(children) for children in value.split("x")]
    if not isinstance(value, (list, tuple)) or not value or not all(type(k) is int and k > 0 for k in value):
        raise InvalidRequest(
            "tree must be a list of whole numbers, children by depth, such as [3, 2, 1]", "tree"
        )
    nodes = sum(math.prod(value[: i + 1]) for i in range(len(value)))
    if nodes > MAX_NODES:
        raise InvalidRequest(f"tree {list(value)} has {nodes} nodes; at most {MAX_NODES} fit a step", "tree")
    return tuple(value)


def _known(cls: type, options: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The options, once each name is one of the fields of `cls`."""
    known = [f.name for f in fields(cls)]
    for name in options:
        if name not in known:
            raise InvalidRequest(f"unknown {what} {name!r}{suggest(str(name), known)}", str(name))
    return dict(options)


@suggesting
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What the user asked. Complete and valid once built; a bad value is an error that names itself."""

    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    frequency_penalty: float = 0.0  # over output
    presence_penalty: float = 0.0  # over output
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    seed: int | None = None  # None: one is drawn at admission and reported
    n: int = 1
    max_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False  # keep the stop string in the text
    ignore_eos: bool = False
    logprobs: int | None = None  # None = none; k = the chosen token and k alternatives
    prompt_logprobs: int | None = None  # the same for the prompt's own tokens
    speculation: Speculation = field(default_factory=Speculation)  # or whatever Speculation.of takes
    prediction: str | None = None  # what the user expects the answer to be; guesses follow it
    grammar: Mapping[str, Any] | None = None  # one of GRAMMARS and its value, such as {"regex": "[0-9]+"}

    def __post_init__(self) -> None:
        _number(self, "temperature", 0.0, 100.0)
        _number(self, "top_p", 0.0, 1.0, open_low=True)
        _number(self, "min_p", 0.0, 1.0)
        _number(self, "repetition_penalty", 0.0, 100.0, open_low=True)
        _number(self, "frequency_penalty", -100.0, 100.0)
        _number(self, "presence_penalty", -100.0, 100.0)
        _whole(self, "top_k", 0)
        _whole(self, "n", 1, MAX_CHOICES)
        _whole(self, "max_tokens", 1)
        _whole(self, "min_tokens", 0, self.max_tokens)
        if self.seed is not None:
            _whole(self, "seed", -(2**63), 2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(self, name, 0, MAX_ALTERNATIVES)
        if self.grammar is not None:
            _one_grammar(self.grammar)
        if self.prediction is not None and not isinstance(self.prediction, str):
            raise InvalidRequest("prediction must be a string", "prediction")
        _flag(self, "include_stop")
        _flag(self, "ignore_eos")
        _strings(self, "stop")
        _strings(self, "bad_words")
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        object.__setattr__(self, "speculation", Speculation.of(self.speculation))

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping of names, refusing unknown ones with a suggestion."""
        return cls(**_known(cls, options, "option"))

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


def _number(p: Any, name: str, low: float, high: float, open_low: bool = False) -> None:
    value = getattr(p, name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequest(f"{name} must be a number, not {type(value).__name__}", name)
    inside = low < value <= high if open_low else low <= value <= high
    if math.isnan(value) or not inside:
        raise InvalidRequest(
            f"{name} must be in {'(' if open_low else '['}{low:g}, {high:g}], got {value}", name
        )
    object.__setattr__(p, name, float(value))


def _whole(p: Any, name: str, low: int, high: int | None = None) -> None:
    value = getattr(p, name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be a whole number, not {type(value).__name__}", name)
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequest(f"{name} must be {bound}, got {value}", name)


def _flag(p: Any, name: str) -> None:
    if not isinstance(getattr(p, name), bool):
        raise InvalidRequest(f"{name} must be true or false", name)


def _strings(p: Any, name: str) -> None:
    value = getattr(p, name)
    if value is None:
        value = ()
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, (list, tuple)) or not all(isinstance(s, str) for s in value):
        raise InvalidRequest(f"{name} must be a string or a list of strings, not {value!r}", name)
    if not all(value):
        raise InvalidRequest(f"{name} must not hold an empty string", name)
    object.__setattr__(p, name, tuple(value))


def _token_ids(value: Any) -> tuple[int, ...]:
    if isinstance(value, (list, tuple)) and all(type(i) is int and i >= 0 for i in value):
        return tuple(value)
    raise InvalidRequest("stop_token_ids must be a list of token ids", "stop_token_ids")


def _one_grammar(value: Any) -> None:
    if not isinstance(value, Mapping) or len(value) != 1:
        raise InvalidRequest(f"grammar must be a mapping with one of {', '.join(GRAMMARS)}", "grammar")
    ((kind, body),) = value.items()
    if kind not in GRAMMARS:
        raise InvalidRequest(f"unknown grammar {kind!r}{suggest(str(kind), GRAMMARS)}", "grammar")
    if kind == "choice":
        _strings_of(body, "grammar choice")
    elif kind in ("regex", "lark") and not isinstance(body, str):
        raise InvalidRequest(f"grammar {kind} must be a string", "grammar")


def _strings_of(value: Any, name: str) -> None:
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(s, str) and s for s in value):
        raise InvalidRequest(f"{name} must be a list of non-empty strings", name)


def _bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise InvalidRequest("logit_bias must map token ids to numbers", "logit_bias")
    try:
        bias = {int(token): float(weight) for token, weight in value.items()}
    except (TypeError, ValueError):
        raise InvalidRequest("logit_bias must map token ids to numbers", "logit_bias") from None
    for token, weight in bias.items():
        if token < 0 or not -100 <= weight <= 100:
            raise InvalidRequest(f"logit_bias[{token}] must be in [-100, 100], got {weight}", "logit_bias")
    return bias


@dataclass(frozen=True, slots=True)
class Request:
    """One call. `seed` is settled here; choice `i` derives its own from `(seed, i)`."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    owner: str = ""  # whose cache entries this request may reuse (an API key's digest)
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    stop_ids: frozenset[int] = frozenset()  # end-of-text ids (unless ignored) and the user's own
    prediction_ids: tuple[int, ...] = ()
    grammar: Any = field(default=None, compare=False)  # compiled; each choice moves a copy of it along

    @property
    def edits_logits(self) -> bool:
        """True when penalties, bias, bad words, a minimum length or a grammar change the target's logits."""
        p = self.params
        return bool(
            p.penalised or p.logit_bias or self.bad_word_ids or p.min_tokens or self.grammar is not None
        )


@dataclass(frozen=True, slots=True)
class Draft:
    """A guess as a parent array: `parents[i] < i`, and -1 hangs node i from the last known token."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    # [n, vocab] the distribution each node's token was drawn from, the same for siblings; None: a plain guess
    log_q: Tensor | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents) or len(self.tokens) > MAX_NODES:
            raise ValueError(f"a draft has one parent a token and at most {MAX_NODES} nodes")
        if any(not -1 <= parent < i for i, parent in enumerate(self.parents)):
            raise ValueError("parents must come before their children")

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def chain(cls, tokens: tuple[int, ...] | list[int]) -> Draft:
        return cls(tuple(tokens), tuple(range(-1, len(tokens) - 1)))

    @property
    def depths(self) -> list[int]:
        """1 for a child of the last known token, and one more a generation."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    @property
    def ancestors(self) -> list[int]:
        """For each node the set of nodes on its path, itself included, as bits."""
        masks: list[int] = []
        for node, parent in enumerate(self.parents):
            masks.append((masks[parent] if parent >= 0 else 0) | 1 << node)
        return masks

    def rank(self, node: int) -> int:
        """Which choice it is of its parent's: how many siblings come before it."""
        return self.parents[:node].count(self.parents[node])

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child down to `node`, itself included."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]


NO_DRAFT = Draft()


@dataclass(slots=True, eq=False)
class Sequence:
    """A request while it lives: one of its choices, the tokens so far, and how many of them are cached."""

    request: Request
    choice: int
    seed: int  # signed 64-bit
    tokens: list[int]  # prompt, then output
    row: int = -1  # of the slot table; -1 while waiting
    cached: int = 0  # tokens whose keys and values are in their slots
    released: int = 0  # times it gave its row and slots back
    reused: int = 0  # of the prompt, found in the cache when first admitted
    finish_reason: FinishReason | None = None
    stop: str | None = None  # the stop string that ended it
    logprobs: list[TokenLogprob] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    steps: int = 0  # passes of the target that emitted tokens
    drafted: int = 0
    accepted: int = 0
    grammar: Any = None  # where this choice stands in its grammar
    guesses: list[tuple[int, int]] = field(
        default_factory=list
    )  # nodes and accepted, for every step that guessed
    deepest: int = 0  # the longest path guessed
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)  # the first token has none
    problem: str | None = None  # what went wrong, when the finish reason is an error
    arrived: float = 0.0  # times of the clock that counts up: handed in, first moved, first token, last token
    started: float = 0.0
    first: float = 0.0
    ended: float = 0.0

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def pending(self) -> int:
        """Known tokens still to be fed; one while decoding."""
        return len(self.tokens) - self.cached


@dataclass(slots=True)
class Work:
    """A sequence in a step, and how many of its known tokens are fed. Their slots are already at the end of its row."""

    sequence: Sequence
    known: int
    drafted: int = 0  # slots taken for draft nodes after them

    @property
    def emits(self) -> bool:
        """Whether this step reaches the end of what is known, so that a new token follows."""
        return self.known == self.sequence.pending

    @property
    def scored(self) -> int:
        """How many of the known tokens precede a token of the prompt whose log-probability is wanted."""
        if self.sequence.request.params.prompt_logprobs is None or self.sequence.choice:
            return 0
        return max(0, min(self.known, self.sequence.prompt_len - 1 - self.sequence.cached))


@dataclass(frozen=True, slots=True)
class Options:
    """What the runner can do for the work of a step. Without resident rows every sequence may have any draft."""

    size: int = (
        0  # sequences that the resident rows have room for, padding counted; 0 where nothing is resident
    )
    resident: tuple[
        bool, ...
    ] = ()  # by item of work: it shares one drafter and one draft tree with the others
    trees: Mapping[str, tuple[tuple[int, int], ...]] = field(
        default_factory=dict
    )  # of resident rows, by drafter
    behind: Callable[[str], int] = lambda drafter: (
        0
    )  # tokens a drafter must read before it can draft for them
    max_depth: int = 0  # of a chain of the resident rows

    def is_resident(self, item: int) -> bool:
        return self.size > 0 and self.resident[item]


@dataclass(frozen=True, slots=True)
class Bet:
    """What one sequence may guess this step: with which drafter, how many nodes, how deep, in which shape."""

    drafter: str = "none"
    nodes: int = 0
    depth: int = 0
    tree: tuple[int, ...] | None = None  # a fixed shape; None with nodes > depth: grown best first
    mode: str = "coupled"


NO_BET = Bet()


@dataclass(frozen=True, slots=True)
class Plan:
    """One bet for each item of work, and why. `NO_BET` is plain decoding."""

    bets: tuple[Bet, ...]
    reasons: tuple[str, ...] = ()


@dataclass(slots=True)
class TokenLogprob:
    """The target's own log-probability of a token it emitted, and of the likeliest alternatives."""

    token: int
    logprob: float
    alternatives: list[tuple[int, float]]


@dataclass(slots=True)
class Verdict:
    """What the target said of one sequence: `accepted` draft nodes in path order, then `tokens[-1]`.

    `tokens` are all tokens emitted this step (the accepted ones and the one after; of several plain passes told of
    together, all); empty while a prompt is still being read. `logprobs` runs parallel to `tokens` when asked for.
    """

    tokens: list[int]
    accepted: list[int]
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """What one step added to one choice of a request. The last has a finish_reason."""

    request_id: str
    choice: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(slots=True)
class Batch:
    """The model's input, flat. R rows over S sequences; every tensor is on the model's device.

    Row r sits at `positions[r]` and sees the first `prefix[r]` entries of its sequence's slot table, plus
    the entry `prefix[r] + i` for every set bit i of `ancestors[r]`. A known token is prefix alone (its own
    slot is the last entry); a guessed node sees all known tokens and its path, itself included.
    """

    ids: Tensor  # [R] int64
    positions: Tensor  # [R] int32
    slots: Tensor  # [R] int32, where this row's keys and values go
    table_rows: Tensor  # [R] int32, the row of `table` that belongs to this row's sequence
    prefix: Tensor  # [R] int32
    ancestors: Tensor  # [R] int64
    table: Tensor  # [sequences, context] int32, slot of every token
    logit_rows: Tensor  # [L] int64, rows whose logits are wanted

    @property
    def rows(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        return Batch(**{f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)})


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one sequence's bet in one step."""

    sequence: Sequence
    bet: Bet
    drafted: int  # nodes
    deepest: int  # the longest path guessed
    accepted: int
    straight: int  # of the accepted, those before the first that was not the drafter's first choice


@dataclass(slots=True)
class StepRecord:
    """What a step cost and bought. The only source for planner, metrics, dashboard and bench."""

    rows: int
    sequences: int
    known: int  # prompt and already emitted tokens fed
    drafted: int
    accepted: int
    emitted: int
    plan_s: float
    draft_s: float
    target_s: float
    verify_s: float
    total_s: float
    outcomes: list[Outcome] = field(default_factory=list)  # none of a round in which nobody could guess
    reasons: tuple[str, ...] = ()  # why the planner bet as it did, one for each item of work
    plain_s: float = 0.0  # what plain steps would have cost for the same tokens; 0 while a prompt is read
    # Resident rows: their drafter, the depth and nodes of their draft tree, and how many sequences they have room for.
    captured: tuple[str, tuple[int, int], int] | None = None
    passes: int = 1  # of the target, one after the other, told of together; rows are those of one
