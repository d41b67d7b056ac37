"""Row invariance, to the last bit: a row does not depend on the rows beside it, nor on how it was fed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.types import Draft
from tests.model.batches import Part, Reader, random_ids
from tests.model.families import NEEDS_COMPILER, VOCAB, ours

CASES = ["llama-odd-sizes", "mistral-window", "qwen3-biases-window"]
PAIRS = [
    pytest.param("c", "llama", marks=NEEDS_COMPILER),
    pytest.param("c", "qwen2-window", marks=NEEDS_COMPILER),
    ("torch", "qwen2-window"),
]
COUNTS = [2, 3, 4, 5, 6, 7, 8, 9, 16, 33]


@pytest.mark.parametrize("case", CASES)
def test_a_row_alone_equals_a_row_among_others(case: str, kernels: str, kernel_folder: Path) -> None:
    """Texts of different lengths decode one token each, in batches of every size."""
    model = ours(case, kernels, kernel_folder)
    prompts = [random_ids(VOCAB, 2 + i % 7, seed=i) for i in range(max(COUNTS) if kernels == "c" else 9)]
    alone = []
    for i, prompt in enumerate(prompts):
        reader = Reader(model.config, seed=i)
        reader.feed(model, Part(0, prompt))
        alone.append(reader.feed(model, Part(0, [i])))
    for count in COUNTS if kernels == "c" else (2, 5, 9):
        reader = Reader(model.config, texts=count)
        reader.feed(model, *(Part(i, prompts[i]) for i in range(count)))
        together = reader.feed(model, *(Part(i, [i]) for i in range(count)))
        assert torch.equal(together, torch.cat(alone[:count])), count


@pytest.mark.parametrize("count", [2, 5, 9, 33])
def test_a_row_is_the_same_at_every_place_in_the_batch(count: int, kernels: str, kernel_folder: Path) -> None:
    if kernels == "torch" and count > 9:
        pytest.skip("the twin goes row by row; nothing changes between 9 rows and 33")
    model = ours("llama-odd-sizes", kernels, kernel_folder)
    reader = Reader(model.config, texts=count)
    prompts = [random_ids(VOCAB, 3 + i % 5, seed=i) for i in range(count)]
    reader.feed(model, *(Part(i, prompts[i]) for i in range(count)))
    expected = model.forward(reader.batch(Part(0, [9])), reader.store)
    for place in range(count):
        order = [*range(1, place + 1), 0, *range(place + 1, count)]
        logits = model.forward(reader.batch(*(Part(i, [9]) for i in order)), reader.store)
        assert torch.equal(logits[place : place + 1], expected), place


@pytest.mark.parametrize("case", CASES)
def test_any_chunk_size_gives_the_same_bits(case: str, kernels: str, kernel_folder: Path) -> None:
    model, ids = ours(case, kernels, kernel_folder), random_ids(VOCAB, 40)
    whole = Reader(model.config)
    expected = whole.read(model, ids)
    for chunk in (1, 3, 7, 16, 33) if kernels == "c" else (1, 3, 16):
        reader = Reader(model.config)
        assert torch.equal(reader.read(model, ids, chunk), expected), chunk
        slots = reader.table[0, :40]
        for mine, theirs in zip(reader.store.keys, whole.store.keys, strict=True):
            assert torch.equal(mine[slots], theirs[slots])


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    parents = tuple(draw(st.integers(-1, i - 1)) for i in range(draw(st.integers(1, 12))))
    return Draft(tuple(draw(st.integers(0, VOCAB - 1)) for _ in parents), parents)


@pytest.mark.parametrize(("which", "case"), PAIRS)
@settings(max_examples=12)
@given(draft=drafts(), length=st.integers(1, 8))
def test_a_tree_node_equals_the_same_tokens_as_a_chain(
    which: str, case: str, kernel_folder: Path, draft: Draft, length: int
) -> None:
    model, ids = ours(case, which, kernel_folder), random_ids(VOCAB, length)
    logits = Reader(model.config, longest=24).feed(model, Part(0, ids, draft))
    for node in range(len(draft)):
        path = [draft.tokens[i] for i in draft.path(node)]
        chain = Reader(model.config, longest=24).read(model, ids + path)
        assert torch.equal(logits[length + node], chain[-1]), node


def test_a_tree_of_63_nodes(kernel_folder: Path, kernels: str) -> None:
    """All bits of the mask: a chain as long as a draft may be."""
    model, ids = ours("llama", kernels, kernel_folder), random_ids(VOCAB, 70)
    logits = Reader(model.config).feed(model, Part(0, ids[:7], Draft.chain(ids[7:])))
    assert torch.equal(logits, Reader(model.config).read(model, ids))
