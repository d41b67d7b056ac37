"""Ranks that share a model give the bits of one process. Here ranks are threads that gather over gloo."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from outrider.cache.store import KeyValueStore
from outrider.engine.build import Reading
from outrider.load.checkpoint import open_checkpoint
from outrider.load.config import LayerSpec, ModelConfig
from outrider.load.families import config_from_json
from outrider.model.decoder import Decoder, make_kernels, make_store
from outrider.model.parallel import ALONE, Group, Ranks, follow
from outrider.model.weights import KERNEL_FORMATS, kept_as
from outrider.types import Draft
from tests.model.batches import Part, Reader, random_ids
from tests.model.families import CASES, NEEDS_COMPILER, POSITIONS, tensors_of, theirs
from tests.model.replayed import Line, Messages, captured
from tests.model.test_blocks import FORMS, random_blocks
from tests.tiny import random_tensors, tiny_config

pytestmark = NEEDS_COMPILER
SHARED = [(case, 2) for case in CASES if case != "llama-one-kv-head"] + [
    ("llama-ungrouped", 3),
    ("llama-ungrouped", 4),
]
ROWS = (1, 2, 3, 5, 8, 17, 33, 64)
Weights = Callable[[str], Any]


def decoder(config: ModelConfig, read: Weights, folder: Path, group: Group) -> Decoder:
    kernels = make_kernels(config, POSITIONS, 1, folder, "c", group)
    return Decoder(config, lambda name: group.part(name, read(name), config), kernels)


def on_ranks(size: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """What each rank's thread returns."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        group = Ranks(rank, size)
        group.connect(store, torch.device("cpu"))
        return work(group)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def passes(model: Decoder) -> list[Tensor]:
    """Logits of prompts, of steps of 1 to 64 rows and of a draft tree."""
    config = model.config
    reader = Reader(config, texts=max(ROWS), longest=32)
    reader.store = make_store(model, reader.store.slots)
    found = [reader.feed(model, *(Part(i, random_ids(config.vocab, 2 + i % 9, i)) for i in range(max(ROWS))))]
    found += [reader.feed(model, *(Part(i, [i % config.vocab]) for i in range(count))) for count in ROWS]
    tree = Draft(random_ids(config.vocab, 5, 9), [-1, 0, 0, 1, 3])
    found.append(model.forward(reader.batch(Part(0, [3], tree), Part(1, [4])), reader.store))
    return found


def check(config: ModelConfig, read: Weights, folder: Path, size: int) -> None:
    expected = passes(decoder(config, read, folder, ALONE))
    for found in on_ranks(size, lambda group: passes(decoder(config, read, folder, group))):
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(one, other), i


@cache
def family(case: str) -> tuple[ModelConfig, dict[str, Tensor]]:
    return config_from_json(json.loads(json.dumps(theirs(case).config.to_dict()))), tensors_of(case)


@pytest.mark.parametrize(("case", "size"), SHARED)
def test_every_family_has_the_bits_of_one_process(case: str, size: int, kernel_folder: Path) -> None:
    config, tensors = family(case)
    check(config, lambda name: tensors[name].clone(), kernel_folder, size)


@pytest.mark.parametrize("case", ["gemma3", "phi3", "glm4"])
def test_ranks_read_their_part_of_fused_and_reordered_tensors(
    case: str, kernel_folder: Path, tmp_path: Path
) -> None:
    theirs(case).save_pretrained(tmp_path)

    def read(group: Group) -> list[Tensor]:
        checkpoint = open_checkpoint(tmp_path)
        assert checkpoint.config is not None
        kernels = make_kernels(checkpoint.config, POSITIONS, 1, kernel_folder, "c", group)
        return passes(Decoder(checkpoint.config, Reading(checkpoint, "stored", False, None, group), kernels))

    expected = read(ALONE)
    for found in on_ranks(2, read):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_layers_that_differ_in_everything_have_the_bits_of_one_process(kernel_folder: Path) -> None:
    """Layers are cut each by its own heads and MLP, here into unequal parts."""
    specs = (
        LayerSpec(6, 3, 16, 49, qk_norm="head"),
        LayerSpec(4, 2, 32, 80, rope=None, window=3, norms="both", activation="gelu_tanh", softcap=2.0),
        LayerSpec(5, 5, 16, 31, norms="after", qk_norm="whole", attention_scale=0.1),
    )
    config = tiny_config(
        specs=specs, hidden=45, residual_scale=0.7, embedding_scale=2.0, logit_divisor=1.5, softcap=3.0
    )
    check(config, random_tensors(config), kernel_folder, 2)
    for kv_heads in on_ranks(2, lambda group: [heads for heads, _ in group.share(config).kv_shapes]):
        assert kv_heads in ([1, 1, 2], [2, 1, 3])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4", *KERNEL_FORMATS])
def test_every_format_has_the_bits_of_one_process(kind: str, size: int, kernel_folder: Path) -> None:
    config = tiny_config(
        hidden=256, heads=8, kv_heads=4, head_dim=64, intermediate=512, tied=False, vocab=130, layers=1
    )
    plain = random_tensors(config)

    def read(name: str) -> Any:
        weight = plain(name)
        if weight.dim() < 2 or kind not in FORMS:
            return kept_as(weight, kind)
        return random_blocks(FORMS[kind], *weight.shape, seed=len(name))

    check(config, read, kernel_folder, size)


def test_a_rank_holds_its_share_of_weights_and_cache(kernel_folder: Path) -> None:
    config = tiny_config(hidden=64, kv_heads=4, layers=2, vocab=128, intermediate=64)
    read = random_tensors(config)
    alone = decoder(config, read, kernel_folder, ALONE)

    def sizes(group: Ranks) -> tuple[int, int]:
        model = decoder(config, read, kernel_folder, group)
        return model.weight_bytes(), make_store(model, 10).keys[0].nbytes

    norms = 5 * 64 * 4
    whole = alone.weight_bytes() - norms, make_store(alone, 10).keys[0].nbytes
    for weights, keys in on_ranks(4, sizes):
        assert (4 * (weights - norms), 4 * keys) == whole


def every_call(model: Decoder, reader: Reader) -> list[Tensor]:
    """What an engine and its drafters ask of a model."""
    logits = reader.feed(model, *(Part(i, [i, 5]) for i in range(3, 30)))
    hidden = logits[:, :64].contiguous()
    early = model.exit_logits(reader.batch(Part(3, [7])), reader.store, 1)
    ids = torch.tensor([0, 96, 48, 49, 50])
    return [
        logits,
        early,
        model.embed(ids),
        model.head_rows(ids),
        model.logits(hidden, ids[3:4]),
        model.project(hidden),
    ]


def test_others_repeat_what_rank_0_does(kernel_folder: Path) -> None:
    """Rank 0 announces its calls; a rank that repeats them ends with the same keys and values for its own heads."""
    config, tensors = family("qwen3")
    line = Line()
    opened: list[KeyValueStore] = []

    def run(group: Ranks) -> list[Tensor] | None:
        model = decoder(config, lambda name: tensors[name].clone(), kernel_folder, group)
        if group.rank:

            def open_store(slots: int) -> KeyValueStore:
                opened.append(make_store(model, slots))
                return opened[-1]

            return follow(model, Messages(iter(line)), open_store)
        group.channel = line
        reader = Reader(config, texts=40, longest=32)
        reader.store = make_store(model, reader.store.slots)
        found = every_call(model, reader)
        line.messages.put(None)
        return found

    found, _ = on_ranks(2, run)
    reader = Reader(config, texts=40, longest=32)
    alone = decoder(config, lambda name: tensors[name].clone(), kernel_folder, ALONE)
    for one, other in zip(found, every_call(alone, reader), strict=True):
        assert torch.equal(one, other)
    slots, mine = reader.table[3:30, :2].flatten().long(), reader.store
    for layer in range(config.layers):
        assert torch.equal(opened[0].keys[layer][slots], mine.keys[layer][slots][:, 1:])
        assert torch.equal(opened[0].values[layer][slots], mine.values[layer][slots][:, 1:])


def test_nothing_is_gathered_after_a_call_that_failed(kernel_folder: Path) -> None:
    """The ranks would be in different places, and mix up their activations."""
    config, tensors = family("llama")
    line = Line()
    group = Ranks(0, 2, line)
    model = decoder(config, lambda name: tensors[name].clone(), kernel_folder, group)
    with pytest.raises(RuntimeError, match="the group is over"):
        model.embed(torch.tensor([1]))  # it is not connected
    with pytest.raises(RuntimeError, match="the group is over"):
        model.project(torch.zeros(1, 64))
    assert line.messages.qsize() == 1  # the second was not announced


def test_a_captured_graph_runs_on_all_ranks_with_what_rank_0_has_by_then(kernel_folder: Path) -> None:
    """Rank 0 announces the graph alone; ids and slots of each replay reach the others by broadcast."""
    config, tensors = family("qwen3")
    line = Line()
    messages = Messages(iter(line))
    weights = config, lambda name: tensors[name].clone(), kernel_folder

    def replayed(group: Group) -> list[Tensor]:
        """Passes over the same buffers, whose contents change."""
        model = decoder(*weights, group)
        reader = Reader(config, texts=4, longest=32)
        reader.store = make_store(model, reader.store.slots)
        mine = reader.batch(*(Part(i, [i + 1]) for i in range(4)))
        logits: list[Tensor] = []

        def work() -> tuple[()]:
            logits[:] = [model.forward(mine, reader.store), model.embed(mine.ids)]
            return ()

        work()
        graph: Any = None
        if isinstance(group, Ranks):
            graph, _ = group.recorded(lambda: captured(group, work))
            work_again = graph.replay
        else:
            work_again = work
        found = []
        for turn in range(3):
            mine.ids.copy_(torch.arange(4) * 7 + turn)
            mine.positions.fill_(turn), mine.prefix.fill_(turn + 1)
            mine.slots.copy_(reader.table[:4, turn])
            work_again()
            found += logits
        return found

    def run(group: Ranks) -> list[Tensor] | None:
        if group.rank:
            model = decoder(*weights, group)
            return follow(model, messages, lambda slots: make_store(model, slots), messages.capture)
        group.channel = line
        try:
            return replayed(group)
        finally:
            line.messages.put(None)

    found, _ = on_ranks(2, run)
    for one, other in zip(found, replayed(ALONE), strict=True):
        assert torch.equal(one, other)
    calls = ["exit_logits", "embed"]
    replays = ["replay", *calls, "recorded"] * 3
    assert messages.calls == ["open_store", *calls, "record", *calls, "recorded", *replays]
