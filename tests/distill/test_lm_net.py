"""A small decoder: the twin of the one that serves, of a shape that fits its target, and loaded as any other model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider import LLM
from outrider.distill.answers import TrainBatch
from outrider.distill.features import TargetReader
from outrider.distill.lm_net import LmNet, lm_json, lm_shape, save_lm, start_lm
from outrider.errors import InvalidRequest
from outrider.load.checkpoint import check_shapes, open_checkpoint
from outrider.load.config import Rope
from outrider.load.families import config_from_json
from outrider.model.decoder import Decoder, make_kernels
from outrider.settings import cache_folder
from tests.load.tiny import write_gguf
from tests.tiny import prompt_of, random_tensors, tiny_config

FAMILIES = {
    "llama": {},
    "qwen2": dict(family="qwen2", qkv_bias=True),
    "qwen3": dict(family="qwen3", qk_norm="head", rope=Rope(5e5, "linear", {"factor": 2.0})),
}


def random_lm(**changes) -> LmNet:
    net = LmNet(tiny_config(**changes))
    for name, parameter in net.named_parameters():
        mean, spread = (1.0, 0.1) if "norm" in name else (0.0, 1.5 * parameter.shape[-1] ** -0.5)
        torch.nn.init.normal_(parameter, mean, spread)
        parameter.data = parameter.data.bfloat16().float()
    return net


@pytest.mark.parametrize("changes", FAMILIES.values(), ids=FAMILIES)
def test_it_says_what_the_served_decoder_says(changes) -> None:
    net, text = random_lm(**changes), prompt_of(13, 3)
    tensors = net.state_dict()
    norms = {name: 1 + 0.1 * torch.randn(16) for name in ("q_norm", "k_norm")}

    def read(name: str) -> torch.Tensor:
        part = name.split(".")[-2]
        return tensors[name] if name in tensors else norms.get(part, torch.zeros(0))

    kernels = make_kernels(net.config, 64, 1, cache_folder() / "kernels", "auto")
    model = Decoder(net.config, read, kernels)
    reader = TargetReader(model, (), 64)
    batch = TrainBatch(
        torch.tensor([text]), torch.tensor([len(text)]), torch.ones(1, len(text), dtype=torch.bool)
    )
    served = reader.logits(reader.read(batch).last[0])
    torch.testing.assert_close(net(batch.ids)[0] @ net.head.T, served, rtol=1e-3, atol=1e-3)
    again = config_from_json(lm_json(net.config))
    assert replace(again, raw={}) == replace(net.config, raw={})


def test_a_shape_by_size() -> None:
    """Of a small target and of one whose vocabulary is most of the draft."""
    small = tiny_config(
        vocab=49152, hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, intermediate=1536
    )
    large = tiny_config(
        family="qwen2", vocab=151936, hidden=1536, layers=28, heads=12, kv_heads=2, head_dim=128, intermediate=8960,
        qkv_bias=True,
    )  # fmt: skip
    for target in (small, large):
        for size in (0.03, 0.05):
            made = lm_shape(target, size)
            assert 0.6 * size < made.parameters / target.parameters <= size
            assert made.head_dim % 16 == 0 and made.heads % made.kv_heads == 0 and made.tied
            assert len(made.windows) == made.layers and made.specs[0].qkv_bias == target.specs[0].qkv_bias
    given = lm_shape(small, 0.03, hidden=128, layers=2, heads=6, kv_heads=3, intermediate=96)
    assert (given.hidden, given.layers, given.heads, given.kv_heads, given.intermediate) == (128, 2, 6, 3, 96)
    with pytest.raises(InvalidRequest, match=r"size 0.001 is too small .* at least 0.0"):
        lm_shape(small, 0.001)


def test_words_that_are_alike_begin_alike() -> None:
    target = tiny_config(hidden=64)
    read = random_tensors(target)
    net = LmNet(tiny_config(hidden=32))
    start_lm(net, read)
    theirs = read("model.embed_tokens.weight")
    far = [torch.cdist(one - one.mean(0), one - one.mean(0)).flatten() for one in (theirs, net.head.detach())]
    assert torch.corrcoef(torch.stack(far))[0, 1] > 0.7


def test_it_is_loaded_as_any_other_model(tmp_path: Path) -> None:
    """Also for a target in one file, whose tokenizer is written out."""
    write_gguf(tmp_path / "target.gguf")
    target = open_checkpoint(tmp_path / "target.gguf")
    net = LmNet(lm_shape(target.config, 1.0, hidden=32, layers=1))
    save_lm(tmp_path / "draft", net, target.tokenizer, target.chat_template)
    made = open_checkpoint(tmp_path / "draft")
    check_shapes(made)
    text = "some text, to be cut"
    assert made.tokenizer.encode(text) == target.tokenizer.encode(text)
    assert made.tokenizer.eos_ids == target.tokenizer.eos_ids and made.chat_template == target.chat_template
    assert json.loads((tmp_path / "draft" / "config.json").read_text())["hidden_size"] == 32
    with LLM(tmp_path / "target.gguf", draft=str(tmp_path / "draft"), kernels="torch", device="cpu") as llm:
        assert llm.drafter == "lm"
        assert len(llm.generate("hello", max_tokens=4, ignore_eos=True)[0].token_ids) == 4
