"""Compiles every kernel a decoder launches for a GPU that is not there, and says what each one takes.

    python -m tests.model.gpu.compile_kernels few
    python -m tests.model.gpu.compile_kernels every
    python -m tests.model.gpu.compile_kernels orders

A process of its own: Triton decides when it is imported whether kernels are interpreted or compiled. Tensors lie on
the CPU and nothing is run, so only what the compiler refuses is found; what kernels compute, the interpreter tells.
With `few`, a kernel's second size and those after it are only read by the compiler, which takes a tenth of the time.
With `orders` only attention is compiled, to see in which order products of a row's numbers are added.
"""

# mypy: disable-error-code="import-untyped, import-not-found"

from __future__ import annotations

import os

os.environ.pop("TRITON_INTERPRET", None)

import re
import subprocess
import sys
import tempfile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

TARGET = GPUTarget("cuda", 90, 32)


class Absent:
    """A driver for a Hopper GPU that cannot launch anything."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class OnlyRead(Exception):
    """A kernel that the compiler has understood, and is not to lower any further."""


def compile_instead_of_running(every: bool) -> list[Any]:
    """From now on a launch compiles its kernel and leaves its outputs as they were; returns what was compiled."""
    made: dict[int, Any] = {}
    kept: list[Any] = []
    whole: set[str] = set()  # kernels that one size of was lowered
    launched = ""
    triton.runtime.driver.set_active(Absent())
    run, lower = triton.runtime.jit.JITFunction.run, CUDABackend.make_ttgir

    def lower_once(*given: Any) -> Any:
        if launched in whole and not every:
            raise OnlyRead
        return lower(*given)

    def compiled(self: Any, *args: Any, warmup: bool = False, **options: Any) -> Any:
        nonlocal launched
        launched = self.__name__
        try:
            kernel = run(self, *args, warmup=True, **options)
        except OnlyRead:
            return None
        whole.add(launched)
        if id(kernel) not in made:
            made[id(kernel)] = kernel
            kept.append(kernel)
        return kernel

    CUDABackend.make_ttgir = staticmethod(lower_once)
    triton.runtime.jit.JITFunction.run = compiled
    return kept


def main() -> None:
    every = sys.argv[1:] != ["few"]
    kernels = compile_instead_of_running(every)
    from outrider.model import staged
    from outrider.model.kernels.gpu import attention, launch

    staged.is_hopper = attention.is_hopper = lambda: True
    launch.chained = lambda: {"CHAIN": True, "launch_pdl": True}
    for module in _modules():
        module.chained = launch.chained
    if sys.argv[1:] == ["orders"]:
        _launch_tiles()
        for kernel in kernels:
            orders = sorted(set(re.findall(r"kWidth = \d+", kernel.asm["ttgir"])))
            print(kernel.name, *orders, sep=", ")
        return
    _launch_all(every)
    _launch_kinds(every)
    _launch_experts(every)
    _launch_losses()
    for kernel in kernels:
        registers, spilled = _registers(kernel.asm["cubin"])
        warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
        print(f"{kernel.name} {warps} warps, {registers} registers, {shared} shared, {spilled} spilled")


def _registers(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of them that found no room."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert used is not None, told
    return int(used[1]), int(used[2])


def _modules() -> list[Any]:
    from outrider.model.kernels.gpu import (
        attention,
        copies,
        draw,
        edit,
        experts,
        filter,
        kernels,
        library,
        matmul,
        routing,
        rows,
        step_ops,
    )

    return [attention, copies, draw, edit, experts, filter, kernels, library, matmul, routing, rows, step_ops]


def _launch_all(every: bool) -> None:
    from outrider.device.ops import StepOps
    from outrider.device.ops_gpu import GpuStepOps
    from outrider.device.state import SequenceState
    from outrider.model.decoder import Decoder, make_store
    from outrider.model.device import DeviceDecoder
    from outrider.model.kernels.gpu.copies import find_copies
    from outrider.model.kernels.gpu.kernels import GpuKernels
    from outrider.model.rope import rope_tables
    from outrider.types import Draft
    from tests.model.batches import Part, Reader, random_ids
    from tests.tiny import VOCAB, random_tensors, tiny_config

    config = tiny_config(
        heads=8, kv_heads=2, head_dim=64, hidden=512, intermediate=1024, layers=1, windows=(0,)
    )
    kernels = GpuKernels(config, rope_tables(config, 8192), device="cpu")
    model = DeviceDecoder(Decoder(config, random_tensors(config), kernels))
    store = make_store(model, 600)
    model.kept = torch.int8
    narrow = make_store(model, 600)
    state = SequenceState(4, 520, torch.device("cpu"), config.vocab)
    ops = GpuStepOps(state, model)
    shapes = ((1, (0, 0)), (1, (4, 4)), (4, (8, 8)), (1, (3, 15)))
    for size, shape in shapes if every else shapes[::3]:
        ops.filtered, ops.edited = size == 4, bool(shape[0]) or not every
        for one in (store, narrow) if every else (store,):
            _launch_step(ops, one, size, shape)
    owners = torch.zeros(2, dtype=torch.int64)
    find_copies(state.tokens, state.references, state.spans, owners, owners, 4, 512, (8, 2, 4))
    model.filter_logits(
        torch.zeros(2, 128_256), state.top_k[owners], state.top_p[owners], state.log_min_p[owners]
    )
    _launch_tall()
    if not every:
        return
    tree = Part(0, random_ids(VOCAB, 12), Draft((1, 2, 3), (-1, 0, 0)))
    model.forward(Reader(config).batch(tree), store)
    _launch_head(StepOps(state, model), store)  # whose batches are there


def _launch_step(ops: Any, store: Any, size: int, shape: tuple[int, int]) -> None:
    """What a step launches; a plain one of a single sequence has staged rows beside it."""
    from outrider.control.trees import tree_nodes
    from outrider.device.buckets import staged_shape
    from outrider.device.ops import SLOTS, TreeLayout
    from outrider.model.device import DevicePass
    from outrider.model.staged import StagedRows
    from tests.tiny import VOCAB

    tree, nodes, state = TreeLayout(tree_nodes(shape)), shape[1], ops.state
    step = ops.begin_step(torch.zeros((size, SLOTS + nodes + 1), dtype=torch.int32))
    drafted = torch.zeros((size, nodes + 1), dtype=torch.int64)
    for tensor in (step.rows, step.lengths):  # nothing was written there
        tensor.zero_()
    batch = ops.build_batch(step.rows, step.lengths, tree.layout, drafted)
    batch.table_rows.zero_()
    staged = None
    if not nodes:
        room = staged_shape(32, 32, 16, ops.model.config)
        staged = StagedRows(room, state.table, store.slots, state.rows)
    whole = staged.join(batch) if staged else batch
    logits = DevicePass(ops.model, store)(whole, nodes + 1, 512, tree.branches, staged)
    ops.draw(batch, logits[: batch.rows], tree.columns, drafted)
    ops.append_tokens(step, drafted)
    for layout, columns in tree.levels:
        level = ops.build_batch(step.rows, step.lengths, layout, drafted)
        level.table_rows.zero_()
        ops.draw(level, torch.zeros((size * len(layout), VOCAB)), columns, drafted)
    if nodes:
        parents = tree.shape.parents
        ops.commit(step, parents, tree.depth, drafted[:, 1:].contiguous(), None, drafted)


def _launch_losses() -> None:
    from outrider.distill.losses import LOSSES, Targets
    from outrider.distill.losses_gpu import fused_divergence

    rows = torch.ones(2)
    for kind in LOSSES:
        targets = Targets(torch.zeros(2, 16_384), rows, rows)
        fused_divergence(kind, torch.zeros((2, 16_384), dtype=torch.bfloat16), targets, rows)


def _launch_tall() -> None:
    """Attention of a long prompt, in heads of the size that takes most room."""
    from outrider.cache.formats import stored
    from outrider.model.kernels.gpu.attention import TALL, attend, plan_attention
    from tests.model.batches import Part, Reader
    from tests.tiny import tiny_config

    reader = Reader(tiny_config(heads=128, kv_heads=32, head_dim=128, layers=1, windows=(0,)), longest=310)
    batch = reader.batch(Part(0, [1] * 300))
    q = torch.empty((batch.rows, 128, 128), dtype=torch.bfloat16)
    plan = plan_attention(batch, 128, 32, 128)
    assert plan.tile == TALL
    for window, kept in ((0, torch.bfloat16), (100, torch.bfloat16), (0, torch.int8), (100, torch.int8)):
        keys = stored(torch.zeros((400, 32, 128)), kept)
        attend(q, batch, keys, keys.clone(), window, 0.1, plan, torch.empty_like(q))


def _launch_tiles() -> None:
    """Attention over keys and values of 16 and of 8 bits, in programs that two kinds of instruction multiply for."""
    from outrider.cache.formats import stored
    from outrider.model.kernels.gpu.attention import attend, plan_attention
    from tests.model.batches import Part, Reader
    from tests.tiny import tiny_config

    reader = Reader(tiny_config(heads=3, kv_heads=1, head_dim=64, layers=1, windows=(0,)), longest=64)
    for rows in (1, 16):
        batch = reader.batch(Part(0, [1] * rows))
        q = torch.empty((rows, 3, 64), dtype=torch.bfloat16)
        for kept in (torch.bfloat16, torch.int8):
            keys = stored(torch.zeros((100, 1, 64)), kept)
            attend(q, batch, keys, keys.clone(), 0, 0.1, plan_attention(batch, 3, 1, 64), torch.empty_like(q))


def _launch_head(ops: Any, store: Any) -> None:
    """An EAGLE head in a step, where the table begins at an odd address."""
    from outrider.cache.table import SlotTable
    from outrider.control.trees import tree_nodes
    from outrider.device.ops import TreeLayout
    from outrider.draft.eagle import EagleDrafter
    from outrider.draft.eagle_head_gpu import GpuEagleHead
    from outrider.load.heads import HeadConfig
    from tests.tiny import head_tensors

    c = ops.model.config
    layer = c.reshaped(heads=2, kv_heads=1, head_dim=16, intermediate=40)
    norms = {"tap_norms": True, "norm_output": True, "shared_head": True}
    config = HeadConfig(layer, 90, (0, c.layers), 2, **norms)
    head = GpuEagleHead(config, head_tensors(config).__getitem__, ops.model, 520)
    rows, chain = torch.arange(4), TreeLayout(tree_nodes((1, 1)))
    for window in (9, 1):  # known tokens and single nodes; nothing runs, so what it draws cannot be fed
        drafter = EagleDrafter(head, store, SlotTable(store.slots, 4, 520), window)
        drafter.propose_resident(ops, rows, rows, chain, 512)


def _launch_kinds(every: bool) -> None:
    """Weights in fewer bits, in a decoder; and every kind in a big model's shapes, in the tiles that take most room."""
    from outrider.device.ops import chain_levels
    from outrider.device.ops_gpu import GpuStepOps
    from outrider.device.state import SequenceState
    from outrider.model.decoder import Decoder, make_store
    from outrider.model.device import DeviceDecoder, DevicePass
    from outrider.model.kernels.gpu.kernels import GpuKernels
    from outrider.model.kernels.gpu.library import Library
    from outrider.model.kernels.gpu.matmul import gated_linear, linear, room_for, widen
    from outrider.model.kernels.gpu.quantise import KINDS
    from outrider.model.rope import rope_tables
    from tests.tiny import random_tensors, tiny_config

    config = tiny_config(layers=1, windows=(0,), heads=4, head_dim=64, hidden=192)
    state, one = SequenceState(4, 520, torch.device("cpu")), torch.zeros(1, dtype=torch.int64)
    layout, _ = next(chain_levels(1))
    for kind in KINDS if every else ():
        kernels = GpuKernels(config, rope_tables(config, 8192), device="cpu", weights=kind)
        model = DeviceDecoder(Decoder(config, random_tensors(config), kernels))
        batch = GpuStepOps(state, model).build_batch(one, one, layout)
        DevicePass(model, make_store(model, 600))(batch, 1, 512)
    x = torch.empty((128, 64), dtype=torch.bfloat16)
    Library(torch.empty((192, 64)), frozenset({128}), lambda *given: None).multiply_gated(
        x, torch.zeros(192), x.new_empty((1, 128, 96))
    )
    methods = ((1, linear, (1, 200, 300)), (2, gated_linear, (1, 64, 300)))
    for i, kind in enumerate(("bfloat16", *KINDS)):
        few = ((1, linear, (300,)), (2, gated_linear, (64,)))[i % 2]
        for halves, multiply, counts in methods if every else [few]:
            weight = room_for(halves, 4096, 4096, kind, torch.bfloat16, "cpu")
            if kind in KINDS:
                widen(weight, torch.empty((halves * 4096, 4096), dtype=torch.bfloat16))
            for rows in counts:
                multiply(torch.empty((rows, 4096), dtype=torch.bfloat16), weight)


def _launch_experts(every: bool) -> None:
    """Of every kind of router, in a decoder; and products of Qwen3-30B-A3B, whose tiles take most room."""
    from outrider.load.config import Experts
    from outrider.model.kernels.gpu import mxfp4
    from outrider.model.kernels.gpu.experts import expert_parts, gated_experts
    from outrider.model.kernels.gpu.matmul import room_for
    from outrider.model.kernels.gpu.quantise import KINDS
    from outrider.model.kernels.gpu.routing import Schedule, choose, schedule
    from outrider.model.kernels.gpu.rows import ExpertParts, add_and_norm

    slots = torch.zeros(64, dtype=torch.int32)
    grouped = Experts(256, 8, 768, score="sigmoid", correction=True, groups=8, groups_kept=4)
    routers = (Experts(128, 8, 768), Experts(16, 1, 768, score="sigmoid", normalise=False), grouped)
    for how in routers if every else routers[:1]:
        correction = torch.zeros(how.count) if how.correction else None
        choice = choose(torch.zeros(4, 64, how.count), correction, how, slots, 9, slots[:1])
        schedule(choice, how.count, torch.zeros(1, dtype=torch.int32))
        given, shared = torch.zeros(1, 64 * how.per_token, 2048), torch.zeros(1, 64, 2048)
        gates = torch.zeros(4, 64, 1) if how.correction else None
        pending = ExpertParts(given, choice.experts, choice.weights, shared, gates)
        add_and_norm(
            torch.zeros(64, 2048), pending, torch.zeros(2048), 1e-5, torch.zeros(64, 2048).bfloat16()
        )
    top = 8
    for kind in ("bfloat16", mxfp4.KIND, *KINDS) if every else ("bfloat16",):
        halves = [
            room_for(n, *shape, kind, torch.bfloat16, "cpu", 128)
            for n, shape in ((2, (768, 2048)), (1, (2048, 768)))
        ]
        for rows in (1, 300, 600, 2048) if every else (1,):
            counts = torch.zeros(128, dtype=torch.int32)
            plan = Schedule(torch.zeros((128, rows), dtype=torch.int32), counts)
            act = gated_experts(torch.empty((rows, 2048), dtype=torch.bfloat16), halves[0], None, plan, top)
            expert_parts(act, halves[1], torch.zeros(128, 2048), plan)


if __name__ == "__main__":
    main()
