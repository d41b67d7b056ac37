"""Staged rows fit into the bucket chosen for them, whatever sequences they are of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.device import buckets
from outrider.device.buckets import (
    ALONE,
    FEW_LOGITS,
    LONG_ALONE,
    MAX_LOGITS,
    MOST_CAPTURED,
    STAGED,
    STAGED_MULTIPLE,
    RunChoice,
    bucket,
    longest_run,
    staged_bucket,
    staged_shape,
)
from outrider.model.kernels.gpu import library
from outrider.model.kernels.gpu.recording import context_for, contexts_for
from outrider.model.staged import StagedRows
from outrider.types import NO_DRAFT, Draft
from tests.model.batches import Part, Reader
from tests.tiny import tiny_config

# Rows of each sequence, and how many of them are draft nodes.
SEQUENCES = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 6)), min_size=1, max_size=60)


@given(SEQUENCES, st.sampled_from([(4, 2), (8, 8), (16, 1)]))
def test_every_batch_fits_its_bucket(sequences: list[tuple[int, int]], heads: tuple[int, int]) -> None:
    config = tiny_config(heads=heads[0], kv_heads=heads[1])
    reader = Reader(config, len(sequences), 64)
    parts = [
        Part(i, [1] * known, Draft.chain([2] * nodes) if nodes else NO_DRAFT)
        for i, (known, nodes) in enumerate(sequences)
    ]
    batch = reader.batch(*parts)
    chunks = [known for known, nodes in sequences if not nodes]
    drafts = [known + nodes for known, nodes in sequences if nodes]
    rows, wanted, branching = staged_bucket(chunks, drafts, batch.rows)
    padded = torch.cat([reader.table, torch.zeros_like(reader.table[:1])])
    staged = StagedRows(staged_shape(rows, wanted, branching, config), padded, 10_000, len(sequences))
    staged.fill(batch, torch.zeros(batch.rows, dtype=torch.int32))
    there = staged.batch
    assert there.ids[there.logit_rows[: batch.rows]].tolist() == batch.ids.tolist()
    assert there.slots[there.logit_rows[: batch.rows]].tolist() == batch.slots.tolist()
    for part in staged.parts:
        # Every row is in one group, and a group is of one sequence.
        grouped = [range(first, first + count) for first, count, _ in part.groups.tolist() if count]
        assert sorted(row for rows in grouped for row in rows) == list(range(part.batch.rows))
        owners, limits = part.batch.table_rows.tolist(), part.batch.prefix.tolist()
        assert all(len({owners[row] for row in rows}) == 1 for rows in grouped)
        assert part.branching or not bool(part.batch.ancestors.any())
        shared = [highest for _, count, highest in part.groups.tolist() if count]
        assert part.branching or shared == [max(limits[row] for row in rows) for rows in grouped]


def test_few_buckets() -> None:
    assert staged_bucket([5], [], 1) == (STAGED[0], STAGED[0], 0)
    assert staged_bucket([], [9], 9) == (STAGED[0], STAGED[0], STAGED[0])
    rows, wanted, branching = staged_bucket([700], [9], 10)
    assert branching == STAGED[0] and wanted == FEW_LOGITS and rows - branching >= 700
    assert staged_bucket([700], [9], FEW_LOGITS + 1)[1] == MAX_LOGITS
    assert bucket(3, (1, 4)) == 4 and bucket(5, (1, 4)) == 5


def test_several_passes_in_a_step_only_as_long_as_streams_can_wait() -> None:
    """Many sequences wait longer: the host has more to do for each step of theirs."""
    assert [longest_run(size, 0.0007) for size in (1, 512)] == [8, 8]
    assert [longest_run(size, 0.004) for size in (1, 16, 32, 512)] == [1, 1, 4, 4]
    assert longest_run(512, 0.011) == 1
    runs = RunChoice()
    for _ in range(50):
        passes = runs.choose(512, 100)
        runs.observe(512, passes, spent=1.0, device=0.004 * passes)
    assert (runs.choose(512, 100), runs.choose(512, 3)) == (4, 2)


def settled(
    runs: RunChoice, host: Callable[[int], float], steps: int = 400, device: float = 0.0013
) -> list[int]:
    """Passes of steps for which the host takes so long, while the device takes 0.0013 s a pass."""
    chosen = []
    for step in range(steps):
        chosen.append(passes := runs.choose(4, 100))
        runs.observe(4, passes, max(host(step), device * passes), device * passes)
    return chosen


def test_a_plan_now_and_then_makes_no_step_longer() -> None:
    """A pass of a longer step takes the device longer, all the time."""
    assert set(settled(RunChoice(), lambda step: 0.0009 + 0.0014 * (step % 30 == 0))) == {1}


def test_steps_are_longer_where_the_device_waits_for_the_host() -> None:
    chosen = settled(RunChoice(), lambda step: 0.0018)
    assert chosen[0] == 1 and chosen[40:].count(2) > 0.95 * len(chosen[40:])


def test_steps_are_short_again_once_the_host_has_less_to_do() -> None:
    runs = RunChoice()
    settled(runs, lambda step: 0.0018)
    chosen = settled(runs, lambda step: 0.0009, steps=2000)
    assert chosen[0] == 2 and set(chosen[-200:]) == {1}


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 40, 64, 200, 512])
def test_fewer_sizes_have_room_for_everybody(count: int) -> None:
    sizes = buckets.sizes_up_to(count)
    for each in (1, 2, 5, 16, 64):
        kept = buckets.fitting_sizes(sizes, each)
        assert kept[0] == 1 and kept[-1] == sizes[-1] and set(kept) <= set(sizes)
        for size in sizes:  # nobody pays for more rows than a pass takes as long for
            larger = next(one for one in kept if one >= size)
            assert larger == size or larger * each <= buckets.ALIKE
    beside = buckets.sizes_beside(count)
    assert bool(beside) == (count > 1)
    for size in sizes if beside else ():
        assert size <= buckets.size_beside(size, count) in beside and len(beside) <= len(sizes)


def test_contexts_that_are_close_are_one() -> None:
    assert contexts_for(2111, 16_384) == [2111]
    assert contexts_for(8255, 16_384) == [1024, 8255]
    assert contexts_for(32_831, 16_384) == [1024, 4096, 16_384]
    assert contexts_for(800, 16_384) == [800]
    for width in (300, 1024, 2111, 4159, 8255, 32_831, 131_135):
        for longest in range(1, width, 97):
            assert longest <= context_for(longest, width) <= width


def test_prompts_alone_find_a_captured_step_of_nearly_their_rows() -> None:
    """A prompt of 300 tokens must not pay for 512."""
    captured = {rows for rows, _ in ALONE}
    for rows in range(33, MOST_CAPTURED + 1):
        room, wanted, _ = staged_bucket([rows], [], 1)
        assert room in captured and rows <= room < rows + STAGED_MULTIPLE
        assert wanted <= dict(ALONE)[room]
    for rows in range(MOST_CAPTURED + 1, LONG_ALONE[-1] + 1):
        assert rows <= bucket(rows, LONG_ALONE) < 4 / 3 * (rows + STAGED_MULTIPLE)


def test_the_longest_step_beside_others_is_one_that_a_library_multiplies() -> None:
    for size in (0, 1, *buckets.BESIDE):
        rows, wanted = buckets.chunk_sizes(size)[-1]
        whole = rows + -(-size // STAGED_MULTIPLE) * STAGED_MULTIPLE
        assert whole == LONG_ALONE[-1] == library.MOST and wanted == MAX_LOGITS
