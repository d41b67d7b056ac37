"""The one decoder, for all families of load/families.py: they differ by the specifications of their layers.

It knows the order of operations. Kernels compute them; whether these are the C kernels or their torch twins is
decided when the model is built.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from outrider.cache.formats import token_bytes
from outrider.cache.store import KeyValueStore
from outrider.errors import KernelUnavailable
from outrider.load.config import ModelConfig
from outrider.model.kernels.native import NativeKernels
from outrider.model.kernels.reference import ReferenceKernels
from outrider.model.parallel import ALONE, Group, shared
from outrider.model.rope import RopeTables, rope_tables
from outrider.model.weights import Read, format_of, named_tensors, read_ahead
from outrider.types import Batch


class Model(Protocol):
    """The interface between engine and model: this decoder, or another model behind hf.py."""

    config: ModelConfig
    device: torch.device  # of keys, values and logits
    dtype: torch.dtype  # of hidden states
    kept: torch.dtype  # of keys and values, see cache/formats.py
    group: Group  # the ranks that share it

    @property
    def experts_read(self) -> float:
        """Distinct experts that the last pass read, averaged over the layers that have any; 0: none has."""
        ...

    def forward(self, batch: Batch, store: KeyValueStore) -> Tensor:
        """Writes the rows' keys and values to their slots; returns logits [len(batch.logit_rows), vocab]."""
        ...

    def draw(self, logits: Tensor, sampled: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """The law's argmax over the vocabulary; see verify/noise.py."""
        ...

    def filter_logits(self, logits: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor) -> None:
        """Applies the law's filters; see verify/filters.py."""
        ...

    def weight_bytes(self) -> int:
        """Bytes of its weights."""
        ...


@runtime_checkable
class Layered(Model, Protocol):
    """A model with access to hidden states and early exits: this decoder, on the CPU or on a device."""

    def embed(self, ids: Tensor) -> Tensor: ...

    def logits(self, x: Tensor, rows: Tensor) -> Tensor:
        """Logits of chosen rows of hidden states."""
        ...

    def project(self, x: Tensor) -> Tensor:
        """Logits of normed hidden states."""
        ...

    def head_rows(self, ids: Tensor) -> Tensor:
        """Rows of the head, float32."""
        ...

    def exit_logits(self, batch: Batch, store: KeyValueStore, layers: int) -> Tensor:
        """Logits after the first `layers` layers, on the host."""
        ...

    def make_pass(self, store: KeyValueStore, layers: int | None = None) -> Callable[..., Tensor]:
        """The pass over rows on the model's device, as device/ops.py's `Pass`; all layers by default."""
        ...


def make_store(model: Model, slots: int) -> KeyValueStore:
    """The store for the keys and values of this model, or of a rank's heads."""
    shapes = model.group.share(model.config).kv_shapes
    store = KeyValueStore(shapes, slots, model.device, model.dtype, model.kept)
    model.group.opened(store)
    return store


def kv_bytes(model: Model) -> int:
    """Bytes of a token's keys and values, of all ranks together."""
    return token_bytes(model.config.kv_shapes, model.kept)


class Decoder:
    device, dtype = torch.device("cpu"), torch.float32
    kept = torch.float32

    def __init__(self, config: ModelConfig, read: Read, kernels: Any) -> None:
        self.config = config
        self.kernels, self.group = kernels, kernels.group
        self.draw, self.filter_logits = kernels.draw, kernels.filter_logits
        self.formats: Counter[str] = Counter()  # of matrices: numbers in each
        self.mixtures = sum(spec.experts is not None for spec in config.specs)  # layers

        def noted(name: str) -> Any:
            weight = read(name)
            if len(weight.shape) == 2:
                self.formats[format_of(weight)] += math.prod(weight.shape)
            return weight

        self.layers = [kernels.pack_layer(tensors) for tensors in read_ahead(noted, config)]
        self._first: dict[int, tuple[KeyValueStore, list[Any], list[Tensor], list[Tensor]]] = {}  # by layers
        self.norm = read("model.norm.weight").float().contiguous()
        table = noted("model.embed_tokens.weight")
        self.embedding, self.head = kernels.pack_ends(
            table, table if config.tied else noted("lm_head.weight")
        )

    def forward(self, batch: Batch, store: KeyValueStore) -> Tensor:
        self.kernels.touched = 0
        return self.exit_logits(batch, store, self.config.layers)

    @property
    def experts_read(self) -> float:
        return self.kernels.touched / max(self.mixtures, 1)

    @shared
    def exit_logits(self, batch: Batch, store: KeyValueStore, layers: int) -> Tensor:
        """Logits after the first `layers` layers."""
        return self._logits(self._run(batch, store, layers), batch.logit_rows)

    def make_pass(self, store: KeyValueStore, layers: int | None = None) -> Callable[..., Tensor]:
        def run(batch: Batch, *_: Any) -> Tensor:
            return self.exit_logits(batch, store, layers or self.config.layers)

        return run

    def _run(self, batch: Batch, store: KeyValueStore, layers: int) -> Tensor:
        x = self.own_rows(batch.ids, self.embed_own)
        self.kernels.layers(*self._first_layers(store, layers, x, batch), store)
        return x

    def _first_layers(self, store: KeyValueStore, layers: int, x: Tensor, batch: Batch) -> tuple[Any, ...]:
        """The first `layers` layers, the pass, their keys and values. Lists are made anew only for another store:
        kernels know lists that they were given before (log/104).
        """
        known = self._first.get(layers)
        if known is None or known[0] is not store:
            lists = self.layers[:layers], store.keys[:layers], store.values[:layers]
            known = self._first[layers] = store, *lists
        _, own, keys, values = known
        return own, x, batch, keys, values

    @shared
    def embed(self, ids: Tensor) -> Tensor:
        return self.own_rows(ids, self.embed_own)

    def embed_own(self, ids: Tensor) -> Tensor:
        """Of tokens whose rows this rank has, counted from its first."""
        return self.kernels.embed(self.embedding, ids, self.config.embedding_scale)

    @shared
    def logits(self, x: Tensor, rows: Tensor) -> Tensor:
        return self._logits(x, rows)

    @shared
    def project(self, x: Tensor) -> Tensor:
        return self.group.gather(self.kernels.linear(self.head, x), self.config.vocab)

    @shared
    def head_rows(self, ids: Tensor) -> Tensor:
        return self.own_rows(ids, lambda own: self.kernels.embed(self.head, own))

    def _logits(self, x: Tensor, rows: Tensor) -> Tensor:
        return self.group.gather(self.kernels.head(x, rows, self.norm, self.head), self.config.vocab)

    def own_rows(self, ids: Tensor, read: Callable[[Tensor], Tensor]) -> Tensor:
        """Rows of embedding or head, of which each rank has those of some tokens."""
        if self.group.size == 1:
            return read(ids)
        parts = [self.group.cut(self.config.vocab, rank=rank) for rank in range(self.group.size)]
        own, owners = parts[self.group.rank], torch.zeros_like(ids)
        for part in parts[1:]:  # without a tensor from the host, which a graph cannot capture
            owners += ids >= part.start
        found = read(ids.clamp(own.start, own.stop - 1) - own.start)
        return self.group.pick(found, owners)

    def weight_bytes(self) -> int:
        packed = {tensor.data_ptr(): tensor.nbytes for _, tensor in named_tensors("", self)}
        return sum(packed.values())


def make_kernels(
    config: ModelConfig, context: int, threads: int, folder: Path, choice: str, group: Group = ALONE
) -> Any:
    """Kernels for the decoder, with rotary tables for `context` positions."""
    return choose_kernels(config, rope_tables(config, context), threads, folder, choice, group)


def kernels_like(kernels: Any, config: ModelConfig, rope: RopeTables) -> Any:
    """The same kernels for layers of another shape, which one rank has alone."""
    if isinstance(kernels, ReferenceKernels):
        return ReferenceKernels(config, rope)
    return choose_kernels(config, rope, kernels.threads * kernels.group.size, kernels.folder, "auto")


def choose_kernels(
    config: ModelConfig,
    rope: RopeTables,
    threads: int,
    folder: Path,
    choice: str,
    group: Group = ALONE,
) -> Any:
    """The C kernels. With `auto`, their torch twins and a warning if the C kernels cannot be built.

    Ranks need the C kernels: torch adds in another order where a matrix has fewer outputs.
    """
    if choice == "torch":
        return ReferenceKernels(config, rope)
    try:
        return NativeKernels(config, rope, threads, folder, group)
    except KernelUnavailable as reason:
        if choice == "c" or group.size > 1:
            raise
        warnings.warn(f"decoding with plain torch, several times slower: {reason}", stacklevel=2)
        return ReferenceKernels(config, rope)
