"""A rank beside rank 0: `python -m outrider.engine.rank_process FD`, started by ranks.py.

It loads its part of the model and runs the calls that rank 0 announces.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from outrider.engine.build import load_model
from outrider.engine.memory import in_words, runs_on_gpu
from outrider.engine.ranks import PULSE_SECONDS, messages, receive, send
from outrider.load.checkpoint import open_checkpoint
from outrider.load.child import become_child
from outrider.model.decoder import make_store
from outrider.model.parallel import Ranks, follow
from outrider.settings import Settings

Say = Callable[[bytes], None]


def main(descriptor: int) -> int:
    become_child()
    warnings.simplefilter("ignore")  # rank 0 gives them
    with socket.socket(fileno=descriptor) as sock:
        if (start := receive(sock)) is None:
            return 0
        lock = threading.Lock()

        def say(message: bytes) -> None:
            with lock, contextlib.suppress(OSError):  # rank 0 is gone: the next receive says so, too
                send(sock, message)

        threading.Thread(target=_live, args=(say,), name="outrider-pulse", daemon=True).start()
        try:
            _follow(sock, json.loads(start), say)
        except Exception as error:
            text = str(in_words(error, "sharing the model")) or repr(error)
            say(json.dumps({"failed": text}).encode())
            return 1
    return 0


def _follow(sock: socket.socket, start: dict[str, Any], say: Say) -> None:
    settings = Settings.of(start["settings"])
    group = Ranks(start["rank"], settings.tensor_parallel)
    torch.set_num_threads(1)
    if runs_on_gpu(settings):
        torch.cuda.set_device(group.rank)
    model = load_model(open_checkpoint(start["model"]), settings, group=group)
    say(json.dumps({"ready": True}).encode())
    group.connect(dist.FileStore(start["meeting"], group.size), model.device)
    run = partial(follow, model, messages(sock), partial(make_store, model))
    if model.device.type == "cpu":
        run()
        return
    from outrider.model.kernels.gpu.ahead import AHEAD  # Triton comes with it
    from outrider.model.kernels.gpu.recording import capture

    run(partial(capture, pool=torch.cuda.graph_pool_handle()), AHEAD.collecting)


def _live(say: Say) -> None:
    while True:
        say(b"")
        time.sleep(PULSE_SECONDS)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
