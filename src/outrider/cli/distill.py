"""`outrider distill`: make a draft for a target of the target's own answers, and score it as it will serve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.flag import Flag, option
from outrider.cli.measure import say_loading
from outrider.cli.options import DEFAULT_MODEL, ENGINE, Flags, Model, takes
from outrider.cli.output import note
from outrider.distill.recipe import KINDS, LAYOUTS, LOSSES, STAGES, Recipe, read_count
from outrider.load.find import find
from outrider.settings import Settings, cache_folder


def read_numbers(kind: type) -> Callable[[str], tuple[Any, ...]]:
    """`0,0.7,1` -> `(0.0, 0.7, 1.0)`."""

    def read(text: str) -> tuple[Any, ...]:
        try:
            return () if text == "auto" else tuple(kind(part) for part in text.split(","))
        except ValueError:
            example = "2,14,27" if kind is int else "0,0.7,1"
            raise ValueError(f"{text!r} is not a list of numbers such as {example}") from None

    return read


def read_shares(pairs: Sequence[str]) -> dict[str, float]:
    """`["code=0.3"]` -> `{"code": 0.3}`."""
    shares = {}
    for pair in pairs:
        task, _, share = pair.rpartition("=")
        try:
            shares[task] = float(share)
        except ValueError:
            task = ""
        if not task:
            raise ValueError(f"{pair!r} is not TASK=SHARE, such as code=0.3")
    return shares


@dataclass(frozen=True, slots=True)
class RecipeFlags(Flags):
    """Flags of one stage: several make one recipe."""

    def build(self, typed: dict[str, Any]) -> Any:
        values = {flag.name: typed.pop(flag.name) for flag in self.flags}
        return {flag.name: flag.value(values[flag.name]) for flag in self.flags}


_heat, _places = read_numbers(float), read_numbers(int)

ANSWER = RecipeFlags(
    "answer",
    "Answers",
    Recipe,  # type: ignore[arg-type]
    (
        Flag(
            "prompts",
            list[str],
            'Prompts, one a line: text, or JSON with "turns", "messages" or "prompt", and perhaps "task". Repeatable.',
            tuple,
            "FILE",
        ),
        Flag("made_up", int, "Prompts that the target makes up itself, beside those.", metavar="N"),
        Flag(
            "joined",
            int,
            "Long prompts: several texts of the files, to be summarized or asked about.",
            metavar="N",
        ),
        Flag(
            "shares",
            list[str],
            "Share of conversations of a task, made-up included; the rest as they come. Repeatable.",
            read_shares,
            "TASK=SHARE",
            ("--share",),
        ),
        Flag("follow_ups", float, "Share of conversations with one more turn, made up.", metavar="SHARE"),
        Flag(
            "temperatures",
            str,
            "Temperatures of answers, in equal parts.",
            _heat,
            "T,T,...",
            default="0,0.7,1",
        ),
        Flag("max_tokens", int, "Longest answer, in tokens."),
        Flag("answer_tokens", str, "Tokens of all answers together.", read_count, "N", default="20M"),
        Flag("context", int, "Longest conversation, in tokens."),
        Flag("seed", int, "The same seed and recipe give the same answers."),
    ),
)

TRAIN = RecipeFlags(
    "train",
    "Training",
    Recipe,  # type: ignore[arg-type]
    (
        Flag(
            "kind",
            str,
            "What to train: a head on the target's hidden states, or a small model.",
            metavar="|".join(KINDS),
        ),
        Flag(
            "continue_from",
            str,
            "Go on from this draft, or from the one in this --out. With more --layers, a head grows.",
            metavar="DIR",
            spelled=("--continue",),
        ),
        Flag(
            "shards",
            list[str],
            "A folder of conversations to learn from, too, such as what a server kept. Repeatable.",
            tuple,
            "DIR",
        ),
        Flag("layout", str, "How a head is saved; other engines read the others.", metavar="|".join(LAYOUTS)),
        Flag(
            "taps",
            str,
            "Layers whose input a head reads; the number of layers stands for the last one's output.",
            _places,
            "auto|I,I,...",
            default="auto",
        ),
        Flag(
            "tap_norms",
            bool,
            "A norm per tap before they are fused.",
            spelled=("--tap-norms/--no-tap-norms",),
        ),
        Flag(
            "norm_output",
            bool,
            "Feed the normed hidden state back.",
            spelled=("--norm-output/--no-norm-output",),
        ),
        Flag(
            "shared_head",
            bool,
            "Take rows of the target's own head for logits.",
            spelled=("--shared-head/--no-shared-head",),
        ),
        Flag("vocabulary", int, "Tokens a head knows; 0: all up to 64k, the most frequent 32k above."),
        Flag("layers", int, "Layers of the draft; 0: one of a head, an lm as --size says."),
        Flag("hidden", int, "Width of an lm; 0: as --size says."),
        Flag("heads", int, "Attention heads; 0: as the target's shape says."),
        Flag("kv_heads", int, "Heads of keys and values; 0: as the target's shape says."),
        Flag("intermediate", int, "Width of the MLP; 0: as the target's shape says."),
        Flag("size", float, "Size of an lm as a share of the target's.", metavar="SHARE"),
        Flag("loss", str, "What is made small.", metavar="|".join(LOSSES)),
        Flag("loss_temperature", float, "Temperature of the two distributions that the loss compares."),
        Flag("unroll", int, "Steps that a head is trained to go on its own output."),
        Flag("decay", float, "Weight of such a step by that of the one before."),
        Flag(
            "deep_share",
            float,
            "Share of places, drawn anew in each step, that such steps learn from after the first; less is quicker.",
            metavar="SHARE",
        ),
        Flag("learning_rate", float, "Highest learning rate."),
        Flag("weight_decay", float, "Weight decay of matrices."),
        Flag("clip", float, "Largest norm of the gradients; 0: any."),
        Flag("warm_up", float, "Share of training in which the learning rate rises.", metavar="SHARE"),
        Flag("batch_tokens", str, "Tokens of a batch, padding counted.", read_count, "N", default="16384"),
        Flag(
            "train_tokens",
            str,
            "Tokens to train on; 0: three times over all there are.",
            read_count,
            "N",
            default="0",
        ),
        Flag("checkpoint_steps", int, "Steps between two checkpoints."),
        Flag("validate_steps", int, "Steps between two looks at what was held out."),
        Flag("dtype", str, "Number format of training's matmuls.", metavar="auto|float32|bfloat16"),
    ),
)

SCORE = RecipeFlags(
    "score",
    "Score",
    Recipe,  # type: ignore[arg-type]
    (
        Flag(
            "score_prompts",
            list[str],
            "Prompts to score with. Repeatable. By default those that were held out.",
            tuple,
            "FILE",
        ),
        Flag("score_limit", int, "Prompts of a task, at most."),
        Flag("score_tokens", int, "Longest answer, in tokens."),
        Flag(
            "score_temperatures", str, "Temperatures, one after the other.", _heat, "T,T,...", default="0,0.7"
        ),
        Flag("depth", int, "Depth of drafts."),
        Flag("tree_nodes", int, "Nodes of draft trees."),
    ),
)

# What does not fit training, or is the recipe's here, is left out.
_PLACE = {
    *("device", "weights", "threads", "cache_bytes"),
    *("gpu_memory_utilization", "max_sequences", "step_rows", "kernels"),
}
PLACE = replace(ENGINE, flags=tuple(flag for flag in ENGINE.flags if flag.name in _PLACE))

Out = Annotated[
    str, option("out", "Where everything is kept. The same command goes on where it ended.", "DIR")
]
Stage = Annotated[
    str | None, option("stage", "Only this stage; by default all that are not through.", "|".join(STAGES))
]

Processes = Annotated[
    int,
    option(
        "processes",
        "Processes that answer at once, each with a target of its own. The answers are the same.",
        "N",
        min=1,
    ),
]


@takes(ANSWER, TRAIN, SCORE, PLACE)
def distill(
    model: Model = DEFAULT_MODEL,
    *,
    out: Out,
    stage: Stage = None,
    processes: Processes = 1,
    answer: dict[str, Any],
    train: dict[str, Any],
    score: dict[str, Any],
    settings: Settings,
) -> None:
    """Make a draft for a model: the model answers, the draft learns from that, and is scored as it will serve.

    outrider distill smollm2-135m --prompts prompts.jsonl --made-up 10000 --out drafts/smollm2
    """
    if stage is not None and stage not in STAGES:
        raise typer.BadParameter(f"{stage!r} is not {', '.join(STAGES)}", param_hint="--stage")
    recipe = Recipe.of({"target": model, **answer, **train, **score})
    find(model, cache_folder())  # an unknown name fails before torch loads
    say_loading(model)
    from outrider.distill.folder import Folder
    from outrider.distill.report import default_report
    from outrider.distill.run import distill as run

    folder = Path(out).expanduser()
    try:
        stages = STAGES if stage is None else (stage,)
        draft = run(recipe, folder, settings, default_report(), stages, processes)
    except KeyboardInterrupt:
        kept = Folder(folder).kept()
        note(
            f"stopped. Kept in {folder}: {kept}. The same command goes on from there"
            if kept
            else "stopped. Nothing is finished yet: the same command begins again"
        )
        raise
    if (draft / "card.json").exists():
        note(f"try it: outrider bench {model} --draft {draft}")
        note(f"have it taken by itself: outrider pairs add {draft} --name {folder.resolve().name}")
