"""Targets with experts, of every family: `distill` makes heads and small models, and no drafter changes a token."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams, Settings
from outrider.bench.audit import audit
from outrider.distill.head_net import HeadNet, start_from_target
from outrider.distill.recipe import Recipe
from outrider.distill.report import Silent
from outrider.distill.run import distill
from outrider.distill.students import head_shape
from outrider.load.cards import read_card
from outrider.load.checkpoint import open_checkpoint
from outrider.load.config import Experts
from outrider.load.heads import read_head
from tests.distill.conftest import TEMPLATE
from tests.load.tiny import byte_level_backend, vocabulary
from tests.model.families import make_theirs
from tests.sweep import sweep

SETTINGS = Settings(device="cpu", threads=1, max_sequences=8, cache_bytes=1 << 22)
CASES = ["qwen3_moe", "mixtral", "olmoe", "glm4_moe-groups", "llama4", "gpt_oss"]
PROMPTS = [[5 + i, 17, 30, 44 + i, 17, 30] * 2 for i in range(4)]
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True, seed=1)

Target = Callable[..., Path]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    made: dict[Any, Path] = {}

    def of(case: str, tied: bool = False) -> Path:
        if (case, tied) not in made:
            folder = made[case, tied] = tmp_path_factory.mktemp(case)
            make_theirs(case, vocab_size=len(vocabulary()), tie_word_embeddings=tied).save_pretrained(folder)
            byte_level_backend().save(str(folder / "tokenizer.json"))
            (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
        return made[case, tied]

    return of


def differing(target: Path, draft: str) -> tuple[int, dict[str, int]]:
    """Of the tokens of every way to draft, in batches and alone; and what each drafted."""
    with LLM(target, draft=draft, settings=SETTINGS) as llm:
        found = audit(llm, PROMPTS, False, [0.0, 0.9], PARAMS)
    assert found.compared > 500
    return found.differing, found.drafted


@pytest.mark.parametrize(
    ("case", "kind", "tied"),
    sweep(
        [(case, kind, tied) for case in CASES for kind in ("eagle", "lm") for tied in (False, True)],
        quick=[(case, "eagle", case in ("mixtral", "gpt_oss")) for case in CASES]
        + [("qwen3_moe", "lm", True)],
    ),
)
def test_a_distilled_draft(case: str, kind: str, tied: bool, target: Target, tmp_path: Path) -> None:
    """Three stages, and an audit with what they made, beside the drafters without weights."""
    prompts, folder = tmp_path / "p.jsonl", target(case, tied)
    prompts.write_text("".join(json.dumps({"turns": [f"hello {i}"]}) + "\n" for i in range(8)))
    recipe = Recipe(
        target=str(folder), prompts=(str(prompts),), answer_tokens=200, max_tokens=8, context=64, batch_tokens=256,
        train_tokens=500, validate_steps=100, score_limit=1, score_tokens=6, score_temperatures=(0.0,), depth=2,
        tree_nodes=3, kind=kind, **({"unroll": 2, "shared_head": tied} if kind == "eagle" else {"size": 0.5}),
    )  # fmt: skip
    draft = distill(recipe, tmp_path / "made", SETTINGS, Silent())
    config = open_checkpoint(folder).config
    assert config is not None and config.tied == tied
    if kind == "eagle":
        head, tensors = read_head(draft, config)
        assert head.taps[-1] == config.layers and head.layer.hidden == config.hidden
        assert head.layer.intermediate == config.specs[-1].active_width
        assert head.shared_head == tied != ("lm_head.weight" in tensors)
        assert all(tensor.float().isfinite().all() for tensor in tensors.values())
    else:
        made = open_checkpoint(draft).config
        assert made is not None and made.family in ("llama", "qwen3") and not made.specs[0].experts
    score = read_card(draft).score
    assert score is not None and not any(one.differing for one in score.tasks)
    found, drafted = differing(folder, f"{draft}+lookup+early_exit:2")
    assert found == 0
    assert all(drafted[name] > 0 for name in ("lookup", "early_exit", "eagle" if kind == "eagle" else "lm"))


@pytest.mark.parametrize("sides", ["target", "draft", "both"])
def test_a_small_model_drafts_with_experts_on_either_side(sides: str, target: Target) -> None:
    dense, mixture = target("llama"), target("qwen3_moe")
    one = dense if sides == "draft" else mixture
    other = dense if sides == "target" else target("mixtral") if sides == "both" else mixture
    found, drafted = differing(one, str(other))
    assert found == 0 and drafted["lm"] > 0 and drafted["tree lm"] > 0


def test_a_head_starts_from_what_a_target_with_experts_has(target: Target, tmp_path: Path) -> None:
    """Attention and norms of the last layer; no MLP, as none of its experts is for all rows."""
    opened = open_checkpoint(target("mixtral"))
    assert opened.config is not None and isinstance(opened.config.specs[-1].experts, Experts)
    net = HeadNet(head_shape(Recipe(shards=("here",)), opened.config))
    before = net.midlayer.mlp.up_proj.weight.clone()
    start_from_target(net, opened.tensor, opened.config)
    last = f"model.layers.{opened.config.layers - 1}."
    assert torch.equal(net.midlayer.self_attn.o_proj.weight, opened.tensor(f"{last}self_attn.o_proj.weight"))
    assert torch.equal(net.midlayer.mlp.up_proj.weight, before)
