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
from typing import Any

from outrider.errors import InvalidRequest, suggesting
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


_answer, _train, _score = (partial(setting, stage=stage) for stage in STAGES)


@suggesting
@dataclass(frozen=True, slots=True)
class Recipe:
    """What to make and of what. 0 or nothing means: chosen by what the target is like."""

    target: str = _answer("smollm2-135m")  # a folder, a .gguf file, an alias or a hub id
    seed: int = _answer(0, 0, 2**53 - 1)
    context: int = _answer(2048, 16)  # longest conversation, in tokens
    prompts: tuple[str, ...] = _answer(())  # files of rows
    shares: Mapping[str, float] = field(default_factory=dict, metadata={"stage": "answer"})  # by task
    made_up: int = _answer(0, 0)  # prompts that the target makes up itself
    joined: int = _answer(0, 0)  # long prompts, of several texts of the files
    follow_ups: float = _answer(0.0, 0, 1)  # share of conversations that get one more turn, made up
    temperatures: tuple[float, ...] = _answer((0.0, 0.7, 1.0), 0, 2)
    max_tokens: int = _answer(512, 1)  # of an answer
    answer_tokens: int = _answer(20_000_000, 1)  # of all answers together

    kind: str = _train("eagle", known=KINDS)
    layout: str = _train("outrider", known=LAYOUTS)  # how a head is saved
    continue_from: str = _train("")  # a draft to go on from
    shards: tuple[str, ...] = _train(())  # folders of conversations to train on beside the answers
    # Number i: what enters layer i; the number of layers: what leaves the last.
    taps: tuple[int, ...] = _train((), 0)
    tap_norms: bool = _train(True)  # a norm per tap before the fusion
    norm_output: bool = _train(True)  # the normed hidden state is fed back
    shared_head: bool = _train(False)  # logits by rows of the target's own head
    # Tokens a head knows; 0: all up to 64k, the most frequent 32k above.
    vocabulary: int = _train(0, 0)
    layers: int = _train(0, 0)  # 0: one of a head; of an lm as `size` says
    hidden: int = _train(0, 0)  # of an lm; a head has the target's
    heads: int = _train(0, 0)
    kv_heads: int = _train(0, 0)
    intermediate: int = _train(0, 0)
    size: float = _train(0.03, 0.001, 1)  # of an lm, as a share of the target, where no shape is given
    loss: str = _train("hybrid", known=LOSSES)
    loss_temperature: float = _train(1.0, 0.1, 2)  # of both distributions that it compares
    unroll: int = _train(5, 1, 16)  # steps of a head on its own output
    decay: float = _train(0.8, 0, 1)  # weight of a step by that of the one before
    deep_share: float = _train(1.0, 0.01, 1)  # of the places that steps after the first learn from
    learning_rate: float = _train(5e-4, 1e-8, 1)
    weight_decay: float = _train(0.01, 0, 1)
    clip: float = _train(1.0, 0)  # largest norm of the gradients
    warm_up: float = _train(0.02, 0, 1)  # share of the steps
    batch_tokens: int = _train(16384, 16)
    train_tokens: int = _train(0, 0)  # 0: three times over what there is
    checkpoint_steps: int = _train(500, 1)
    validate_steps: int = _train(500, 1)
    dtype: str = _train("auto", known=DTYPES)  # of training's matmuls; auto: what the device is fast with

    score_prompts: tuple[str, ...] = _score(())  # files; none: the prompts that were held out
    score_limit: int = _score(16, 1)  # prompts of a task
    score_tokens: int = _score(128, 1)  # of an answer
    score_temperatures: tuple[float, ...] = _score((0.0, 0.7), 0, 2)
    depth: int = _score(5, 1, 16)
    tree_nodes: int = _score(24, 1, 64)

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("temperatures", "score_temperatures"):
            if not getattr(self, name):
                raise InvalidRequest(f"{name} needs one temperature at least", name)
        self._check_shares()
        self._check_used()
        if not (self.answers or self.shards):
            raise InvalidRequest(
                "there is nothing to learn from: give --prompts FILE, --made-up N, or --shards DIR", "prompts"
            )
        if self.joined and not self.prompts:
            raise InvalidRequest("prompts are joined of the texts in files: give --prompts FILE", "joined")
        if self.batch_tokens < self.context:
            raise InvalidRequest(
                f"batch_tokens ({self.batch_tokens}) must hold one conversation of {self.context} (context)",
                "batch_tokens",
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
            raise InvalidRequest(f"shares add up to {sum(self.shares.values()):g}, more than 1", "shares")
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
