"""The one decoder against transformers: every family and rope, both kernel sets, prefill, decode, trees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.types import Draft
from tests.model.batches import Part, Reader, furthest, random_ids
from tests.model.families import CASES, VOCAB, ours, their_logits, theirs

TOLERANCE = 2e-5  # of the largest logit
TREE = Draft((5, 6, 7, 8, 9, 10, 11, 12), (-1, 0, 0, -1, 2, 4, 5, 6))  # deeper than the narrowest window


@pytest.mark.parametrize("case", CASES)
def test_prefill_equals_transformers(case: str, kernels: str, kernel_folder: Path) -> None:
    model, ids = ours(case, kernels, kernel_folder), random_ids(VOCAB, 33)
    assert furthest(Reader(model.config).read(model, ids), their_logits(case, ids)) < TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_decode_equals_transformers(case: str, kernels: str, kernel_folder: Path) -> None:
    model, ids = ours(case, kernels, kernel_folder), random_ids(VOCAB, 24)
    reader = Reader(model.config)
    logits = torch.cat([reader.feed(model, Part(0, ids[:9])), reader.read(model, ids[9:], chunk=1)])
    assert furthest(logits, their_logits(case, ids)) < TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_a_tree_equals_its_paths_in_transformers(case: str, kernels: str, kernel_folder: Path) -> None:
    """Beside another text's prompt, so that neither may see the other."""
    model, ids, other = (
        ours(case, kernels, kernel_folder),
        random_ids(VOCAB, 11),
        random_ids(VOCAB, 6, seed=1),
    )
    reader = Reader(model.config, texts=2)
    reader.feed(model, Part(0, ids[:-1]))
    logits = reader.feed(model, Part(1, other), Part(0, ids[-1:], TREE))
    assert furthest(logits[:6], their_logits(case, other)) < TOLERANCE
    assert furthest(logits[6], their_logits(case, ids)[-1]) < TOLERANCE
    for node in range(len(TREE)):
        path = [TREE.tokens[i] for i in TREE.path(node)]
        assert furthest(logits[7 + node], their_logits(case, ids + path)[-1]) < TOLERANCE, node


def test_a_model_may_read_into_several_caches_in_turn(kernels: str, kernel_folder: Path) -> None:
    model, texts = ours("llama", kernels, kernel_folder), [random_ids(VOCAB, 12, seed) for seed in (0, 1)]
    readers = [Reader(model.config) for _ in texts]
    halves = [[reader.feed(model, Part(0, ids[at : at + 6])) for reader, ids in zip(readers, texts, strict=True)]
              for at in (0, 6)]  # fmt: skip
    for ids, *logits in zip(texts, *halves, strict=True):
        assert furthest(torch.cat(logits), their_logits("llama", ids)) < TOLERANCE


def test_dynamic_rope_reads_one_token_at_a_time(kernels: str, kernel_folder: Path) -> None:
    """Past the trained 16 positions, as transformers does when it decodes; however the prompt was cut."""
    ids, model = random_ids(VOCAB, 30), ours("rope-dynamic", kernels, kernel_folder)
    cache, expected = None, []
    with torch.no_grad():
        for token in ids:
            out = theirs("rope-dynamic")(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            expected.append(out.logits[0])
    for chunk in (1, 7, 30):
        assert furthest(Reader(model.config).read(model, ids, chunk), torch.cat(expected)) < TOLERANCE


def test_only_the_wanted_rows_get_logits(kernels: str, kernel_folder: Path) -> None:
    model, ids = ours("llama", kernels, kernel_folder), random_ids(VOCAB, 9)
    reader = Reader(model.config)
    everything = model.forward(reader.batch(Part(0, ids)), reader.store)
    for wanted in ([], [8], [0, 3], [5, 2]):
        batch = reader.batch(Part(0, ids))
        batch.logit_rows = torch.tensor(wanted, dtype=torch.int64)
        logits = model.forward(batch, reader.store)
        assert logits.shape == (len(wanted), VOCAB) and logits.dtype == torch.float32
        assert torch.equal(logits, everything[wanted])
