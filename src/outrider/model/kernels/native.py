"""Python's side of cpu.c and blocks.c: packs weights once, then hands pointers over. Twin: reference.py."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Seq
from ctypes import POINTER, Structure, byref, c_char_p, c_float, c_int32, c_size_t, c_void_p
from dataclasses import dataclass, field, fields
from itertools import count, takewhile
from operator import is_
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.cache.store import KeyValueStore
from outrider.errors import BadCheckpoint, KernelUnavailable, OutOfMemory
from outrider.load.config import LayerSpec, ModelConfig
from outrider.load.quants import Blocks
from outrider.model.kernels.build import library
from outrider.model.kernels.huge import HugePages
from outrider.model.kernels.reference import layer_by_layer
from outrider.model.parallel import ALONE, Group
from outrider.model.rope import RopeTables
from outrider.model.weights import KERNEL_FORMATS, MATRICES, ExpertTensors, LayerTensors, Weight, parts_of
from outrider.types import MAX_NODES, Batch

PANEL, CHUNKS, GROUP, TALL = 16, 16, 4, 8  # as in cpu.c
LANES_MAX = 16  # the widest vector cpu.c is built for; heads must fill it
PARTS = 3
MLP, MLP_BIASES = ("gate", "up", "down"), ("gate_bias", "up_bias", "down_bias")
PROJECT, ATTEND, ADD_MIXED, ACTIVATE, ADD_ACT = range(5)
WHOLE, HALF = 0, 1
KEPT = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}  # as in kv_formats.h
KINDS = {name: number for number, name in enumerate(KERNEL_FORMATS, start=2)}  # as in blocks.h


class _Part(Structure):
    _fields_ = [("data", c_void_p), ("kind", c_int32), ("outputs", c_int32)]


class MatrixStruct(Structure):
    _fields_ = [("parts", _Part * PARTS)]


class _Heads(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("heads", "kv_heads", "head_dim", "window", "chunk", "kept")),
        *((name, c_float) for name in ("scale", "softcap")),
        ("sinks", c_void_p),
    ]


class _Mlp(Structure):
    _fields_ = [*((n, MatrixStruct) for n in MLP), *((n, c_void_p) for n in MLP_BIASES)]


class _Experts(Structure):
    _fields_ = [
        *((n, MatrixStruct) for n in ("router", "shared_gate")),
        *((n, c_void_p) for n in ("router_bias", "correction", "each")),
        *((n, c_int32) for n in ("count", "per_token", "width", "all_width", "sigmoid", "normalise")),
        *((n, c_int32) for n in ("groups", "groups_kept", "weighs_input", "by_score")),
        *((n, c_float) for n in ("floor", "scale")),
    ]


class _Layer(Structure):
    _fields_ = [
        *((n, c_void_p) for n in ("attn_norm", "qkv_bias", "q_norm", "k_norm", "out_bias")),
        *((n, c_void_p) for n in ("mlp_norm", "out_norm", "down_norm", "cos", "sin", "gain")),
        *((n, MatrixStruct) for n in ("qkv", "out")),
        ("mlp", _Mlp),
        ("experts", c_void_p),
        ("heads", _Heads),
        *((n, c_int32) for n in ("intermediate", "whole", "gelu", "all_mixed", "all_act")),
        ("clamp", c_float),
    ]


class _Shape(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("hidden", "threads", "sums")),
        *((name, c_float) for name in ("eps", "residual")),
    ]


class RowsStruct(Structure):
    _fields_ = [
        ("rows", c_int32),
        ("table_stride", c_int32),
        *((name, c_void_p) for name in ("positions", "slots", "table_rows", "prefix", "ancestors", "table")),
    ]


class _Work(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "normed", "qkv", "mixed", "act")),
        *((name, c_void_p) for name in ("logits", "weights", "shared_weight", "chosen", "places", "sources")),
        *((name, c_void_p) for name in ("touched", "starts", "gathered", "expert_act", "all_expert_act")),
        *((name, c_void_p) for name in ("mixture", "read", "all_mixed", "all_act", "sums", "scores")),
        ("score_stride", c_int32),
    ]


@dataclass(slots=True)
class NativePart:
    """Outputs of one format: float32 [N / 16, K, 16], or pairs of bfloat16 in words, [N / 16, K / 2, 16], or the bytes
    of blocks, [N / 16, bytes].
    """

    packed: Tensor
    kind: int
    outputs: int


@dataclass(slots=True)
class NativeLinear:
    parts: list[NativePart]
    bias: Tensor | None
    outputs: int
    inputs: int
    matrix: Any = field(init=False, repr=False)  # what C is given; weights are replaced where they lie

    def __post_init__(self) -> None:
        self.matrix = byref(matrix_of(self.parts))


@dataclass(slots=True)
class NativeLayer:
    struct: _Layer
    tensors: dict[str, Tensor]  # what struct points into
    spec: LayerSpec  # of this rank
    whole: LayerSpec  # of all ranks together
    experts: Any = None  # what struct.experts points to


class NativeKernels:
    name = "c"

    def __init__(
        self,
        config: ModelConfig,
        tables: RopeTables,
        threads: int,
        folder: Path,
        group: Group = ALONE,
    ) -> None:
        """`config` is the whole model's. A rank of several packs and multiplies its own outputs."""
        for spec in config.specs:
            if spec.head_dim % LANES_MAX:
                raise KernelUnavailable(f"head size {spec.head_dim} is not a multiple of {LANES_MAX}")
        self.threads, self.folder, self.tables = threads, folder, tables
        self.config, self.group = group.share(config), group
        self.lib, self.pages = library(folder), HugePages()
        self.lib.blocks_panel_bytes.restype = c_size_t
        self.lib.outrider_variant.restype = self.lib.outrider_chosen.restype = c_char_p
        for multiply in ("linear", "head", "stage", "layer_from", "layers"):
            getattr(self.lib, f"outrider_{multiply}").restype = checked
        pointers = POINTER(_Layer), POINTER(_Shape), POINTER(RowsStruct), POINTER(_Work)
        given: list[Any] = [*pointers, c_void_p, c_int32, c_void_p, c_void_p]
        self.lib.outrider_layer_from.argtypes, self.lib.outrider_stage.argtypes = given, [c_int32, *given]
        own = group.cut(config.hidden)
        sums = own.stop - own.start
        self.shape = _Shape(config.hidden, threads, sums, config.norm_eps, config.residual_scale)
        width = -(-(tables.positions + MAX_NODES + 1) // PANEL) * PANEL
        self.scores = torch.empty(threads, TALL * GROUP * width)
        self._bound: tuple[Batch, RowsStruct] | None = None
        self._stacks: dict[int, tuple[Seq[Any], Seq[Any], Any]] = {}  # by the first layer
        self._best = torch.empty(0, dtype=torch.int32)  # scratch of `draw`
        self._touched = c_int32()
        self._work = _Work(read=ctypes.addressof(self._touched))
        self._buffers: dict[str, Tensor] = {}
        self._capacity = 0

    @property
    def touched(self) -> int:
        """Experts with rows, added up over layers."""
        return self._touched.value

    @touched.setter
    def touched(self, value: int) -> None:
        self._touched.value = value

    @property
    def variant(self) -> str:
        """The block kernels in use; the library takes the quickest that the processor runs."""
        return str(self.lib.outrider_chosen().decode())

    def variants(self) -> list[str]:
        """Those that the processor runs, the quickest first."""
        return [name for name in self._variants() if name]

    def choose(self, variant: str) -> None:
        """Uses other block kernels in this whole process. All give the same bits."""
        self.lib.outrider_choose(self._variants().index(variant))

    def _variants(self) -> list[str]:
        """All, with an empty name in place of those that the processor does not run."""
        names = takewhile(lambda name: name != b"", map(self.lib.outrider_variant, count()))
        return [(name or b"").decode() for name in names]

    def pack_layer(self, tensors: LayerTensors) -> NativeLayer:
        whole, kept = tensors.spec, dict[str, Tensor]()
        s = self.group.share_layer(whole)
        sizes = dict(heads=s.heads, kv_heads=s.kv_heads, head_dim=s.head_dim, window=s.window, chunk=s.chunk)
        heads = _Heads(**sizes, scale=s.scale, softcap=s.softcap)  # `kept` is that of the cache it meets
        struct = _Layer(
            heads=heads,
            intermediate=s.intermediate,
            whole=s.qk_norm == "whole",
            gelu=s.activation == "gelu_tanh",
            clamp=s.clamp,
            all_mixed=whole.heads * whole.head_dim,
            all_act=whole.intermediate,
        )
        if (table := self.tables.of(s)) is not None:
            struct.cos, struct.sin = table.cos.data_ptr(), table.sin.data_ptr()
            struct.gain = None if table.gain is None else table.gain.data_ptr()
        for f in fields(tensors):
            place = (
                struct.mlp if f.name in (*MLP, *MLP_BIASES) else struct.heads if f.name == "sinks" else struct
            )
            self._place(place, f.name, getattr(tensors, f.name), kept, f.name)
        made = NativeLayer(struct, kept, s, whole)
        if tensors.experts is not None:
            made.experts = self._pack_experts(tensors.experts, whole, kept)
            struct.experts = ctypes.addressof(made.experts[0])
        return made

    def _place(self, struct: Any, field: str, value: Any, kept: dict[str, Tensor], name: str) -> None:
        """Points a field of a struct to a packed matrix or a vector. What is neither stays away."""
        if value is None or not (field in (*MATRICES, "router", "shared_gate") or isinstance(value, Tensor)):
            return
        if isinstance(value, Tensor) and value.dim() == 1:
            kept[name] = value.float().contiguous()
            setattr(struct, field, kept[name].data_ptr())
            return
        parts = self._pack(value)
        setattr(struct, field, matrix_of(parts))
        kept |= {f"{name}.{i}": part.packed for i, part in enumerate(parts)}

    def _pack_experts(self, t: ExpertTensors, whole: LayerSpec, kept: dict[str, Tensor]) -> tuple[Any, Any]:
        """The struct and the array of MLPs that it points to."""
        e = whole.experts
        assert e is not None
        own = self.group.cut(e.width)
        each = (_Mlp * e.count)()
        for name in (*MLP, *MLP_BIASES):
            for i, value in enumerate(getattr(t, name) or ()):
                self._place(each[i], name, value, kept, f"experts.{i}.{name}")
        struct = _Experts(
            each=ctypes.addressof(each), count=e.count, per_token=e.per_token, width=own.stop - own.start,
            all_width=e.width, sigmoid=e.score == "sigmoid", normalise=e.normalise, groups=e.groups,
            groups_kept=e.groups_kept, weighs_input=e.weighs_input, by_score=not e.plain_choice, floor=e.floor,
            scale=e.scale,
        )  # fmt: skip
        for name in ("router", "shared_gate", "router_bias", "correction"):
            self._place(struct, name, getattr(t, name), kept, f"experts.{name}")
        return struct, each

    def pack_linear(self, weight: Weight, bias: Tensor | None = None) -> NativeLinear:
        parts = self._pack(weight)
        bias = None if bias is None else bias.float().contiguous()
        return NativeLinear(parts, bias, sum(part.outputs for part in parts), parts_of(weight)[0].shape[1])

    def pack_ends(self, embedding: Weight, head: Weight) -> tuple[NativeLinear, NativeLinear]:
        """A model's first and last matrix, which may be the same."""
        first = self.pack_linear(embedding)
        return first, first if head is embedding else self.pack_linear(head)

    def _pack(self, weight: Weight) -> list[NativePart]:
        return [
            self._pack_blocks(part) if isinstance(part, Blocks) else self._pack_floats(part)
            for part in parts_of(weight)
        ]

    def _pack_floats(self, weight: Tensor) -> NativePart:
        outputs, inputs = weight.shape
        half = weight.dtype is torch.bfloat16 and inputs % 2 == 0  # bfloat16 weights are stored in pairs
        weight = (weight if half else weight.float()).contiguous()
        words, dtype = (inputs // 2, torch.int32) if half else (inputs, torch.float32)
        packed = self.pages.empty(-(-outputs // PANEL), words, PANEL, dtype=dtype)
        self.lib.outrider_pack(_ptr(weight), outputs, words, self.threads, _ptr(packed))
        return NativePart(packed, HALF if half else WHOLE, outputs)

    def _pack_blocks(self, weight: Blocks) -> NativePart:
        outputs, inputs = weight.shape
        kind, raw = KINDS[weight.form.name], weight.raw.contiguous()
        panel = self.lib.blocks_panel_bytes(kind, inputs)
        packed = self.pages.empty(-(-outputs // PANEL), panel, dtype=torch.uint8)
        bad = self.lib.outrider_pack_blocks(kind, _ptr(raw), outputs, inputs, self.threads, _ptr(packed))
        if bad:
            raise BadCheckpoint(
                f"tensor {weight.name!r} is corrupt: {bad} of its scales are no finite numbers"
            )
        return NativePart(packed, kind, outputs)

    def embed(self, table: NativeLinear, ids: Tensor, scale: float = 1.0) -> Tensor:
        """Rows of a packed matrix: a tied embedding needs no second copy."""
        x = torch.empty(ids.shape[0], table.inputs)
        rows, by = ids.shape[0], c_float(scale)
        self.lib.outrider_embed(table.matrix, _ptr(ids), rows, table.inputs, by, self.threads, _ptr(x))
        return x

    def head(self, x: Tensor, rows: Tensor, norm: Tensor, linear: NativeLinear) -> Tensor:
        count = rows.shape[0]
        scratch, out = torch.empty(count, linear.inputs), torch.empty(count, linear.outputs)
        c = self.config
        self.lib.outrider_head(
            _ptr(x), _ptr(rows), count, _ptr(norm), c_float(c.norm_eps), linear.matrix, linear.outputs, linear.inputs,
            c_float(c.logit_divisor), c_float(c.softcap), self.threads, _ptr(scratch), _ptr(out),
        )  # fmt: skip
        return out

    def linear(self, linear: NativeLinear, x: Tensor) -> Tensor:
        out = torch.empty(len(x), linear.outputs)
        bias = None if linear.bias is None else _ptr(linear.bias)
        self.lib.outrider_linear(
            linear.matrix, bias, _ptr(x), len(x), linear.outputs, linear.inputs, self.threads, _ptr(out)
        )
        return out

    def norm(self, x: Tensor, weight: Tensor, eps: float | None = None) -> Tensor:
        return self._add_norm(torch.empty_like(x), x, weight, 0, eps)

    def _add_norm(
        self, to: Tensor, x: Tensor, weight: Tensor, add: float, eps: float | None = None
    ) -> Tensor:
        """Adds `add` times the norm of x to `to`; 0 means that the norm takes its place."""
        small = c_float(self.config.norm_eps if eps is None else eps)
        self.lib.outrider_norm(
            _ptr(x), _ptr(weight), len(x), x.shape[1], small, c_float(add), self.threads, _ptr(to)
        )
        return to

    def layer(self, layer: NativeLayer, x: Tensor, batch: Batch, keys: Tensor, values: Tensor) -> None:
        self.layers([layer], x, batch, [keys], [values])

    def layers(
        self,
        layers: Seq[NativeLayer],
        x: Tensor,
        batch: Batch,
        keys: Seq[Tensor],
        values: Seq[Tensor],
        features: KeyValueStore | None = None,
    ) -> None:
        """Layers one after the other, the model's first ones if hidden states are kept among the `features` of a
        store; keys and values are by layer.
        """
        if self.group.size > 1:
            layer_by_layer(self._shared_layer, layers, x, batch, keys, values, features)
            return
        stack, to_keys, to_values = self._stack(layers, keys, values)
        _, *given = self._given(layers[0], x, batch)
        taps, to_features = (None, None) if features is None else features.addresses
        places = 0 if taps is None else len(taps)
        self.lib.outrider_layers(
            stack, len(layers), *map(byref, given), to_keys, to_values, taps, places, to_features
        )

    def _stack(self, layers: Seq[NativeLayer], keys: Seq[Tensor], values: Seq[Tensor]) -> Any:
        """Pointers to layers, keys and values, made again only where one is not what it was in the last pass.
        Lists that were given in that pass are taken to hold what they held.
        """
        lists, first = (layers, keys, values), id(layers[0])
        known, given, made = self._stacks.get(first, ((), (), ()))
        if known and all(map(is_, lists, known)):
            return made
        now = [*layers, *keys, *values]
        if len(now) != len(given) or not all(map(is_, now, given)):
            pointers = c_void_p * len(layers)
            stack = pointers(*[ctypes.addressof(layer.struct) for layer in layers])
            for layer, own in zip(layers, keys, strict=True):
                layer.struct.heads.kept = KEPT[own.dtype]
            made = stack, *(pointers(*[one.data_ptr() for one in some]) for some in (keys, values))
        self._stacks[first] = lists, now, made
        return made

    def _shared_layer(
        self, layer: NativeLayer, x: Tensor, batch: Batch, keys: Tensor, values: Tensor
    ) -> None:
        """A layer of several ranks, cut where they gather what they computed."""
        layer.struct.heads.kept = KEPT[keys.dtype]
        given, work, s, whole = self._given(layer, x, batch), self._work, layer.spec, layer.whole
        q, kv, hidden = s.heads * s.head_dim, s.kv_heads * s.head_dim, self.config.hidden
        own, units = self.group.cut(hidden), whole.kv_heads
        widths = {"qkv": q + 2 * kv, "mixed": q, "act": s.intermediate, "sums": self.shape.sums}

        def run(stage: int) -> Tensor:
            """What the stage leaves."""
            self.lib.outrider_stage(stage, *given, None, 0, keys.data_ptr(), values.data_ptr())
            return left[stage]

        def add(stage: int, norm: str) -> None:
            if (weight := layer.tensors.get(norm)) is None:
                sums.copy_(x[:, own])
                x.copy_(self.group.gather(run(stage), hidden))
            else:
                self._add_norm(x, self.group.gather(run(stage), hidden), weight, self.config.residual_scale)

        qkv, mixed, act, sums = (
            self._buffers[name][: len(x) * width].view(len(x), width) for name, width in widths.items()
        )
        left = {PROJECT: qkv, ATTEND: mixed, ADD_MIXED: sums, ACTIVATE: act, ADD_ACT: sums}
        run(PROJECT)
        if whole.qk_norm == "whole":
            for name, part in (("q_norm", qkv[:, :q]), ("k_norm", qkv[:, q : q + kv])):
                weight = layer.tensors[name]
                every = self.norm(self.group.gather(part, len(weight), units), weight)
                part.copy_(every[:, self.group.cut(len(weight), units)])
        all_mixed = self.group.gather(run(ATTEND), layer.struct.all_mixed, units)
        work.all_mixed = all_mixed.data_ptr()
        add(ADD_MIXED, "out_norm")
        run(ACTIVATE)
        if whole.intermediate:
            all_act = self.group.gather(act, whole.intermediate)
            work.all_act = all_act.data_ptr()
        if s.experts is not None and whole.experts is not None:
            pairs, width = len(x) * s.experts.per_token, s.experts.width
            part = self._buffers["expert_act"][: pairs * width].view(pairs, width)
            all_expert_act = self.group.gather(part, whole.experts.width)
            work.all_expert_act = all_expert_act.data_ptr()
        add(ADD_ACT, "down_norm")

    def layer_from(
        self, layer: NativeLayer, inputs: Tensor, x: Tensor, batch: Batch, keys: Tensor, values: Tensor
    ) -> None:
        given = self._given(layer, x, batch)
        self.lib.outrider_layer_from(
            *given, _ptr(inputs), inputs.shape[1], keys.data_ptr(), values.data_ptr()
        )

    def _given(self, layer: NativeLayer, x: Tensor, batch: Batch) -> tuple[_Layer, _Shape, RowsStruct, _Work]:
        rows = self.rows_of(batch)
        work = self.work_for(rows.rows)
        work.x = x.data_ptr()
        if self.group.size == 1:
            work.sums = x.data_ptr()
        return layer.struct, self.shape, rows, work

    def attention(
        self,
        q: Tensor,
        batch: Batch,
        keys: Tensor,
        values: Tensor,
        window: int,
        scale: float,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        chunk: int = 0,
    ) -> Tensor:
        own = None if sinks is None else sinks.data_ptr()
        kept = KEPT[keys.dtype]
        heads = _Heads(q.shape[1], keys.shape[1], q.shape[2], window, chunk, kept, scale, softcap, own)
        out = torch.empty_like(q)
        self.lib.outrider_attention(
            byref(heads), byref(self.rows_of(batch)), self.threads, _ptr(q), _ptr(keys), _ptr(values),
            _ptr(self.scores), self.scores.shape[1], _ptr(out),
        )  # fmt: skip
        return out

    def draw(self, logits: Tensor, sampled: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        rows, vocab = logits.shape
        tokens = torch.empty(rows, dtype=torch.int64)
        if len(self._best) < rows * CHUNKS * 2:
            self._best = torch.empty(rows * CHUNKS * 2, dtype=torch.int32)
        self.lib.outrider_draw(
            _ptr(logits), rows, vocab, _ptr(sampled), _ptr(seeds), _ptr(positions),
            self.threads, _ptr(self._best), _ptr(tokens),
        )  # fmt: skip
        return tokens

    def filter_logits(self, logits: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor) -> None:
        rows, vocab = logits.shape
        self.lib.outrider_filter(
            _ptr(logits), rows, vocab, _ptr(top_k), _ptr(top_p), _ptr(log_min_p), self.threads
        )

    def rows_of(self, batch: Batch) -> RowsStruct:
        """The batch's pointers, made once per pass, not once per layer."""
        if self._bound is None or self._bound[0] is not batch:
            names = ("positions", "slots", "table_rows", "prefix", "ancestors", "table")
            pointers: dict[str, Any] = {name: getattr(batch, name).data_ptr() for name in names}
            self._bound = batch, RowsStruct(rows=batch.rows, table_stride=batch.table.stride(0), **pointers)
        return self._bound[1]

    def work_for(self, rows: int) -> _Work:
        """Scratch memory for the widest pass so far; it grows and never shrinks."""
        if rows > self._capacity:
            self._reserve(rows)
        return self._work

    def _reserve(self, rows: int) -> None:
        needed = [
            (s.head_dim * (s.heads + 2 * s.kv_heads), s.head_dim * s.heads, s.intermediate)
            for s in self.config.specs
        ]
        sizes = (self.config.hidden, *(max(some) for some in zip(*needed, strict=True)), self.shape.sums)
        widths = dict(zip(("normed", "qkv", "mixed", "act", "sums"), sizes, strict=True))
        if self.group.size == 1:
            del widths["sums"]
        widths |= self._expert_widths()
        self._buffers = {name: torch.empty(rows * width) for name, width in widths.items()}
        for name in ("chosen", "places", "sources", "touched", "starts"):
            if name in self._buffers:
                self._buffers[name] = self._buffers[name].view(torch.int32)
        for name, buffer in self._buffers.items():
            setattr(self._work, name, buffer.data_ptr())
        self._work.all_mixed, self._work.all_act = self._work.mixed, self._work.act  # of one rank
        self._work.all_expert_act = self._work.expert_act
        self._work.scores, self._work.score_stride = self.scores.data_ptr(), self.scores.shape[1]
        self._capacity = rows

    def _expert_widths(self) -> dict[str, int]:
        """Numbers a row of what experts need, for the largest of all layers."""
        every = [spec.experts for spec in self.config.specs if spec.experts is not None]
        if not every:
            return {}
        most, hidden = max(e.per_token for e in every), self.config.hidden
        experts = max(e.count for e in every) + 1
        act = max(e.per_token * e.width for e in every)
        return {
            "logits": experts, "weights": most, "shared_weight": 1, "chosen": most, "places": most, "sources": most,
            "touched": experts, "starts": experts, "gathered": most * hidden, "expert_act": act, "mixture": hidden,
        }  # fmt: skip


def checked(done: int) -> None:
    """What ctypes makes of the result of a kernel that needs memory."""
    if not done:
        raise OutOfMemory(
            "no memory is left for a step's activations; use less: --step-rows, --max-sequences"
        )


def matrix_of(parts: list[NativePart]) -> MatrixStruct:
    made = [_Part(part.packed.data_ptr(), part.kind, part.outputs) for part in parts]
    return MatrixStruct((_Part * PARTS)(*made))


def _ptr(tensor: Tensor) -> c_void_p:
    if not tensor.is_contiguous():
        raise ValueError("kernels take contiguous tensors")
    return c_void_p(tensor.data_ptr())


def read_bandwidth(threads: int, folder: Path, megabytes: int = 512) -> float:
    """Bytes per second that this machine reads from memory with `threads` threads: the limit of plain decoding."""
    import time

    lib = library(folder)
    lib.outrider_read.restype = c_float
    data = torch.ones(megabytes * (1 << 20) // 4)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        lib.outrider_read(_ptr(data), ctypes.c_int64(len(data)), threads)
        times.append(time.perf_counter() - begin)
    return data.nbytes / min(times)
