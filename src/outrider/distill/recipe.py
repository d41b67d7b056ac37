"""Every option of a distillation, complete when built, never changed after; as JSON and back.

Each option belongs to a stage. A folder that already holds results of a stage refuses another recipe for it, and for
those before it. Where a run computes (device, threads) is no part of a recipe: it changes no answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from math import inf
from typing import Any

from outrider.errors import InvalidRequest, invalid, suggesting
from outrider.fields import check_fields, known_options, setting

STAGES = ("answer", "train", "score")
KINDS = ("eagle", "lm")
LAYOUTS = ("outrider", "eagle3", "speculators")
LOSSES = ("hybrid", "overlap", "kl")
DTYPES = ("auto", "float32", "bfloat16")
# Options of one kind only.
HEAD_ONLY = (
    "layout",
    "taps",
    "tap_norms",
    "norm_output",
    "shared_head",
    "vocabulary",
    "unroll",
    "decay",
    "deep_share",
)
LM_ONLY = ("hidden", "size")
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}


def read_count(text: str) -> int:
    """`20M` -> 20000000: numbers of tokens, not bytes, so that K is a thousand."""
    match = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?)\s*([KMGB]?)", str(text).strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a number of tokens; write 300000, 20M or 1.5G")
    return round(float(match[1].replace("_", "")) * UNITS[match[2].upper()])


def _option(stage: str, default: Any, text: str, low: float = -inf, high: float = inf, **more: Any) -> Any:
    """An option of a stage. `text` is the help of its flag."""
    return setting(default, low, high, stage=stage, help=text, **more)


_answer, _train, _score = (partial(_option, stage) for stage in STAGES)


@suggesting
@dataclass(frozen=True, slots=True)
class Recipe:
    """What to make and of what. 0 or nothing means: chosen by what the target is like."""

    target: str = _answer("smollm2-135m", "")  # a folder, a .gguf file, an alias or a hub id
    prompts: tuple[str, ...] = _answer(
        (),
        'Prompts, one a line: text, or JSON with "turns", "messages" or "prompt", and perhaps "task". Repeatable.',
        metavar="FILE",
    )
    made_up: int = _answer(0, "Prompts that the target makes up itself, beside those.", 0, metavar="N")
    joined: int = _answer(
        0, "Long prompts: several texts of the files, to be summarized or asked about.", 0, metavar="N"
    )
    shares: Mapping[str, float] = field(default_factory=dict, metadata={"stage": "answer"})  # by task
    follow_ups: float = _answer(
        0.0, "Share of conversations with one more turn, made up.", 0, 1, metavar="SHARE"
    )
    temperatures: tuple[float, ...] = _answer(
        (0.0, 0.7, 1.0), "Temperatures of answers, in equal parts.", 0, 2
    )
    max_tokens: int = _answer(512, "Longest answer, in tokens.", 1)
    answer_tokens: int = _answer(20_000_000, "Tokens of all answers together.", 1)
    context: int = _answer(2048, "Longest conversation, in tokens.", 16)
    seed: int = _answer(0, "The same seed and recipe give the same answers.", 0, 2**53 - 1)

    kind: str = _train(
        "eagle", "What to train: a head on the target's hidden states, or a small model.", known=KINDS
    )
    continue_from: str = _train(
        "",
        "Go on from this draft, or from the one in this --out. With more --layers, a head grows.",
        flag="--continue",
        metavar="DIR",
    )
    shards: tuple[str, ...] = _train(
        (),
        "A folder of conversations to learn from, too, such as what a server kept. Repeatable.",
        metavar="DIR",
    )
    layout: str = _train("outrider", "How a head is saved; other engines read the others.", known=LAYOUTS)
    taps: tuple[int, ...] = _train(
        (), "Layers whose input a head reads; the number of layers stands for the last one's output.", 0
    )
    tap_norms: bool = _train(True, "A norm per tap before they are fused.")
    norm_output: bool = _train(True, "Feed the normed hidden state back.")
    shared_head: bool = _train(False, "Take rows of the target's own head for logits.")
    vocabulary: int = _train(0, "Tokens a head knows; 0: all up to 64k, the most frequent 32k above.", 0)
    layers: int = _train(0, "Layers of the draft; 0: one of a head, an lm as --size says.", 0)
    hidden: int = _train(0, "Width of an lm; 0: as --size says.", 0)
    heads: int = _train(0, "Attention heads; 0: as the target's shape says.", 0)
    kv_heads: int = _train(0, "Heads of keys and values; 0: as the target's shape says.", 0)
    intermediate: int = _train(0, "Width of the MLP; 0: as the target's shape says.", 0)
    size: float = _train(0.03, "Size of an lm as a share of the target's.", 0.001, 1, metavar="SHARE")
    loss: str = _train("hybrid", "The loss that training minimises.", known=LOSSES)
    loss_temperature: float = _train(
        1.0, "Temperature of the two distributions that the loss compares.", 0.1, 2
    )
    unroll: int = _train(5, "Steps that a head is trained to go on its own output.", 1, 16)
    decay: float = _train(0.8, "Weight of such a step by that of the one before.", 0, 1)
    deep_share: float = _train(
        1.0,
        "Share of places, drawn anew in each step, that such steps learn from after the first; less is quicker.",
        0.01,
        1,
        metavar="SHARE",
    )
    learning_rate: float = _train(5e-4, "Highest learning rate.", 1e-8, 1)
    weight_decay: float = _train(0.01, "Weight decay of matrices.", 0, 1)
    clip: float = _train(1.0, "Largest norm of the gradients; 0: any.", 0)
    warm_up: float = _train(
        0.02, "Share of training in which the learning rate rises.", 0, 1, metavar="SHARE"
    )
    batch_tokens: int = _train(16384, "Tokens of a batch, padding counted.", 16)
    train_tokens: int = _train(0, "Tokens to train on; 0: three times over all there are.", 0)
    checkpoint_steps: int = _train(500, "Steps between two checkpoints.", 1)
    validate_steps: int = _train(500, "Steps between two validations on held-out conversations.", 1)
    dtype: str = _train("auto", "Number format of training's matmuls.", known=DTYPES)

    score_prompts: tuple[str, ...] = _score(
        (), "Prompts to score with. Repeatable. By default those that were held out.", metavar="FILE"
    )
    score_limit: int = _score(16, "Prompts of a task, at most.", 1)
    score_tokens: int = _score(128, "Longest answer, in tokens.", 1)
    score_temperatures: tuple[float, ...] = _score((0.0, 0.7), "Temperatures, one after the other.", 0, 2)
    depth: int = _score(5, "Depth of drafts.", 1, 16)
    tree_nodes: int = _score(24, "Nodes of draft trees.", 1, 64)

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("temperatures", "score_temperatures"):
            if not getattr(self, name):
                raise invalid(name, "needs one temperature at least")
        self._check_shares()
        self._check_used()
        if not (self.answers or self.shards):
            raise InvalidRequest(
                "there is nothing to learn from: give --prompts FILE, --made-up N, or --shards DIR", "prompts"
            )
        if self.joined and not self.prompts:
            raise InvalidRequest("prompts are joined of the texts in files: give --prompts FILE", "joined")
        if self.batch_tokens < self.context:
            raise invalid(
                "batch_tokens",
                f"({self.batch_tokens}) must hold one conversation of {self.context} (context)",
            )

    def _check_used(self) -> None:
        """What would make no difference is refused, not ignored."""
        other, names = ("lm", LM_ONLY) if self.kind == "eagle" else ("eagle", HEAD_ONLY)
        for one in fields(self):
            if one.name in names and getattr(self, one.name) != one.default:
                raise InvalidRequest(
                    f"{one.name} is for a draft of kind {other}, and this is one of kind {self.kind}",
                    one.name,
                )

    def _check_shares(self) -> None:
        for task, share in self.shares.items():
            if type(share) not in (int, float) or not 0 <= share <= 1:
                raise InvalidRequest(
                    f"the share of {task!r} must be between 0 and 1, got {share!r}", "shares"
                )
        if sum(self.shares.values()) > 1 + 1e-9:
            raise invalid("shares", f"add up to {sum(self.shares.values()):g}, more than 1")
        if "made-up" in self.shares and not self.made_up:
            raise InvalidRequest("a share of made-up prompts needs some: --made-up N", "shares")

    @property
    def answers(self) -> bool:
        """Whether the target is to answer anything: else there are only shards."""
        return bool(self.prompts or self.made_up)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Recipe:
        """Build from a mapping of names, refusing unknown ones with a suggestion."""
        return cls(**known_options(cls, options, "option of a recipe"))

    def to_json(self) -> dict[str, Any]:
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}

    def text(self) -> str:
        return json.dumps(self.to_json(), indent=2) + "\n"

    def changed(self, before: Recipe) -> dict[str, str]:
        """Options that differ, and the stage of each."""
        return {
            one.name: one.metadata["stage"]
            for one in fields(self)
            if getattr(self, one.name) != getattr(before, one.name)
        }
