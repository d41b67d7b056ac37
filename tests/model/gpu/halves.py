"""Ranks of a tensor parallel model in turn on one device: bits against the whole model, and a projection of step times.

    PYTHONPATH=src:. python tests/model/gpu/halves.py [--seconds 55]

One process runs every rank on a thread of its own. A rank gives the turn to the next where it gathers, so kernels run
one after the other as on one device. Layers have the shapes of 8B and 70B models in bfloat16. For the projection one
rank is timed alone, from a graph, with all layers of 8B and a part of those of 70B; gathers are counted as bytes at
LINK and LATENCY each, not measured.
"""

# ruff: noqa: E402 - packages that may be absent are replaced first

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

for name in ("safetensors", "tokenizers"):  # no file is read here
    try:
        importlib.import_module(name)
    except ImportError:
        absent = sys.modules[name] = ModuleType(name)
        absent.__getattr__ = lambda _: type("Absent", (Exception,), {})  # type: ignore[method-assign]
        sys.modules[f"{name}.torch"] = absent

from outrider.cache.store import KeyValueStore
from outrider.load.config import LayerSpec, ModelConfig
from outrider.model.decoder import Decoder, make_store
from outrider.model.device import DeviceDecoder
from outrider.model.kernels.gpu.ahead import AHEAD
from outrider.model.kernels.gpu.kernels import GpuKernels
from outrider.model.kernels.gpu.recording import record
from outrider.model.parallel import ALONE, Group, Ranks
from outrider.model.rope import rope_tables
from outrider.types import Batch

LINK, LATENCY = 450e9, 8e-6  # bytes per second in one direction, and seconds of a gather
ROWS = (1, 2, 4, 8, 16, 17, 32, 64, 65, 128, 256, 512, 1024, 2048)
KNOWN, MOST_SEQUENCES = 128, 256
LAYERS = {"8B": 32, "70B": 80}
HELD = {"8B": 32, "70B": 16}  # layers that are timed: as many as fit beside a part of themselves
SHAPES = {
    "8B": {"hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "intermediate": 14336},
    "70B": {"hidden": 8192, "heads": 64, "kv_heads": 8, "head_dim": 128, "intermediate": 28672},
}


class Turns:
    """Lets one rank run at a time, from one gather to the next."""

    def __init__(self, size: int) -> None:
        self.size, self.turn, self.ended = size, 0, set[int]()
        self.changed = threading.Condition()
        self.parts: dict[int, dict[int, Tensor]] = defaultdict(dict)  # by gather and rank

    def await_turn(self, rank: int) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.turn == rank, 300):
                raise TimeoutError(f"rank {rank} of {self.size} never had its turn")

    def give(self, rank: int, ends: bool = False) -> None:
        with self.changed:
            if ends:
                self.ended.add(rank)
            following = [(rank + i) % self.size for i in range(1, self.size + 1)]
            self.turn = next((one for one in following if one not in self.ended), -1)
            self.changed.notify_all()


class InTurn(Ranks):
    """A rank that gathers through the memory of this process."""

    def __init__(self, rank: int, turns: Turns) -> None:
        super().__init__(rank, turns.size)
        self.turns, self.gathers = turns, 0

    def _all(self, part: Tensor) -> Tensor:
        self.gathers += 1
        parts = self.turns.parts[self.gathers]
        parts[self.rank] = part
        self.turns.give(self.rank)
        self.turns.await_turn(self.rank)
        return torch.stack([parts[rank] for rank in range(self.size)])


class Timed(Ranks):
    """A rank without others: what it gathers is its own part again and again."""

    def _all(self, part: Tensor) -> Tensor:
        return part.contiguous().expand(self.size, *part.shape)


def in_turn(size: int, work: Callable[[InTurn], Any]) -> list[Any]:
    """What each rank returns."""
    turns, found = Turns(size), dict[int, Any]()

    def run(rank: int) -> None:
        turns.await_turn(rank)
        try:
            found[rank] = work(InTurn(rank, turns))
        except BaseException as error:
            found[rank] = error
        finally:
            turns.give(rank, ends=True)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in found.values():
        if isinstance(one, BaseException):
            raise one
    return [found[rank] for rank in range(size)]


def config_of(shape: str, layers: int = 2) -> ModelConfig:
    sizes = dict(SHAPES[shape])
    hidden = sizes.pop("hidden")
    return ModelConfig(
        "llama", 128256, hidden, layers * (LayerSpec(**sizes),), 8192, norm_eps=1e-5, tied=True
    )


def weights(config: ModelConfig, device: str) -> Callable[[str], Tensor]:
    """Random ones, the same for every rank."""
    c, q, kv = config, config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes = {
        "q_proj": (q, c.hidden), "k_proj": (kv, c.hidden), "v_proj": (kv, c.hidden), "o_proj": (c.hidden, q),
        "gate_proj": (c.intermediate, c.hidden), "up_proj": (c.intermediate, c.hidden),
        "down_proj": (c.hidden, c.intermediate), "embed_tokens": (c.vocab, c.hidden),
    }  # fmt: skip

    def read(name: str) -> Tensor:
        shape = shapes.get(name.split(".")[-2], (c.hidden,))
        generator = torch.Generator(device).manual_seed(sum(map(ord, name)))
        made = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        return made / shape[1] ** 0.5 if len(shape) == 2 else 1 + 0.1 * made.float()

    return read


def model_of(
    config: ModelConfig, read: Callable[[str], Tensor], group: Group, device: str, dtype: torch.dtype
) -> DeviceDecoder:
    kernels = GpuKernels(config, rope_tables(config, 1024), device, dtype, group=group)
    return DeviceDecoder(Decoder(config, lambda name: group.part(name, read(name), config), kernels))


def batch_of(rows: int, device: str) -> tuple[Batch, int]:
    """Sequences of KNOWN tokens, with one more row each or, if there are many rows, several. And how many."""
    sequences = min(rows, MOST_SEQUENCES)
    each = rows // sequences
    rows = sequences * each
    width = KNOWN + each
    table = torch.arange(sequences * width, dtype=torch.int32, device=device).view(sequences, width)
    owners = torch.arange(sequences, dtype=torch.int32, device=device).repeat_interleave(each)
    positions = KNOWN + torch.arange(each, dtype=torch.int32, device=device).repeat(sequences)
    batch = Batch(
        ids=torch.arange(rows, device=device) * 37 % 251,
        positions=positions,
        slots=table[owners.long(), positions.long()].contiguous(),
        table_rows=owners,
        prefix=positions + 1,
        ancestors=torch.zeros(rows, dtype=torch.int64, device=device),
        table=table,
        logit_rows=torch.arange(sequences, device=device) * each + each - 1,
    )
    return batch, each


def filled_store(model: DeviceDecoder, slots: int) -> KeyValueStore:
    """Random keys and values; a rank has those of its heads."""
    store, kv_heads = make_store(model, slots), model.config.kv_heads
    own = model.group.cut(kv_heads)
    generator = torch.Generator(model.device).manual_seed(1)
    shape = (slots + 1, kv_heads, model.config.head_dim)
    for one in (*store.keys, *store.values):
        whole = torch.randn(shape, generator=generator, device=model.device)
        one.copy_(whole[:, own])
    return store


def logits_of(model: DeviceDecoder, rows: int) -> Tensor:
    batch, _ = batch_of(rows, str(model.device))
    return model.forward(batch, filled_store(model, batch.table.numel()))


def same_bits(
    whole: DeviceDecoder, read: Callable[[str], Tensor], size: int, rows: tuple[int, ...]
) -> list[int]:
    """Of these numbers of rows, those whose logits differ from the whole model's on any rank."""
    expected = {count: logits_of(whole, count) for count in rows}

    def differing(group: InTurn) -> list[int]:
        part = model_of(whole.config, read, group, str(whole.device), whole.dtype)
        return [count for count in rows if not torch.equal(logits_of(part, count), expected[count])]

    return sorted({count for some in in_turn(size, differing) for count in some})


# ------------------------------------------------------------------------------------------- on a GPU


def seconds_of(model: DeviceDecoder, counts: tuple[int, ...], layers: int) -> dict[int, float]:
    """Seconds of a step with this many layers, by rows: of all that are held, and of one, whose embedding and head
    count once. Graphs take turns, so that clocks play no role.
    """
    held, graphs = model.config.layers, {}
    for count in counts:
        batch, each = batch_of(count, str(model.device))
        store = filled_store(model, batch.table.numel())
        for some in (held, 1):
            run = model.make_pass(store, some)
            graphs[count, some] = record(partial(run, batch, each, KNOWN + each))[0]
    spent: dict[tuple[int, int], list[float]] = defaultdict(list)
    for _ in range(5):
        for key, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            begin.record()
            for _ in range(3):
                graph.replay()
            end.record()
            end.synchronize()
            spent[key].append(begin.elapsed_time(end) / 3e3)
    every = {key: statistics.median(some) for key, some in spent.items()}
    return {
        count: every[count, 1] + (layers - 1) * (every[count, held] - every[count, 1]) / (held - 1)
        for count in counts
    }


def gathers_of(config: ModelConfig, rows: int, size: int, layers: int) -> float:
    """Seconds of all gathers of a step: four a layer, the embedding's and the logits'."""
    c, received = config, (size - 1) / size
    wide = 2 * (c.heads * c.head_dim + c.intermediate) + 4 * 2 * c.hidden
    ends = 4 * (size * c.hidden * rows + c.vocab * min(rows, MOST_SEQUENCES))
    return (layers * rows * wide + ends) * received / LINK + (4 * layers + 2) * LATENCY


TIMED = (1, 16, 64, 256, 2048)


def check(shape: str, sizes: tuple[int, ...]) -> None:
    config = config_of(shape)
    read = weights(config, "cuda")
    whole = model_of(config, read, ALONE, "cuda", torch.bfloat16)
    for size in sizes:
        rows = ROWS if size == 2 else TIMED
        odd = same_bits(whole, read, size, rows)
        found = f"DIFFER at {odd}" if odd else "bits equal"
        print(f"{shape} TP {size}: rows {', '.join(map(str, rows))}: {found}", flush=True)


def timed(shape: str, group: Group) -> dict[int, float]:
    config = config_of(shape, HELD[shape])
    model = model_of(config, weights(config, "cuda"), group, "cuda", torch.bfloat16)
    for count in TIMED:
        with AHEAD.collecting():
            logits_of(model, count)
    return seconds_of(model, TIMED, LAYERS[shape])


def project(shape: str, size: int, alone: dict[int, float]) -> None:
    part = timed(shape, Timed(0, size))
    for count, own in part.items():
        gathers = gathers_of(config_of(shape), count, size, LAYERS[shape])
        print(
            f"{shape:>4} TP {size} {count:5} rows: {1e3 * alone[count]:8.2f} ms alone, {1e3 * own:8.2f} a rank + "
            f"{1e3 * gathers:6.2f} gathers = {1e3 * (own + gathers):8.2f}, {alone[count] / (own + gathers):.2f}x",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=55.0, help="no part begins after this time")
    given = parser.parse_args()
    begun = time.monotonic()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    for shape in SHAPES:
        alone = timed(shape, ALONE)
        for size in (2, 4, 8):
            torch.cuda.empty_cache()
            if time.monotonic() - begun > given.seconds:
                print(f"{shape} TP {size}: left out, {given.seconds:.0f} s are over")
                continue
            project(shape, size, alone)
    for shape in SHAPES:
        torch.cuda.empty_cache()
        if time.monotonic() - begun < given.seconds:
            check(shape, (2, 4, 8))
    print(f"{time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
