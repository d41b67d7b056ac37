"""The torch twin against the head that serves: the same logits for known entries and for those it feeds itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from outrider.distill import features
from outrider.distill.answers import TrainBatch
from outrider.distill.features import TargetReader
from outrider.distill.head_net import HeadNet, start_from_target
from outrider.draft.eagle import EagleDrafter
from outrider.draft.eagle_head import EagleHead, load_eagle
from outrider.draft.reading import text_batch
from outrider.load.heads import HeadConfig, write_head
from outrider.model.decoder import Decoder, make_store
from outrider.types import DraftPlan
from tests.draft.rows import Rows
from tests.tiny import VOCAB, prompt_of, random_tensors, tiny_config, tiny_model

LAYERS, DEPTH = 4, 4
SHAPE = {"layers": LAYERS, "windows": (0,) * LAYERS}
WORDS = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))[:60].sort().values

OPTIONS = {
    "eagle3": dict(taps=(1, 2, 3)),
    "own": dict(taps=(0, 2, LAYERS), tap_norms=True, norm_output=True, shared_head=True),
    "layers": dict(taps=(1, LAYERS), layers=3, norm_output=True),
    "published later": dict(taps=(1, 2, 3), joint_norm=True, normed_residual=True),
}


def head_config(draft_vocab: int = VOCAB, **options) -> HeadConfig:
    layer = tiny_config(layers=1, windows=(0,), tied=False, norm_eps=0.01)
    return HeadConfig(layer, draft_vocab, **options)


def random_net(config: HeadConfig, model: Decoder) -> HeadNet:
    net = HeadNet(config, None if config.whole else WORDS, model.embed(torch.arange(VOCAB)))
    for name, parameter in net.named_parameters():
        if parameter.dim() > 1 and "norm" not in name:
            torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[1] ** -0.5)
        else:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
        parameter.data = parameter.data.bfloat16().float()  # as they lie on disk
    return net


@contextmanager
def received(head: EagleHead) -> Iterator[list[torch.Tensor]]:
    """What a head says while it drafts, kernel by kernel: drafts of one call are compared with these elsewhere."""
    said: list[torch.Tensor] = []
    head._native = None
    logits = head.logits
    head.logits = lambda hidden: said.append(logits(hidden)) or said[-1]  # type: ignore[method-assign]
    yield said


def batch_of(*texts: list[int]) -> TrainBatch:
    width = max(map(len, texts))
    ids = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    lengths = torch.tensor([len(text) for text in texts])
    return TrainBatch(ids, lengths, torch.arange(width) < lengths[:, None])


@pytest.mark.parametrize("draft_vocab", [VOCAB, len(WORDS)])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_it_says_what_the_served_head_says(tmp_path: Path, options, draft_vocab: int) -> None:
    config, model = head_config(draft_vocab, **options), tiny_model(**SHAPE)
    net = random_net(config, model)
    write_head(tmp_path, config, net.state_dict())
    head = load_eagle(tmp_path, model, 256)
    rows, store = Rows(40), make_store(model, 40)
    drafter = EagleDrafter(head, store, rows.table)
    one = rows.add(prompt_of(11, seed=4))
    model.forward(text_batch(rows.table, [one.row], [one.tokens[:-1]], [0]), store)
    with received(head) as said:
        (draft,) = drafter.propose([one], [DraftPlan("eagle", DEPTH, DEPTH)])
    assert len(draft) == len(said) == DEPTH
    text = [*one.tokens, *draft.tokens]

    reader = TargetReader(model, config.taps, 64)
    batch = batch_of(text, text[:7])  # and a shorter one, for the padding
    states = net(reader.read(batch).taps, reader.embed(batch.ids.roll(-1, 1)), DEPTH)
    words = torch.arange(VOCAB) if net.words is None else net.words
    # Copies of the target's rows are kept as bfloat16.
    rows = net.head if net.words is None else net.head.bfloat16().float()
    for step, state in enumerate(states):
        ours = state[0, len(one.tokens) - 2 + step] @ rows.T
        torch.testing.assert_close(ours, said[step][0, words], rtol=1e-3, atol=1e-3)


def test_features_are_those_of_a_pass_that_serves(monkeypatch) -> None:
    """Whatever texts share a batch, and however its rows are cut into passes."""
    model, texts = tiny_model(**SHAPE), [prompt_of(9, 1), prompt_of(20, 2), prompt_of(3, 3)]
    monkeypatch.setitem(features.PASS_ROWS, "cpu", 7)
    reader = TargetReader(model, (0, 2), 32)
    made = reader.read(batch_of(*texts))
    assert made.taps.shape == (3, 20, 2, 32) and made.last.shape == (3, 20, 32)
    for row, text in enumerate(texts):
        rows, store = Rows(40), make_store(model, 40)
        store.tap((0, 2), 32)
        one = rows.add(text)
        logits = model.forward(text_batch(rows.table, [one.row], [text], [0], last_only=False), store)
        slots = rows.table.tensor[one.row, : len(text)].long()
        assert store.features is not None
        assert torch.equal(made.taps[row, : len(text)], store.features[slots])
        assert torch.equal(reader.logits(made.last[row, : len(text)]), logits)


def test_a_fresh_head_begins_with_what_the_target_has() -> None:
    target = tiny_config(**SHAPE)
    read = random_tensors(target)
    for options in (OPTIONS["layers"], OPTIONS["own"]):
        config = head_config(len(WORDS), **options)
        net = HeadNet(config, WORDS, read("model.embed_tokens.weight"))
        start_from_target(net, read, target)
        taps = torch.randn(1, 5, len(config.taps), 32)
        passed = net.fused(taps)[0] if not config.tap_norms else None
        if passed is not None:
            assert torch.nn.functional.cosine_similarity(passed, taps[0, :, -1]).min() > 0.9
        assert torch.equal(net.norm.weight, read("model.norm.weight"))
        assert torch.equal(net.head, read("model.embed_tokens.weight")[WORDS])
        assert torch.equal(
            net.midlayer.mlp.up_proj.weight, read(f"model.layers.{LAYERS - config.layers}.mlp.up_proj.weight")
        )
