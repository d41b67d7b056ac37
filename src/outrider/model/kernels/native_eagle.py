"""Python's side of eagle.h: an EAGLE head whose passes and drafts are one call each. Twin: the single kernels, which
draft/eagle_head.py calls in turn.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from ctypes import Structure, byref, c_float, c_int32, c_void_p
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.cache.store import KeyValueStore
from outrider.model.kernels.native import (
    CHUNKS,
    MatrixStruct,
    NativeKernels,
    NativeLayer,
    NativeLinear,
    RowsStruct,
    checked,
    matrix_of,
)
from outrider.types import MAX_NODES, Batch


class _Eagle(Structure):
    _fields_ = [
        *((name, MatrixStruct) for name in ("embedding", "fuse", "words")),
        *((name, c_void_p) for name in ("ones", "embed_norm", "first_norm", "norm")),
        *((name, c_void_p) for name in ("layers", "keys", "values", "to_target")),
        *((n, c_int32) for n in ("count", "taps", "together", "normed_residual", "norm_output", "vocab")),
        ("embedding_scale", c_float),
    ]


class _Drafts(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("count", "depth", "words", "filtered")),
        *((n, c_void_p) for n in ("depths", "children", "sampled", "seeds", "known", "divisors", "top_k")),
        *((n, c_void_p) for n in ("top_p", "log_min_p", "slots", "last", "features", "read_ids", "before")),
        *((n, c_void_p) for n in ("gathered", "x", "inputs", "hidden", "normed", "logits", "wide")),
        *((n, c_void_p) for n in ("positions", "ancestors", "at", "ids", "best", "tokens", "shares")),
    ]


class Drafted(NamedTuple):
    """What is drafted for one sequence, and from what."""

    tokens: Seq[int]  # known ones,
    start: int  # and the first of those to be read
    table_rows: int  # its row of the slot table
    prefix: int  # entries of it before the draft
    known: int  # tokens
    depths: int
    children: int  # at each level: 1, or BRANCH
    divisors: float  # of the logits
    sampled: bool
    seeds: int
    top_k: int
    top_p: float
    log_min_p: float


BRANCH = 4  # as in eagle.h
# Numbers of each sequence: what `Drafted` has, and scratch.
DTYPES: dict[str, Any] = {
    "table_rows": np.int32,
    "prefix": np.int32,
    "known": np.int64,
    "depths": np.int32,
    "children": np.int32,
    "divisors": np.float32,
    "sampled": np.uint8,
    "seeds": np.int64,
    "top_k": np.int64,
    "top_p": np.float32,
    "log_min_p": np.float32,
    "positions": np.int32,
    "ancestors": np.int64,
    "at": np.int64,
    "ids": np.int64,
    "last": np.int32,
}
# The same of tokens that are read: fields of `RowsStruct`, then of `_Drafts`.
ROWS: dict[str, Any] = {
    "positions": np.int32, "slots": np.int32, "table_rows": np.int32, "prefix": np.int32, "ancestors": np.int64,
}  # fmt: skip
READ: dict[str, Any] = {"read_ids": np.int64, "before": np.int32}  # fmt: skip


class NativeEagle:
    def __init__(
        self,
        kernels: NativeKernels,
        layers: Seq[NativeLayer],
        matrices: Mapping[str, NativeLinear],  # embedding, fuse and words
        norms: Mapping[str, Tensor],  # ones, embed_norm, first_norm and norm
        to_target: Tensor | None,
        **numbers: Any,  # the other fields of `_Eagle`
    ) -> None:
        self.kernels, self.lib = kernels, kernels.lib
        for name in ("forward", "read", "draft"):
            getattr(self.lib, f"outrider_eagle_{name}").restype = checked
        self.outputs, self.vocab = matrices["words"].outputs, numbers["vocab"]
        self._held = layers, matrices, norms, to_target  # what the struct points to
        self._layers = (c_void_p * len(layers))(*(ctypes.addressof(layer.struct) for layer in layers))
        self.struct = _Eagle(
            **{name: matrix_of(one.parts) for name, one in matrices.items()},
            **{name: one.data_ptr() for name, one in norms.items()},
            layers=ctypes.addressof(self._layers), count=len(layers),
            to_target=None if to_target is None else to_target.data_ptr(), **numbers,
        )  # fmt: skip
        self._store: tuple[KeyValueStore, Any, Any] | None = None
        self._drafts, self._rows, self._read = _Drafts(), RowsStruct(), RowsStruct()
        self._count = self._known = 0  # sequences and tokens that there is scratch for
        self._numbers: dict[str, NDArray[Any]] = {}
        self._of_read: dict[str, NDArray[Any]] = {}
        self._scratch: dict[str, Tensor] = {}

    def forward(self, hidden: Tensor, batch: Batch, store: KeyValueStore) -> Tensor:
        """All layers over [R, hidden] and the embeddings of batch.ids; it overwrites `hidden`."""
        inputs = torch.empty(2 * hidden.numel())
        given = self._given(self.kernels.rows_of(batch), store)
        self.lib.outrider_eagle_forward(*given, _at(batch.ids), _at(hidden), _at(inputs), _at(hidden))
        return hidden

    def read(self, features: Tensor, slots: NDArray[np.int32], batch: Batch, store: KeyValueStore) -> Tensor:
        """The same of known tokens, from the target's hidden states before them: features [slots, taps, hidden], of
        these slots.
        """
        rows, width, hidden = batch.rows, features[0].numel(), self.kernels.config.hidden
        gathered, inputs, x = (torch.empty(rows, n) for n in (width, 2 * hidden, hidden))
        given = self._given(self.kernels.rows_of(batch), store)
        self.lib.outrider_eagle_read(
            *given, _at(batch.ids), _at(features), c_void_p(slots.ctypes.data), _at(gathered), _at(inputs), _at(x)
        )  # fmt: skip
        return x

    def draft(
        self,
        asked: Seq[Drafted],
        slots: Seq[NDArray[np.int32]],
        table: Tensor,
        features: Tensor,
        store: KeyValueStore,
        words: int,
    ) -> list[tuple[list[list[int]], list[list[float]]]]:
        """For each sequence, by level, the tokens of a chain by the law of sampling and those that come next, and their
        shares, 0 where the drafter rules a token out. `features` [slots, taps, hidden] are the target's hidden states.
        `slots` are for a chain's tokens but the last one. Only the first `words` of the head's vocabulary are drafted.
        """
        count, order = len(asked), list(range(len(asked)))
        if count > 1:
            order = sorted(order, key=lambda i: -asked[i].depths)
            asked, slots = [asked[i] for i in order], [slots[i] for i in order]
        self._reserve(count)
        _, _, *columns = zip(*asked, strict=True)
        for name, values in zip(Drafted._fields[2:], columns, strict=True):
            self._numbers[name][:count] = values
        given, rows, depth, all_slots = self._drafts, self._rows, asked[0].depths, self._numbers["slots"]
        for i, own in enumerate(slots):
            all_slots[i : len(own) * count : count] = own
        given.count, given.depth, given.words = count, depth, words
        given.filtered = any(one.top_k or one.top_p < 1 or one.log_min_p > -np.inf for one in asked)
        given.features = features.data_ptr()
        # A head's entries begin with the second token.
        rows.rows, rows.table, rows.table_stride = (
            count,
            table.data_ptr() + table.element_size(),
            table.stride(0),
        )
        read = self._lay_out(asked, table.numpy(), features[0].numel())
        read.table, read.table_stride = rows.table, rows.table_stride
        self.kernels.work_for(read.rows)
        self.lib.outrider_eagle_draft(*self._given(rows, store), byref(read), byref(given))
        each = depth * count * BRANCH
        found: list[Any] = [None] * count
        tokens, shares = (self._numbers[n][:each].reshape(depth, count, BRANCH) for n in ("tokens", "shares"))
        for at, (i, one) in enumerate(zip(order, asked, strict=True)):
            mine = slice(one.depths), at, slice(one.children)
            found[i] = tokens[mine].tolist(), shares[mine].tolist()
        return found

    def _lay_out(self, asked: Seq[Drafted], entries: NDArray[np.int32], width: int) -> RowsStruct:
        """The rows of the tokens that are read first."""
        total = sum([one.known - one.start for one in asked])
        if total > self._known:
            self._reserve_read(total, width)
        read, at = self._of_read, 0
        for i, (tokens, start, row, prefix, known, *_) in enumerate(asked):
            end = at + known - start
            read["read_ids"][at:end] = tokens[start:known]
            read["slots"][at:end] = entries[row, start:known]
            read["before"][at:end] = entries[row, start - 1 : prefix]
            read["positions"][at:end] = range(start - 1, prefix)
            read["prefix"][at:end] = range(start, known)
            read["table_rows"][at:end] = row
            self._numbers["last"][i] = end - 1
            at = end
        self._read.rows = total
        return self._read

    def _given(self, rows: RowsStruct, store: KeyValueStore) -> tuple[Any, ...]:
        if self._store is None or self._store[0] is not store:
            array = c_void_p * len(store.keys)
            keys, values = (array(*(one.data_ptr() for one in some)) for some in (store.keys, store.values))
            self._store = store, keys, values
            self.struct.keys, self.struct.values = ctypes.addressof(keys), ctypes.addressof(values)
        return (
            byref(self.struct),
            byref(self.kernels.shape),
            byref(rows),
            byref(self.kernels.work_for(rows.rows)),
        )

    def _reserve(self, count: int) -> None:
        """Scratch for the most sequences so far; it grows and never shrinks."""
        if count <= self._count:
            return
        self._count, each = count, count * MAX_NODES
        self._numbers = {name: np.zeros(count, dtype) for name, dtype in DTYPES.items()}
        self._numbers["slots"] = np.zeros(each, np.int32)
        self._numbers["tokens"] = np.zeros(each * BRANCH, np.int64)
        self._numbers["shares"] = np.zeros(each * BRANCH, np.float32)
        hidden = self.kernels.config.hidden
        for name, width in {
            "hidden": hidden,
            "normed": hidden,
            "logits": self.outputs,
            "best": 2 * CHUNKS,
        }.items():
            self._scratch[name] = torch.empty(count * width)
        if self.struct.to_target is not None:  # words that the head does not know keep this
            self._scratch["wide"] = torch.full((count * self.vocab,), float("-inf"))
        for name in ("table_rows", "prefix"):
            setattr(self._rows, name, self._numbers[name].ctypes.data)
        self._point()

    def _reserve_read(self, rows: int, width: int) -> None:
        """The same for the most tokens that were read."""
        self._known, hidden = rows, self.kernels.config.hidden
        self._of_read = {name: np.zeros(rows, dtype) for name, dtype in {**ROWS, **READ}.items()}
        for name, each in {"gathered": width, "x": hidden, "inputs": 2 * hidden}.items():
            self._scratch[name] = torch.empty(rows * each)
        for name in ROWS:
            setattr(self._read, name, self._of_read[name].ctypes.data)
        self._point()

    def _point(self) -> None:
        arrays = {**self._numbers, **{name: self._of_read[name] for name in READ if name in self._of_read}}
        for name in (field[0] for field in _Drafts._fields_):
            if name in arrays:
                setattr(self._drafts, name, arrays[name].ctypes.data)
            elif name in self._scratch:
                setattr(self._drafts, name, self._scratch[name].data_ptr())


def _at(tensor: Tensor) -> c_void_p:
    return c_void_p(tensor.data_ptr())
