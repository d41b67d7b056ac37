"""Two ranks on one GPU, in two processes that gather over NCCL inside captured steps: the tokens and bits of one.

    PYTHONPATH=src:. python tests/engine/captured_ranks.py [--seconds 60]

NCCL takes two ranks on a device if they say that they are on two hosts, and then goes through the network. The kernels
of two processes take turns, so a gather takes milliseconds here: nothing in this file says how fast ranks are.
Without a GPU, Triton's interpreter runs the kernels (TRITON_INTERPRET=1), ranks gather over gloo, and
tests/model/replayed.py stands in for graphs.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from outrider.control.planner import Planner
from outrider.device.ops_gpu import GpuStepOps
from outrider.device.state import SequenceState
from outrider.draft.drafters import Drafters
from outrider.draft.eagle import EagleDrafter
from outrider.draft.eagle_head_gpu import GpuEagleHead
from outrider.draft.early_exit import EarlyExitDrafter
from outrider.draft.lm import LmDrafter
from outrider.draft.lookup import LookupDrafter
from outrider.engine.eager_runner import EagerRunner
from outrider.engine.engine import Engine
from outrider.engine.graph_runner import GraphRunner, make_graph_runner
from outrider.engine.kv_cache import KvCache, make_kv_cache
from outrider.engine.ranks import messages, send
from outrider.load.heads import HeadConfig
from outrider.model.decoder import Decoder, make_store
from outrider.model.device import DeviceDecoder, GraphedPass
from outrider.model.kernels.gpu.ahead import AHEAD
from outrider.model.kernels.gpu.copies import find_copies
from outrider.model.kernels.gpu.kernels import GpuKernels
from outrider.model.kernels.gpu.recording import Recorded, capture, record
from outrider.model.parallel import ALONE, Group, Ranks, SharedGraph, follow
from outrider.model.rope import rope_tables
from outrider.settings import Settings
from outrider.types import MAX_NODES, DraftPlan, Request
from tests.model.gpu import halves  # replaces packages that are absent
from tests.model.replayed import Messages, captured
from tests.tiny import (
    VOCAB,
    Always,
    Letters,
    arriving,
    finish,
    head_tensors,
    noised,
    prompt_of,
    random_tensors,
    request,
    tiny_config,
    tokens_of,
)

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SHAPE: dict[str, Any] = dict(
    hidden=256, heads=8, kv_heads=4, head_dim=64, intermediate=512, layers=3, context=512, windows=(0,) * 3
)
if not ON_GPU:
    SHAPE |= dict(hidden=64, heads=2, kv_heads=2, head_dim=16, intermediate=64, context=64)
REQUESTS, PROMPT, ANSWER = (7, 200, 20) if ON_GPU else (3, 8, 5)  # how many, and their tokens at most
NETWORK = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
}
ROWS = (1, 16, 64, 256)


class Line:
    """The socket to the other rank."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, message: bytes) -> None:
        send(self.sock, message)

    def reason(self, error: BaseException) -> BaseException:
        return error


class OnDevice(Ranks):
    """Tensors stay on the device, as on a GPU."""

    _recording = property(lambda self: True, lambda self, now: None)  # type: ignore[assignment]


def tiny(group: Group, read: Callable[[str], torch.Tensor] | None = None) -> DeviceDecoder:
    config = tiny_config(**SHAPE)
    read = read or random_tensors(config)
    tables = rope_tables(config, config.context + MAX_NODES + 1)
    kernels = GpuKernels(config, tables, DEVICE, torch.bfloat16 if ON_GPU else torch.float16, group=group)
    return DeviceDecoder(Decoder(config, lambda name: group.part(name, read(name), config), kernels))


def large(group: Group, shape: str) -> DeviceDecoder:
    config = halves.config_of(shape)
    return halves.model_of(config, halves.weights(config, "cuda"), group, "cuda", torch.bfloat16)


MODELS = {"tiny": tiny, "8B": partial(large, shape="8B"), "70B": partial(large, shape="70B")}


def other_rank(name: str, descriptor: int, meeting: str) -> None:
    group = Ranks(1, 2)
    model = MODELS[name](group)
    group.connect(dist.FileStore(meeting, 2), model.device)
    open_store = partial(make_store if name == "tiny" else halves.filled_store, model)
    with socket.socket(fileno=descriptor) as sock:
        if ON_GPU:
            recording = partial(capture, pool=torch.cuda.graph_pool_handle())
            follow(model, messages(sock), open_store, recording, AHEAD.collecting)
        else:
            heard = Messages(messages(sock))
            follow(model, heard, open_store, heard.capture, AHEAD.collecting)


def beside(name: str, work: Callable[[DeviceDecoder], Any]) -> Any:
    """What `work` returns of a model that this process and another one share."""
    ours, theirs = socket.socketpair()
    with tempfile.TemporaryDirectory() as folder, ours:
        meeting = str(Path(folder) / "meeting")
        command = [sys.executable, __file__, "--other", name, str(theirs.fileno()), meeting]
        with theirs:
            other = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env={**os.environ, "NCCL_HOSTID": "one"}
            )
        try:
            group = (Ranks if ON_GPU else OnDevice)(0, 2, Line(ours))
            model = MODELS[name](group)
            group.connect(dist.FileStore(meeting, 2), model.device)
            return work(model)
        finally:
            ours.shutdown(socket.SHUT_RDWR)
            other.wait(30)


# ---------------------------------------------------------------------------------------------- bits


def same_bits(name: str) -> None:
    """Logits of graphs that gather, against those of one process."""
    whole = MODELS[name](ALONE)
    expected = {count: halves.logits_of(whole, count) for count in ROWS}

    def replayed(model: DeviceDecoder) -> list[int]:
        odd = []
        for count in ROWS:
            batch, each = halves.batch_of(count, "cuda")
            run = model.make_pass(halves.filled_store(model, batch.table.numel()))
            before = batch.ids.clone()
            graph, logits = record(
                lambda run=run, batch=batch, each=each: run(batch, each, halves.KNOWN + each),  # type: ignore[misc]
                share=model.group.recorded,
            )
            assert isinstance(graph, SharedGraph)
            batch.ids.zero_()  # what a replay reads is what is there by then
            graph.replay()
            batch.ids.copy_(before)
            logits.zero_()
            graph.replay()
            torch.cuda.synchronize()
            odd += [] if torch.equal(logits, expected[count]) else [count]
        return odd

    odd = beside(name, replayed)
    print(
        f"{name}: graphs of two ranks, rows {ROWS}: {f'DIFFER at {odd}' if odd else 'bits equal'}", flush=True
    )


# -------------------------------------------------------------------------------------------- tokens


def engine_of(target: DeviceDecoder, planner: Any, captured: bool) -> Engine:
    cache = make_kv_cache(target, Settings(max_sequences=32, step_rows=256, cache_bytes=1 << 26))
    config = HeadConfig(tiny_config(**{**SHAPE, "layers": 1, "windows": (0,)}), VOCAB, (0, 1, 2))
    tensors = head_tensors(config)
    head = GpuEagleHead(config, lambda name: tensors[name].float(), target, cache.context + MAX_NODES + 1)
    small = tiny(ALONE, noised(tiny_config(**SHAPE), 0, 0.05))
    graphed = partial(GraphedPass, group=target.group) if ON_GPU else None
    drafters = Drafters(
        {
            "lookup": LookupDrafter(find=find_copies),
            "lm": LmDrafter(small, cache.table, VOCAB, cache.context, GraphedPass if ON_GPU else None),
            "early_exit": EarlyExitDrafter(target, cache.store, cache.table, 2),
            "eagle": EagleDrafter(head, cache.store, cache.table, graphed=graphed),
        },
        VOCAB,
    )
    runner = runner_of(target, cache, drafters) if captured else EagerRunner(target, cache, drafters)
    settings = Settings(max_sequences=32, step_rows=256, cache_bytes=1 << 26)
    return Engine(target, cache, drafters, planner, runner, settings, Letters)


def runner_of(target: DeviceDecoder, cache: KvCache, drafters: Drafters) -> GraphRunner:
    if ON_GPU:
        return make_graph_runner(target, cache, drafters, "lm")
    group = target.group
    assert isinstance(group, Ranks)

    def recorded(step: Callable[[], Any]) -> tuple[Any, Any]:
        step()
        return group.recorded(lambda: captured(group, step))

    rows, width = cache.table.tensor.shape
    ops = GpuStepOps(SequenceState(rows, width, target.device, VOCAB), target)
    return GraphRunner(target, cache, drafters, ops, target.make_pass(cache.store), recorded, 1, "lm")


def requests(count: int, seed: int) -> list[Request]:
    rnd, made = random.Random(seed), []
    kinds: list[dict[str, Any]] = [
        {}, {"logprobs": 3}, {"frequency_penalty": 0.5, "logit_bias": {3: 2.0}}, {"min_tokens": 8},
        {"speculation": {"depth": 3}}, {"speculation": {"tree": [2, 2]}}, {"speculation": False},
    ]  # fmt: skip
    for i in range(count):
        temperature, top_k = rnd.choice([0, 0.7, 1.0]), rnd.choice([0, 0, 20])
        made.append(
            request(
                f"r{i}", prompt_of(rnd.randint(3, PROMPT), i + seed), max_tokens=rnd.randint(4, ANSWER),
                temperature=temperature, top_k=top_k, **kinds[i % len(kinds)],
            )
        )  # fmt: skip
    return made


def same_tokens(until: float, names: tuple[str, ...] = ()) -> None:
    some = requests(REQUESTS, 0)
    alone, whole = dict[str, list[int]](), tiny(ALONE)
    for one in some:
        engine = engine_of(whole, Planner("none"), False)
        engine.add(one)
        alone[one.id] = tokens_of(finish(engine)[one.id, 0])
    planners = {
        "plain": lambda: Planner("none"),
        **{name: partial(Always, DraftPlan(name, 3, 3)) for name in ("eagle", "early_exit", "lm", "lookup")},
        "tree of eagle": partial(Always, DraftPlan("eagle", 2, 6)),
        "auto": lambda: Planner("eagle"),
    }

    def run(target: DeviceDecoder) -> None:
        replays = 0
        replay = SharedGraph.replay

        def counted(self: SharedGraph) -> None:
            nonlocal replays
            replays += 1
            replay(self)

        SharedGraph.replay = counted  # type: ignore[method-assign]
        for name in names or planners:
            planner = planners[name]
            if time.monotonic() > until:
                print(f"{name}: left out, the time is over")
                continue
            begun, graphs, replays = time.monotonic(), Recorded.graphs, 0
            found = arriving(engine_of(target, planner(), True), some, random.Random(1))
            odd = [one for one in alone if found[one] != alone[one]]
            print(
                f"{name}: {sum(map(len, found.values()))} tokens, {Recorded.graphs - graphs} graphs captured, "
                f"{replays} replayed, {time.monotonic() - begun:.0f} s: {f'DIFFER {odd}' if odd else 'tokens equal'}",
                flush=True,
            )

    beside("tiny", run)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="no part begins after this time")
    parser.add_argument("--other", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.other:
        other_rank(given.other[0], int(given.other[1]), given.other[2])
        return 0
    os.environ.update(NETWORK, NCCL_HOSTID="zero")
    until = time.monotonic() + given.seconds
    same_tokens(until)
    for name in ("8B", "70B"):
        if ON_GPU and time.monotonic() < until:
            same_bits(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
