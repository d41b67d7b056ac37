"""Tensor parallel: what one rank holds of a model, how ranks exchange activations, and how they run the same calls.

Every matrix is cut by its outputs, and the ranks gather what they computed. No sum crosses ranks, so the bits are those
of one process for any number of ranks. Rank 0 runs the engine. It announces each call of its model to the others, which
run the same call on their part. What rank 0 captures in a CUDA graph the others capture at the same time: the calls
with their gathers, and a broadcast of what each call is given. From then on rank 0 announces the graph alone.
Processes and their life are engine/ranks.py's business.
"""

from __future__ import annotations

import functools
import json
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, fields, replace
from datetime import timedelta
from itertools import accumulate, islice
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from outrider.cache.store import KeyValueStore
from outrider.load.config import LayerSpec, ModelConfig
from outrider.load.quants import Blocks
from outrider.load.weight_map import ROUTER, SHARED_GATE
from outrider.model.staged import StagedShape, StagedView
from outrider.types import MAX_NODES, Batch

ALIGNMENT = 16  # bytes, of tensors that are broadcast together: kernels are compiled for it
GATHER_SECONDS = 30.0  # that a rank waits for the others; they begin a pass at the same time

Call = TypeVar("Call", bound=Callable[..., Any])
Captured = tuple[Any, Any]  # a graph, and what the captured operations returned


class Group:
    """One process that holds the whole model; `Ranks` are several."""

    rank, size = 0, 1

    def cut(self, whole: int, units: int = 0, rank: int | None = None) -> slice:
        """The outputs of a rank, by default this one's. Outputs may be cut between `units` of equal size only."""
        units, rank = units or whole or 1, self.rank if rank is None else rank
        first, last = (units * one // self.size * (whole // units) for one in (rank, rank + 1))
        return slice(first, last)

    def share(self, config: ModelConfig) -> ModelConfig:
        """The shape of a rank's layers. Every rank has the whole residual stream."""
        if self.size == 1:
            return config
        return replace(config, specs=tuple(map(self.share_layer, config.specs)))

    def share_layer(self, spec: LayerSpec) -> LayerSpec:
        kv_heads, intermediate = (_length(self.cut(n)) for n in (spec.kv_heads, spec.intermediate))
        heads, experts = kv_heads * (spec.heads // spec.kv_heads), spec.experts
        if experts is not None:
            experts = replace(experts, width=_length(self.cut(experts.width)))
        return replace(spec, heads=heads, kv_heads=kv_heads, intermediate=intermediate, experts=experts)

    def part(self, name: str, weight: Any, config: ModelConfig) -> Any:
        """The rank's outputs of a weight: whole heads with their queries. Every rank has all norms and routers."""
        if (
            self.size == 1
            or name.endswith("norm.weight")
            or f".{ROUTER}." in name
            or f".{SHARED_GATE}." in name
        ):
            return weight
        words, units = name.split("."), 0
        if words[-2] in ("q_proj", "k_proj", "v_proj") or words[-1] == "sinks":
            units = config.specs[int(words[2])].kv_heads
        own = self.cut(weight.shape[0], units)
        return replace(weight, raw=weight.raw[own]) if isinstance(weight, Blocks) else weight[own]

    def gather(self, part: Tensor, whole: int, units: int = 0) -> Tensor:
        """[rows, outputs of this rank] of every rank -> [rows, whole], cut as in `cut`."""
        return part

    def pick(self, part: Tensor, owners: Tensor) -> Tensor:
        """[rows, width] of every rank -> each row from the rank that owns it."""
        return part

    def announce(self, call: str, args: tuple[Any, ...]) -> None:
        """Rank 0 has the others run this call of their model, too."""

    def opened(self, store: KeyValueStore) -> None:
        """A store was made that calls will name."""

    def recorded(self, capture: Callable[[], Captured]) -> Captured:
        """What `capture` returns. The others capture the calls in it, too, and replay them with this graph."""
        return capture()

    def failed(self, error: BaseException) -> BaseException:
        """What to raise for an error in the middle of a call."""
        return error


def _length(part: slice) -> int:
    return int(part.stop - part.start)


ALONE = Group()


class Channel(Protocol):
    """What rank 0 tells the others by."""

    def send(self, message: bytes) -> None:
        """Raises if a rank is lost."""
        ...

    def reason(self, error: BaseException) -> BaseException:
        """The rank that was lost, if that is why a call failed."""
        ...


class Ranks(Group):
    """One of several processes. `connect` it before the first gather."""

    def __init__(self, rank: int, size: int, channel: Channel | None = None) -> None:
        """Rank 0 has a channel to the others."""
        self.rank, self.size, self.channel = rank, size, channel
        self.broken: BaseException | None = None
        self._numbers: weakref.WeakKeyDictionary[KeyValueStore, int] = weakref.WeakKeyDictionary()
        self._dropped: list[int] = []  # stores that rank 0 no longer has
        self._count = 0
        self._recording = False
        self._collecting: Callable[[], bool] = lambda: False
        self._device = torch.device("cpu")
        self._process_group: Any = None
        self._meeting: dist.Store | None = None  # must live as long as the process group

    def connect(self, store: dist.Store, device: torch.device) -> None:
        """Meets the other ranks, over loopback on a CPU."""
        self._meeting, self._device = store, device
        if device.type == "cuda":
            from outrider.model.kernels.gpu.ahead import is_collecting  # Triton comes with it

            self._collecting = is_collecting
            nccl: Any = dist.ProcessGroupNCCL  # not in torch for a CPU
            options = nccl.Options()
            options._timeout = timedelta(seconds=GATHER_SECONDS)
            self._process_group = nccl(store, self.rank, self.size, options)
            return
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout, options._threads = timedelta(seconds=GATHER_SECONDS), 1
        self._process_group = gloo(store, self.rank, self.size, options)

    def abort(self) -> None:
        """Ends gathers that wait for a lost rank. Those of a CPU end by themselves."""
        if self._process_group is not None and self._process_group.name() == "nccl":
            self._process_group.abort()

    def gather(self, part: Tensor, whole: int, units: int = 0) -> Tensor:
        widths = [_length(self.cut(whole, units, rank)) for rank in range(self.size)]
        most = max(widths)
        if most > part.shape[1]:
            part = torch.nn.functional.pad(part, (0, most - part.shape[1]))
        every = self._all(part)
        if min(widths) == most:
            return every.transpose(0, 1).reshape(len(part), whole)
        return torch.cat([one[:, :width] for one, width in zip(every, widths, strict=True)], 1)

    def pick(self, part: Tensor, owners: Tensor) -> Tensor:
        return self._all(part)[owners, torch.arange(len(part), device=part.device)]

    def _all(self, part: Tensor) -> Tensor:
        """[ranks, *part.shape]"""
        part = part.contiguous()
        every = part.new_empty(self.size * part.numel())
        if part.numel() and not self._collecting():
            _done(self._process_group._allgather_base(every, part.view(-1), _at_once(c10d.AllgatherOptions)))
        return every.view(self.size, *part.shape)

    # ------------------------------------------------------------------------------------------------- calls

    def announce(self, call: str, args: tuple[Any, ...]) -> None:
        if self.channel is None:
            return
        if self.broken is not None:
            raise self.broken
        dropped, self._dropped[:] = list(self._dropped), []
        tensors: list[Tensor] = []
        shown = [self._shown(arg, tensors) for arg in args]
        layout = [(str(one.dtype).removeprefix("torch."), one.shape) for one in tensors]
        # Tensors on the device stay there; the others go with the message.
        way = "broadcast" if self._recording or any(one.is_cuda for one in tensors) else "sent"
        way = "absent" if self._collecting() else way
        line = json.dumps([call, shown, dropped, way, layout]).encode()
        self.channel.send(b"\n".join([line, _bytes_of(tensors).numpy().tobytes() if way == "sent" else b""]))
        if way == "broadcast":
            self._broadcast(_bytes_of([one.to(self._device) for one in tensors]))

    def received(self, way: str, layout: Any, sent: bytes) -> Iterator[Tensor]:
        """The tensors of a call that rank 0 announced."""
        ends = _ends(layout)
        if way == "sent":
            data = torch.frombuffer(bytearray(sent or b"\0"), dtype=torch.uint8)
        else:
            data = torch.zeros(ends[-1], dtype=torch.uint8, device=self._device)
        if way == "broadcast":
            self._broadcast(data)
        for (name, shape), at in zip(layout, ends, strict=False):
            dtype: torch.dtype = getattr(torch, name)
            found = data[at : at + math.prod(shape) * dtype.itemsize]
            # Memory of a message has no alignment.
            yield (found.clone() if way == "sent" else found).view(dtype).view(shape)

    def _broadcast(self, data: Tensor) -> None:
        if len(data):
            _done(self._process_group.broadcast([data], _at_once(c10d.BroadcastOptions)))

    def recorded(self, capture: Callable[[], Captured]) -> Captured:
        self._count += 1
        number = self._count
        self.announce("record", (number,))
        self._recording = True
        try:
            graph, result = capture()
        except BaseException:
            self._dropped.append(number)
            raise
        finally:
            self._recording = False
            self.announce("recorded", ())
        return SharedGraph(self, number, graph), result

    def opened(self, store: KeyValueStore) -> None:
        if self.channel is None:
            return
        self._count += 1
        self._numbers[store] = self._count
        self.dropped_with(store, self._count)
        self.announce("open_store", (self._count, store.slots))

    def dropped_with(self, owner: object, number: int) -> None:
        """The others drop what has this number once rank 0 no longer has its owner."""
        weakref.finalize(owner, self._dropped.append, number)

    def failed(self, error: BaseException) -> BaseException:
        """Ranks that stopped in the middle of a call are in different places, so nothing can be gathered after it."""
        if self.channel is None:
            return error
        self.broken = self.broken or self.channel.reason(error)
        return self.broken

    def _shown(self, arg: Any, tensors: list[Tensor]) -> Any:
        """An argument as JSON has it; its tensors follow the JSON."""
        if isinstance(arg, KeyValueStore):
            return {"store": self._numbers[arg]}
        if isinstance(arg, Batch):
            batch = arg if arg.table.is_cuda or self._recording else _narrow(arg)
            tensors += [getattr(batch, field.name) for field in fields(batch)]
            return {"batch": len(fields(batch))}
        if isinstance(arg, StagedView):
            tensors.append(arg.there)
            return {"staged": astuple(arg.shape)}
        if isinstance(arg, Tensor):
            tensors.append(arg)
            return {"tensor": 1}
        return arg


class SharedGraph:
    """A graph of rank 0, with which the others replay theirs."""

    def __init__(self, group: Ranks, number: int, graph: Any) -> None:
        self.group, self.number, self.graph = group, number, graph
        group.dropped_with(self, number)

    def replay(self) -> None:
        self.group.announce("replay", (self.number,))
        self.graph.replay()


def _narrow(batch: Batch) -> Batch:
    """A batch with only that part of the slot table which its rows read."""
    used, places = batch.table_rows.unique(return_inverse=True)
    width = int(batch.prefix.max()) + MAX_NODES if batch.rows else 0
    return replace(batch, table=batch.table[used.long(), :width], table_rows=places.int())


def _ends(layout: Any) -> list[int]:
    """Where tensors begin that lie one after the other in memory, and where the last ends."""
    sizes = [math.prod(shape) * getattr(torch, name).itemsize for name, shape in layout]
    return [0, *accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]


def _bytes_of(tensors: list[Tensor]) -> Tensor:
    parts = [one.contiguous().view(-1).view(torch.uint8) for one in tensors]
    blank = torch.zeros(ALIGNMENT, dtype=torch.uint8, device=parts[0].device if parts else "cpu")
    return torch.cat(
        [piece for one in parts for piece in (one, blank[: -len(one) % ALIGNMENT])] or [blank[:0]]
    )


def _at_once(options: Any) -> Any:
    """On the stream of the caller, which needs no events then."""
    made = options()
    made.asyncOp = False
    return made


def _done(work: Any) -> None:
    if work is not None:
        work.wait()


def shared(method: Call) -> Call:
    """A method of a model that all ranks run together. What it raises ends the group."""

    @functools.wraps(method)
    def run(self: Any, *args: Any) -> Any:
        group: Group = self.group
        if group.size == 1:
            return method(self, *args)
        group.announce(method.__name__, args)
        try:
            return method(self, *args)
        except BaseException as error:
            raise group.failed(error) from error

    return run  # type: ignore[return-value]


def follow(
    model: Any,
    messages: Iterator[bytes],
    open_store: Callable[[int], KeyValueStore],
    capture: Callable[[Callable[[], None]], Captured] | None = None,
    collecting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Runs on its own part of the model what rank 0 announces, until that hangs up. `capture` makes a graph of what a
    function launches, where there are graphs; while `collecting`, kernels are only compiled.
    """
    held: dict[int, Any] = {}  # stores and graphs

    def run() -> None:
        for message in messages:
            line, _, sent = message.partition(b"\n")
            call, args, dropped, way, layout = json.loads(line)
            for number in dropped:
                held.pop(number, None)
            if call == "recorded":
                return
            if call == "record":
                assert capture is not None
                held[args[0]], _ = capture(run)
            elif call == "replay":
                held[args[0]].replay()
            elif call == "open_store":
                held[args[0]] = open_store(args[1])
            else:
                given = _given(args, held, model.group.received(way, layout, sent))
                with collecting() if way == "absent" else nullcontext():
                    getattr(model, call)(*given)

    run()


def _given(args: list[Any], held: dict[int, Any], tensors: Iterator[Tensor]) -> Iterator[Any]:
    table: Tensor | None = None
    for shown in args:
        if not isinstance(shown, dict):
            yield shown
        elif "store" in shown:
            yield held[shown["store"]]
        elif "batch" in shown:
            batch = Batch(*islice(tensors, shown["batch"]))
            table = batch.table
            yield batch
        elif "staged" in shown:
            assert table is not None  # of the batch that the rows are part of
            yield StagedView(StagedShape(*shown["staged"]), next(tensors), table)
        else:
            yield next(tensors)
