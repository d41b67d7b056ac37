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
        *((n, c_void_p) for n in ("top_p", "log_min_p", "slots", "hidden", "inputs", "normed", "logits")),
        *((n, c_void_p) for n in ("wide", "positions", "ancestors", "at", "ids", "best", "tokens", "shares")),
    ]


class Drafted(NamedTuple):
    """What is drafted for one sequence, and from what."""

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
    "table_rows": np.int32, "prefix": np.int32, "known": np.int64, "depths": np.int32, "children": np.int32,
    "divisors": np.float32, "sampled": np.uint8, "seeds": np.int64, "top_k": np.int64, "top_p": np.float32,
    "log_min_p": np.float32, "positions": np.int32, "ancestors": np.int64, "at": np.int64, "ids": np.int64,
}  # fmt: skip


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
        self._drafts, self._rows, self._capacity = _Drafts(), RowsStruct(), 0
        self._numbers: dict[str, NDArray[Any]] = {}
        self._scratch: dict[str, Tensor] = {}
        self._slots = np.empty(0, np.int32)
        self._tokens, self._shares = np.empty(0, np.int64), np.empty(0, np.float32)

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
        hidden: Tensor,
        asked: Seq[Drafted],
        slots: Seq[NDArray[np.int32]],
        table: Tensor,
        store: KeyValueStore,
        words: int,
    ) -> list[tuple[list[list[int]], list[list[float]]]]:
        """For each sequence, by level, the tokens of a chain by the law of sampling and those that come next, and their
        shares, 0 where the drafter rules a token out. `hidden` [S, hidden] are the head's states after the known tokens;
        it is overwritten. `slots` are for a chain's tokens but the last one; the entries of `table` lie at their
        positions. Only the first `words` of the head's vocabulary are drafted.
        """
        count, order = len(asked), range(len(asked))
        if count > 1:
            order = sorted(order, key=lambda i: -asked[i].depths)
            asked, slots, hidden = [asked[i] for i in order], [slots[i] for i in order], hidden[order]
        self._reserve(count)
        for name, values in zip(Drafted._fields, zip(*asked, strict=True), strict=True):
            self._numbers[name][:count] = values
        given, rows, depth = self._drafts, self._rows, asked[0].depths
        for i, own in enumerate(slots):
            self._slots[i : len(own) * count : count] = own
        given.count, given.depth, given.words = count, depth, words
        given.filtered = any([one.top_k or one.top_p < 1 or one.log_min_p > -np.inf for one in asked])
        given.hidden = hidden.data_ptr()
        rows.rows, rows.table, rows.table_stride = count, table.data_ptr(), table.stride(0)
        self.lib.outrider_eagle_draft(*self._given(rows, store), byref(given))
        each = depth * count * BRANCH
        tokens, shares = (x[:each].reshape(depth, count, BRANCH) for x in (self._tokens, self._shares))
        found: list[Any] = [None] * count
        for at, (i, one) in enumerate(zip(order, asked, strict=True)):
            mine = slice(one.depths), at, slice(one.children)
            found[i] = tokens[mine].tolist(), shares[mine].tolist()
        return found

    def _given(self, rows: RowsStruct, store: KeyValueStore) -> tuple[Any, ...]:
        if self._store is None or self._store[0] is not store:
            array = c_void_p * len(store.keys)
            keys, values = (array(*(one.data_ptr() for one in some)) for some in (store.keys, store.values))
            self._store = store, keys, values
            self.struct.keys, self.struct.values = ctypes.addressof(keys), ctypes.addressof(values)
        return byref(self.struct), byref(self.kernels.shape), byref(rows), byref(self.kernels.work_for(rows.rows))

    def _reserve(self, count: int) -> None:
        """Scratch for the most chains so far; it grows and never shrinks."""
        if count <= self._capacity:
            return
        hidden, given, wide = self.kernels.config.hidden, self._drafts, self.struct.to_target is not None
        self._numbers = {name: np.zeros(count, dtype) for name, dtype in DTYPES.items()}
        self._slots = np.empty(count * MAX_NODES, np.int32)
        self._tokens = np.zeros(count * MAX_NODES * BRANCH, np.int64)
        self._shares = np.zeros(count * MAX_NODES * BRANCH, np.float32)
        widths = {"inputs": 2 * hidden, "normed": hidden, "logits": self.outputs, "best": 2 * CHUNKS}
        self._scratch = {name: torch.empty(count * width) for name, width in widths.items()}
        if wide:  # words that the head does not know keep this
            self._scratch["wide"] = torch.full((count * self.vocab,), float("-inf"))
        arrays = {**self._numbers, "slots": self._slots, "tokens": self._tokens, "shares": self._shares}
        for name in set(arrays) - {"table_rows", "prefix"}:
            setattr(given, name, arrays[name].ctypes.data)
        for name, scratch in self._scratch.items():
            setattr(given, name, scratch.data_ptr())
        for name in ("table_rows", "prefix"):
            setattr(self._rows, name, arrays[name].ctypes.data)
        self._capacity = count


def _at(tensor: Tensor) -> c_void_p:
    return c_void_p(tensor.data_ptr())
