"""Real servers in processes of their own, on loopback: one over a tiny random model, one over the real one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from safetensors.torch import save_file

from tests.load.tiny import byte_level_backend, hf_config, hf_weights, vocabulary
from tests.tiny import random_tensors, tiny_config

TEMPLATE = (
    "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


UNENCRYPTED = False  # for `verify`: nothing is encrypted here, and reading certificates takes 50 ms a call


@dataclass
class Served:
    """A server process. `lines` is what it printed."""

    process: subprocess.Popen[str]
    url: str
    lines: list[str] = field(default_factory=list)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, verify=UNENCRYPTED, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=20, verify=UNENCRYPTED, **options)

    def metric(self, name: str) -> float:
        """A series by its full name with labels other than the model's left out; 0 if it is not there."""
        total = 0.0
        for line in self.get("/metrics").text.splitlines():
            if line.startswith((f"outrider:{name}{{", f"outrider:{name} ")):
                total += float(line.rpartition(" ")[2])
        return total

    def wait_ready(self, seconds: float = 60) -> None:
        wait_for(lambda: self.get("/health").status_code == 200, seconds)

    def wait_idle(self, seconds: float = 30) -> None:
        """Until nothing runs and nothing waits, as the metrics say."""
        wait_for(
            lambda: self.metric("num_requests_running") == 0 and self.metric("num_requests_waiting") == 0,
            seconds,
        )

    def printed(self, text: str) -> str:
        """All it printed, once `text` is part of it: what a process prints may arrive after its answer."""
        wait_for(lambda: text in "".join(self.lines))
        return "".join(self.lines)

    def engine(self) -> psutil.Process:
        [child] = [
            p
            for p in psutil.Process(self.process.pid).children()
            if "engine_process" in " ".join(p.cmdline())
        ]
        return child

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if condition():
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.05)
    raise AssertionError("it did not come to pass in time")


COMMAND = (sys.executable, "-m", "outrider")


def start_server(
    model: str | Path,
    *flags: str,
    ready: bool = True,
    env: dict[str, str] | None = None,
    command: Sequence[str] = COMMAND,
    cwd: Path | None = None,
) -> Served:
    process = subprocess.Popen(
        [*command, "serve", str(model), "--port", "0", *flags],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **(env or {})},
    )
    assert process.stdout is not None
    served = Served(process, "")
    for line in process.stdout:
        served.lines.append(line)
        if "listening on" in line:
            served.url = line.split("listening on ")[1].split(",")[0]
            break
    else:
        raise AssertionError("the server did not start:\n" + "".join(served.lines))
    threading.Thread(target=lambda: served.lines.extend(process.stdout), daemon=True).start()  # type: ignore[arg-type]
    if ready:
        try:
            served.wait_ready()
        except BaseException:
            process.kill()
            raise
    return served


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of a few thousand weights with a byte-level vocabulary; a step takes about a millisecond."""
    folder = tmp_path_factory.mktemp("served") / "tiny"
    write_tiny(folder)
    return folder


def write_tiny(folder: Path, context: int = 2048, seed: int = 0) -> None:
    """Heads of 16, so that the C kernels run it."""
    folder.mkdir()
    config = tiny_config(vocab=len(vocabulary()))
    shape = hf_config(
        hidden_size=config.hidden,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate,
        max_position_embeddings=context,
    )
    (folder / "config.json").write_text(json.dumps(shape))
    words = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    byte_level_backend().save(str(folder / "tokenizer.json"))
    read = random_tensors(config, seed)
    save_file({name: read(name) for name in hf_weights()}, folder / "model.safetensors")


@pytest.fixture(scope="session")
def served(tiny_folder: Path) -> Iterator[Served]:
    """The tiny model, served with defaults. Shared: leave it as it was found."""
    server = start_server(tiny_folder)
    yield server
    assert server.stop() == 0


@pytest.fixture
def start() -> Iterator[Callable[..., Served]]:
    """Starts servers over a model with flags of one's own; they end with the test."""
    started: list[Served] = []

    def begin(model: Path, *flags: str, **options: Any) -> Served:
        started.append(start_server(model, *flags, **options))
        return started[-1]

    yield begin
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait(20)


@pytest.fixture
def serve_tiny(tiny_folder: Path, start: Callable[..., Served]) -> Callable[..., Served]:
    return partial(start, tiny_folder)


@pytest.fixture(scope="session")
def served_real() -> Iterator[Served]:
    """The built-in model."""
    server = start_server("smollm2-135m", "--cache-bytes", "256M")
    yield server
    assert server.stop() == 0
