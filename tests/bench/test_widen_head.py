"""A widened head drafts what the small one does, for a target that was widened alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.bench.as_if import AsIf
from outrider.bench.widen import Wide, widen
from outrider.bench.widen_head import WidenedHead
from outrider.draft.eagle import EagleDrafter
from outrider.draft.eagle_head import EagleHead
from outrider.draft.reading import text_batch
from outrider.engine.memory import draft_room
from outrider.errors import InvalidRequest
from outrider.load.checkpoint import open_checkpoint
from outrider.load.heads import HeadConfig, head_shapes, write_head
from outrider.model.decoder import Decoder, make_kernels, make_store
from outrider.types import DraftPlan
from tests.bench.conftest import SETTINGS, SHAPE
from tests.draft.rows import Rows
from tests.draft.test_eagle import KINDS
from tests.draft.test_eagle import SHAPE as TARGET
from tests.tiny import VOCAB, head_tensors, prompt_of, random_tensors, tiny_config

SMALL = tiny_config(**TARGET)
WIDE = Wide(hidden=80, layers=8, heads=12, kv_heads=3, intermediate=96, vocab=130)
MIXTURE = replace(WIDE, intermediate=24, experts=8, per_token=4)  # its head has an MLP of 96
TIED = Wide(hidden=80, layers=6, heads=12, kv_heads=3, intermediate=96, vocab=130, tied=True)


def decoder(config, read) -> Decoder:
    return Decoder(config, read, make_kernels(config, 128, 1, Path(), "torch"))


def drafted(model: Decoder, config: HeadConfig, tensors) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Logits after a text and after one drafted token, and a chain of drafts."""
    rows, text = Rows(slots=40), prompt_of(9, 1)
    store, head = make_store(model, 40), EagleHead(config, tensors.__getitem__, model, 128)
    drafter, s = EagleDrafter(head, store, rows.table), rows.add(text)
    model.forward(text_batch(rows.table, [s.row], [text[:-1]], [0]), store)
    hidden = drafter._read([s], [len(text)])
    (draft,) = rows.propose(drafter, [s], [DraftPlan("eagle", 4, 4)])
    after = head.forward(hidden.clone(), text_batch(rows.table, [s.row], [[5]], [9], behind=1), drafter.store)
    return torch.cat([head.logits(hidden), head.logits(after)]), draft.tokens


@pytest.mark.parametrize("wide", [WIDE, TIED, MIXTURE], ids=["own head", "tied", "experts"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_small_heads(kind: str, wide: Wide) -> None:
    config, tensors = KINDS[kind], head_tensors(KINDS[kind])
    whole = random_tensors(SMALL)
    read = lambda name: whole(name).bfloat16().float()  # noqa: E731 - rows that a head copies are kept so
    expected, small_draft = drafted(decoder(SMALL, read), config, tensors)
    widened = WidenedHead(config, tensors.__getitem__, wide)
    made_config, made = widened.head, {name: widened.read(name) for name, _ in head_shapes(widened.head)}
    assert {name: tuple(tensor.shape) for name, tensor in made.items()} == dict(head_shapes(made_config))
    assert (made_config.layer.hidden, made_config.layer.heads, made_config.layer.intermediate) == (80, 12, 96)
    logits, draft = drafted(decoder(*widen(SMALL, read, wide)), made_config, made)
    assert draft == small_draft
    assert logits[:, VOCAB:].isinf().all()
    known = ~expected.isinf()
    assert torch.equal(~logits[:, :VOCAB].isinf(), known)
    torch.testing.assert_close(logits[:, :VOCAB][known], expected[known], atol=1e-3, rtol=1e-3)


def test_a_head_wider_than_the_shape_is_refused() -> None:
    config = KINDS["taps"]
    with pytest.raises(InvalidRequest, match="the shape's intermediate is smaller"):
        WidenedHead(config, head_tensors(config).__getitem__, Wide(80, 8, 12, 3, 32, 130))


def test_an_as_if_model_takes_a_head_for_the_small_one(folder: Path, tmp_path: Path) -> None:
    config = open_checkpoint(folder).config
    head = HeadConfig(config, config.vocab, (1, 2), tap_norms=True, norm_output=True, shared_head=True)
    write_head(tmp_path, head, head_tensors(head))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    seen = []
    for make in (
        lambda: LLM(folder, draft=str(tmp_path), settings=SETTINGS),
        lambda: AsIf(folder, SHAPE, SETTINGS, draft=str(tmp_path)),
    ):
        with make() as llm:
            drafter = llm.engine.drafters["eagle"]
            (output,) = llm.generate(["abcabcabc"], params)
            if isinstance(llm, AsIf):
                room = draft_room([llm.reshaped_draft(open_checkpoint(tmp_path))])
                assert room.cached == 2 * 64 + 2 * 4 * 16  # two taps of the wide stream; keys and values
            seen.append((output.text, drafter.head.config.layer.hidden, drafter.head.config.draft_vocab))
    (text, small, words), (same, wide, as_many) = seen
    assert text == same and (small, wide) == (32, 64) and words == as_many == config.vocab
