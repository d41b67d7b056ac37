"""Fixtures for every folder: one loaded model for the whole run, and none of the user's own settings."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import hypothesis
import pytest
import torch

from outrider import LLM, Settings
from outrider.engine.engine import Engine
from outrider.load.find import find
from outrider.settings import cache_folder, usable_cores

if (
    not torch.cuda.is_available()
):  # GPU kernels run in Triton's interpreter, if it hears of it before it is imported
    os.environ["TRITON_INTERPRET"] = "1"

Engine.check_integrity = True  # in this process; servers run theirs without

KEPT = {"OUTRIDER_CACHE"}  # where the model and the kernels already are
BUILT_IN = {"llm", "smollm2", "served_real"}  # fixtures of the built-in model
# Without a GPU, torch.manual_seed notes the stack for later: a millisecond a test.
seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
MOST_WORKERS = 8  # each may hold the built-in model and a few servers

# Other examples in every run, none kept: a failure prints what brings it back.
hypothesis.settings.register_profile(
    "outrider", derandomize=False, deadline=None, database=None, print_blob=True
)
hypothesis.settings.load_profile("outrider")
# For tests that are meant to fail: that they do is enough.
hypothesis.settings.register_profile(
    "unshrunk", phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate]
)


def pytest_configure() -> None:
    """A user's OUTRIDER_TEMPERATURE must not change what the tests see, nor reach the commands they start."""
    for name in set(os.environ) - KEPT:
        if name.startswith("OUTRIDER_"):
            del os.environ[name]
    os.environ["OUTRIDER_COSTS"] = ""  # nor must what passes cost once
    keep_to_one_core()


def keep_to_one_core() -> None:
    """Side by side every worker has a core to itself, and so have the servers and commands that it starts: two
    pools of threads over the same cores wait for each other at every barrier.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})
        torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One a core, which a container may have fewer of than its machine; none for single files and tests."""
    single = all(".py" in argument for argument in config.args)
    return 0 if single else min(usable_cores(), MOST_WORKERS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever uses the built-in model is marked so: `-m "not model"` needs no download."""
    for item in items:
        if BUILT_IN.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("model")


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Every second worker imports the tests from the last to the first before it collects them. After a fresh clone
    each module is compiled when it is first imported: by this, half of them by each of two workers.
    """
    if int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 2 == 0:
        return
    config = session.config
    for file in sorted((f for place in config.args for f in Path(place).rglob("test_*.py")), reverse=True):
        with contextlib.suppress(Exception, pytest.skip.Exception):  # collecting it says what is wrong
            importlib.import_module(
                ".".join(file.resolve().relative_to(config.rootpath).with_suffix("").parts)
            )


def pytest_collection_finish() -> None:
    """What thousands of imported modules and collected tests hold stays: no collection of garbage need look at it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(5000, 10, 10)  # from 700: collections took 40 s of a run


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The same random tensors whatever ran before; and the built-in model, which workers fetch one at a time."""
    seed(crc32(item.nodeid.encode()))
    if item.get_closest_marker("model"):
        cache_folder().mkdir(parents=True, exist_ok=True)
        with open(cache_folder() / ".tests.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            find("smollm2-135m", cache_folder())


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> Iterator[None]:
    """Commands that tests start obey Ctrl-C, even where the suite itself was started to ignore it (nohup, CI)."""
    before = signal.getsignal(signal.SIGINT)
    if before == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    if before == signal.SIG_IGN:
        signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    """The built-in model, checked after every step. Shared: leave it as it was found."""
    with LLM("smollm2-135m", settings=Settings(cache_bytes=1 << 28)) as model:
        yield model


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own, with nothing in it."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def _gradients_stay_on() -> Iterator[None]:
    """A test that turns them off for good breaks whichever test trains after it."""
    yield
    if not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        pytest.fail("gradients were left turned off")


@pytest.fixture(autouse=True)
def same_logging() -> Iterator[None]:
    """`serve` sets up logging for its process, which is the tests' where a test calls it."""
    root, own = logging.getLogger(), logging.getLogger("outrider")
    handlers, levels = root.handlers, (root.level, own.level)
    yield
    root.handlers = handlers
    root.setLevel(levels[0])
    own.setLevel(levels[1])
