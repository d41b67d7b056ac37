"""The target's pass as captured steps run it: by sequences, rows of each and context, and where the time goes.

    PYTHONPATH=src python bench/gpu/chains.py --shape 8b --sequences 1,16 --rows 1,5,9 --contexts 512,8192

Weights are random: a pass's time does not depend on what they say. `--shape` may also be
hidden:layers:heads:kv_heads:intermediate.
"""

from __future__ import annotations

import argparse
import itertools
import time

import torch
from step import breakdown, random_model, replayed, slot_table  # beside this file

from outrider.cache.store import KeyValueStore
from outrider.device.layout import TreeLayout
from outrider.device.ops_gpu import GpuStepOps
from outrider.device.state import SequenceState
from outrider.model.decoder import make_store
from outrider.model.device import DeviceDecoder, DevicePass
from outrider.model.kernels.gpu.recording import record
from outrider.types import MAX_NODES, Draft


def captured(
    ops: GpuStepOps, store: KeyValueStore, shape: tuple[int, int, int]
) -> tuple[torch.cuda.CUDAGraph, object]:
    """The graph of a pass and of sampling over `sequences` sequences, `rows` rows each, at the end of `context` tokens;
    and what it reads, which must live as long.
    """
    (sequences, rows, context), state = shape, ops.state
    run = DevicePass(ops.model, store)
    owners = torch.arange(sequences, device=state.device)
    lengths = torch.full_like(owners, context - rows)
    drafted = torch.randint(1000, (sequences, max(rows - 1, 1)), device=state.device)
    tree, sampled = TreeLayout(Draft.chain([0] * (rows - 1))), state.draft_buffer(sequences, rows)

    def work() -> torch.Tensor:
        batch = ops.build_batch(owners, lengths, tree.layout, drafted)
        logits = run(batch, rows, context)
        ops.draw(batch, logits, tree.columns, sampled)
        return sampled

    graph, _ = record(work)
    return graph, (run, owners, lengths, drafted, sampled)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--sequences", default="1,16")
    parser.add_argument("--rows", default="1,5,9")
    parser.add_argument("--contexts", default="512,8192")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument(
        "--scattered", action="store_true", help="sequences whose slots lie all over the place"
    )
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    many, rows, contexts = (
        [int(n) for n in text.split(",")] for text in (given.sequences, given.rows, given.contexts)
    )
    longest = max(contexts) + MAX_NODES + 1
    begin = time.time()
    model = DeviceDecoder(random_model(given.shape, longest))
    print(f"{given.shape}: made in {time.time() - begin:.0f} s", flush=True)
    state = SequenceState(max(many), longest, model.device)
    ops = GpuStepOps(state, model)
    state.temperature.fill_(given.temperature)
    slots = max(many) * longest
    store = make_store(model, slots)
    state.table[: max(many)] = slot_table(max(many), longest, given.scattered).to(model.device)
    plain: dict[tuple[int, int], float] = {}
    for context, sequences, each in itertools.product(contexts, many, rows):
        graph, _kept = captured(ops, store, (sequences, each, context))
        ms = replayed(graph)
        if given.profile:
            breakdown(graph, model.config.layers)
        first = plain.setdefault((context, sequences), ms)
        print(
            f"context {context:6} sequences {sequences:3} rows {each:2}: {ms:.3f} ms, {ms / first:.3f}x one row",
            flush=True,
        )


if __name__ == "__main__":
    main()
