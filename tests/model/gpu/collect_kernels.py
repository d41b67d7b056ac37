"""Counts the steps and the kernels that an engine on a GPU prepares, with no GPU at hand; nothing is compiled.

    python -m tests.model.gpu.collect_kernels SEQUENCES CONTEXT

Lines of JSON: steps, and kernels by name, of steps without drafts and then of all; and the kernels that those steps
launch but nobody collected. A process of its own: Triton decides when it is imported whether kernels are interpreted.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import torch

from outrider.draft.drafters import Drafters
from outrider.draft.lm import LmDrafter
from outrider.draft.lookup import LookupDrafter
from outrider.engine.graph_runner import GraphRunner
from outrider.engine.kv_cache import make_kv_cache
from outrider.settings import Settings
from tests.model.gpu.compile_kernels import Absent, _modules
from tests.tiny import random_tensors, tiny_config


def decoder(**shape: Any) -> Any:
    from outrider.model.decoder import Decoder
    from outrider.model.device import DeviceDecoder
    from outrider.model.kernels.gpu.kernels import GpuKernels
    from outrider.model.rope import rope_tables

    config = tiny_config(head_dim=64, layers=2, context=40_000, **shape)
    kernels = GpuKernels(config, rope_tables(config, config.context), device="cpu")
    return DeviceDecoder(Decoder(config, random_tensors(config), kernels))


def make_runner(sequences: int, context: int) -> GraphRunner:
    import triton

    from outrider.device.ops_gpu import GpuStepOps
    from outrider.device.state import SequenceState
    from outrider.model.device import GraphedPass
    from outrider.model.kernels.gpu.copies import find_copies

    triton.runtime.driver.set_active(Absent())
    for module in _modules():
        module.chained = lambda: {"CHAIN": True, "launch_pdl": True}
    target = decoder(heads=8, kv_heads=2, hidden=512, intermediate=1024)
    small = decoder(heads=4, kv_heads=2, hidden=256, intermediate=512)
    cache = make_kv_cache(target, Settings(max_sequences=sequences, context=context, cache_bytes=1 << 22))
    lm = LmDrafter(small, cache.table, target.config.vocab, context, GraphedPass)
    drafters = Drafters({"lm": lm, "lookup": LookupDrafter(find=find_copies)}, target.config.vocab)
    rows, width = cache.table.tensor.shape
    ops = GpuStepOps(SequenceState(rows, width, torch.device("cpu"), target.config.vocab), target)

    def record(step: Any) -> Any:
        raise AssertionError("nothing is captured here")

    return GraphRunner(target, cache, drafters, ops, target.make_pass(cache.store), record)


def launched(runner: GraphRunner) -> set[Any]:
    """What the steps launch, where kernels do nothing."""
    from outrider.model.kernels.gpu import ahead, step_ops

    keys: set[Any] = set()
    zeros = torch.zeros

    def note(self: Any, grid: Any) -> Any:
        return lambda *given, **options: keys.add(self._key(given, options))

    step_ops.aligned = lambda rows, count, dtype, device: tuple(
        zeros(count, dtype=dtype) for _ in range(rows)
    )  # nothing is written there: rows and slots that there are
    ahead.Kernel.__getitem__ = note  # type: ignore[method-assign]
    for step in runner.graphs.steps.values():
        step._step()
    return keys


def main() -> None:
    from outrider.model.kernels.gpu.ahead import AHEAD

    sequences, context = map(int, sys.argv[1:])
    AHEAD.most = 0  # threads
    runner = make_runner(sequences, context)
    for drafters in (None, ("lm", "lookup")):
        for _ in runner.preparation.compile(sequences, drafters):
            pass
        print(json.dumps([len(runner.graphs.steps), Counter(key[0] for key in AHEAD.jobs)]))
    print(json.dumps(sorted(map(str, launched(runner) - AHEAD.jobs.keys()))))


if __name__ == "__main__":
    main()
