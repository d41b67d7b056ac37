"""The decoder with Triton's kernels against the decoder with torch's, and the ways to run it against each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from outrider.cache.store import KeyValueStore
from outrider.engine.memory import LOGITS_KEPT, working_memory
from outrider.errors import KernelUnavailable
from outrider.load.config import LayerSpec, Rope
from outrider.model.decoder import Decoder
from outrider.model.device import DeviceDecoder, DevicePass, GraphedPass
from outrider.model.kernels.gpu.attention import plan_attention
from outrider.model.kernels.gpu.kernels import GpuKernels
from outrider.model.kernels.reference import ReferenceKernels
from outrider.model.rope import rope_tables
from outrider.settings import Settings
from outrider.types import Draft
from tests.model.batches import Part, Reader, furthest, random_ids
from tests.model.gpu.test_kernels import HALF, TREE, to_device
from tests.sweep import sweep
from tests.tiny import VOCAB, random_tensors, tiny_config


def decoders(device: str, **changes) -> tuple[Decoder, Decoder]:
    config = tiny_config(**changes)
    tables = rope_tables(config, 192)
    given = random_tensors(config)

    def read(name: str) -> Tensor:
        return given(name).to(HALF).float()  # both have the same weights: what differs is the arithmetic

    reference = Decoder(config, read, ReferenceKernels(config, tables))
    return Decoder(config, read, GpuKernels(config, tables, device, HALF)), reference


class HalfReader(Reader):
    """Keys and values in half precision on the device."""

    def __init__(self, model: Decoder, device: str, texts: int = 1, longest: int = 100) -> None:
        super().__init__(model.config, texts, longest)
        self.device, slots = device, self.table.numel() + 1
        shape = (slots, model.config.kv_heads, model.config.head_dim)
        self.store = KeyValueStore(model.config.kv_shapes, 1)
        self.store.keys = [torch.zeros(shape, dtype=HALF, device=device) for _ in self.store.keys]
        self.store.values = [torch.zeros(shape, dtype=HALF, device=device) for _ in self.store.values]

    def batch(self, *parts: Part):
        return to_device(super().batch(*parts), self.device)


OTHER = {"tied": False, "heads": 6, "windows": (0, 5)}


# What Granite, SmolLM3 and Phi-4-mini have beside Llama's: multipliers, a layer without positions, another scale.
SCALED = {
    "embedding_scale": 3.0, "residual_scale": 0.6, "logit_divisor": 1.7,
    "specs": (
        LayerSpec(4, 2, 16, 48, rope=None, attention_scale=0.4),
        LayerSpec(4, 2, 16, 48, rope=Rope(500.0, scaling={"partial_rotary_factor": 0.5})),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "changes", sweep([{}, OTHER, SCALED], quick=[OTHER, SCALED]), ids=lambda c: str(len(c))
)
def test_logits_are_the_references(device: str, changes: dict) -> None:
    ours, reference = decoders(device, **changes)
    ids = random_ids(VOCAB, 7)
    mine = HalfReader(ours, device).feed(ours, Part(0, ids, TREE))
    theirs = Reader(reference.config).feed(reference, Part(0, ids, TREE))
    assert furthest(mine.cpu(), theirs) < 2.5e-2


def test_a_layer_that_the_kernels_do_not_have_is_named(device: str) -> None:
    with pytest.raises(KernelUnavailable, match=r"llama model does not run on a GPU: .* soft-capped scores"):
        decoders(device, softcap=30.0, specs=(LayerSpec(4, 2, 16, 48, softcap=50.0),))


def test_layer_by_layer_equals_all_layers(device: str) -> None:
    model, _ = decoders(device)
    reader, again = HalfReader(model, device), HalfReader(model, device)
    batch = reader.batch(Part(0, random_ids(VOCAB, 2), Draft((5, 6), (-1, -1))))
    expected = model.forward(batch, reader.store)
    c = model.config
    x = model.embed(batch.ids)
    attention = plan_attention(batch, c.heads, c.kv_heads, c.head_dim)
    pending = model.kernels.run_layers(model.layers, x, batch, again.store, attention)
    assert torch.equal(model.kernels.finish(x, pending, batch.logit_rows, model.norm, model.head), expected)


def check_tree_bits(model: DeviceDecoder, device: str, node: int) -> None:
    """A node of a tree has the bits of its path, decoded token by token."""
    ids = random_ids(VOCAB, 3)
    together = HalfReader(model, device).feed(model, Part(0, ids, TREE))
    reader = HalfReader(model, device)
    reader.feed(model, Part(0, ids))
    for token in (TREE.tokens[i] for i in TREE.path(node)):
        alone = reader.feed(model, Part(0, [token]))
    assert torch.equal(alone[-1], together[len(ids) + node])


@pytest.mark.parametrize("node", sweep([1, 3, 6], quick=[6]))
def test_a_tree_has_the_bits_of_plain_decoding(device: str, node: int) -> None:
    model, _ = decoders(device, layers=1, windows=(0,))
    check_tree_bits(model, device, node)


@pytest.mark.gpu
def test_graphs_have_the_bits_of_eager_passes(device: str) -> None:
    """When captured and when replayed with other tokens."""
    model = DeviceDecoder(decoders(device)[0])
    reader = HalfReader(model.decoder, device, texts=3)
    reader.feed(model, *(Part(t, random_ids(VOCAB, 20 + t, seed=t)) for t in range(3)))
    graphed = GraphedPass(DevicePass(model, reader.store))
    chain = Draft.chain([1] * 63)
    for token in (5, 6):
        for parts in ([Part(0, [token])], [Part(t, [token]) for t in range(3)], [Part(1, [token], chain)]):
            batch = reader.batch(*parts)
            together, branching = batch.rows // len(parts), bool(batch.ancestors.any())
            expected = model.forward(batch, reader.store)
            assert torch.equal(graphed(batch, together, 100, branching), expected)
    assert len(graphed._made) == 3


def test_what_steps_need_is_measured_by_a_pass(device: str) -> None:
    """The pass that sizes the KV cache runs where the model does, and keeps nothing of it."""
    model = DeviceDecoder(decoders(device)[0])
    made: list[int] = []

    class Meter:
        def start(self) -> None: ...

        def most(self) -> int:
            made.append(1)
            return 10

    settings = Settings(max_sequences=4, step_rows=20, context=16)
    found = working_memory(model, settings, Meter())
    assert (found, len(made)) == (20 + LOGITS_KEPT * 4 * VOCAB * 4, 2)
