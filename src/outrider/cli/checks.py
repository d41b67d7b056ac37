"""What `outrider doctor` looks at, one function a topic. No torch: all of it must be done in about a second.

A check yields findings: what is there, and for what is wrong or will be slow, the command that fixes it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from outrider.errors import KernelUnavailable, install
from outrider.load.find import list_models
from outrider.load.hub import hub_cache
from outrider.load.pairs import list_pairs
from outrider.load.progress import file_size
from outrider.model.kernels.build import built, carried, compiler
from outrider.settings import cache_folder, free_memory, shown_size, usable_cores

State = Literal["ok", "note", "warning", "error"]

NEEDED = ("torch", "numpy", "safetensors", "tokenizers", "huggingface_hub", "jinja2", "rich", "typer")
EXTRAS = {
    "serve": ("starlette", "uvicorn", "h11", "msgspec", "llguidance"),
    "hf": ("transformers", "accelerate"),
}
SHOWN = ("torch", "triton", "transformers", "tokenizers", "safetensors")
LITTLE_MEMORY = 2 << 30  # the built-in model, its cache and torch need about that
LITTLE_DISK = 2 << 30
BUSY_SHARE = 0.25  # of a core, by one program, to be named
SAMPLE_SECONDS = 0.25
PORT = 8000  # of outrider serve


@dataclass(frozen=True, slots=True)
class Finding:
    topic: str
    state: State
    text: str
    mend: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)  # for --json


def findings() -> Iterator[Finding]:
    for check in (versions, cores, memory, kernels, gpu, models, drafts, folders, shell, port):
        yield from check()


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def versions() -> Iterator[Finding]:
    from outrider import __version__

    facts: dict[str, Any] = {"outrider": __version__, "python": platform.python_version()}
    facts |= {name: installed(name) for name in (*NEEDED, "triton", *sum(EXTRAS.values(), ()))}
    shown = ", ".join(f"{name} {facts[name]}" for name in SHOWN if facts[name])
    yield Finding("versions", "ok", f"outrider {__version__}, python {facts['python']}, {shown}", facts=facts)
    yield Finding("system", "ok", f"{platform.platform(terse=True)}, {platform.machine()}, {_processor()}")
    if lacking := [name for name in NEEDED if facts[name] is None]:
        what = f"{', '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} not installed"
        yield Finding("versions", "error", what, f"pip install {' '.join(lacking)}")
    for extra, names in EXTRAS.items():
        if lacking := [name for name in names if facts[name] is None]:
            what = f"outrider {extra}" if extra == "serve" else "other families of models"
            text = f"{what} needs {', '.join(lacking)}, not installed"
            yield Finding("versions", "note", text, install(extra))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown processor"
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "unknown processor")


def cores() -> Iterator[Finding]:
    usable, present = usable_cores(), os.cpu_count() or 1
    busy = _busy_programs()
    taken = sum(share for _, share in busy)
    facts = {"usable": usable, "present": present, "busy": [list(one) for one in busy]}
    here = f"{usable} usable" + (
        f" of {present} (affinity or a container's quota)" if usable < present else ""
    )
    if taken < BUSY_SHARE:
        yield Finding("cores", "ok", f"{here}, no other program uses them", facts=facts)
        return
    who = ", ".join(f"{name} {share:.0%}" for name, share in busy[:3])
    free = max(1, usable - round(taken))
    mend = f"stop them, or leave them a core: --threads {free}" if free < usable else "stop them"
    crowded = taken + usable > present  # else they have cores of their own
    text = f"{here}; others use {taken:.1f}: {who}" + ("; decoding waits for them" if crowded else "")
    yield Finding("cores", "warning" if crowded else "ok", text, mend if crowded else None, facts)


def _busy_programs() -> list[tuple[str, float]]:
    """Other programs and the cores they use just now, the busiest first. Linux only."""
    before = _cpu_times()
    time.sleep(SAMPLE_SECONDS)
    after, tick = _cpu_times(), os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
    shares = {
        f"{name} (pid {pid})": (used - before[pid][1]) / tick / SAMPLE_SECONDS
        for pid, (name, used) in after.items()
        if pid in before and pid != os.getpid()
    }
    found = [(name, share) for name, share in shares.items() if share >= BUSY_SHARE]
    return sorted(found, key=lambda one: -one[1])


def _cpu_times() -> dict[int, tuple[str, int]]:
    """By process: its name, and its time on a core in ticks."""
    times: dict[int, tuple[str, int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            head, _, numbers = (folder / "stat").read_text().rpartition(")")
        except OSError:
            continue  # it has ended
        fields = numbers.split()
        times[int(folder.name)] = (head.partition("(")[2], int(fields[11]) + int(fields[12]))
    return times


def memory() -> Iterator[Finding]:
    free = free_memory()
    if free is None:
        yield Finding("memory", "note", "cannot be read on this system")
        return
    facts = {"free_bytes": free}
    if free >= LITTLE_MEMORY:
        yield Finding("memory", "ok", f"{shown_size(free)} free", facts=facts)
        return
    mend = "close programs, or take a smaller model, --context 2048 and --cache-bytes 256M"
    yield Finding("memory", "warning", f"only {shown_size(free)} free; models may not load", mend, facts)


def kernels() -> Iterator[Finding]:
    if carried() is not None:
        yield Finding("kernels", "ok", "come with the package")
        return
    try:
        which = compiler()
    except KernelUnavailable as problem:
        text = f"{problem}: the CPU decodes with torch's own, several times slower"
        yield Finding("kernels", "warning", text, "install gcc or clang, or set CC to one")
        return
    if built(cache_folder() / "kernels"):
        yield Finding("kernels", "ok", f"built, by {which}")
    else:
        yield Finding("kernels", "ok", f"not built yet; {which} does it on first use, in some seconds")


def gpu() -> Iterator[Finding]:
    cards = _cards()
    if cards is None:
        yield Finding("gpu", "ok", "none; models run on the CPU", facts={"cards": []})
        return
    driver, found = cards
    cuda = _torch_cuda()
    for name, total, free in found:
        facts = {"name": name, "total_bytes": total, "free_bytes": free, "driver": driver, "torch_cuda": cuda}
        text = f"{name}, {shown_size(free)} of {shown_size(total)} free, driver {driver}"
        if free < total // 4:
            yield Finding("gpu", "warning", f"{text}: others use it", "see nvidia-smi for who does", facts)
        else:
            yield Finding("gpu", "ok", text, facts=facts)
    if cuda is None:
        text = "this torch has no CUDA, so the GPU is not used"
        yield Finding("gpu", "warning", text, "install a torch with CUDA (pytorch.org has the line)")
    elif installed("triton") is None:
        text = "triton is not installed; the GPU's kernels need it"
        yield Finding("gpu", "error", text, install("gpu"))


def _cards() -> tuple[str, list[tuple[str, int, int]]] | None:
    """The driver's version, and every GPU's name, memory and free memory; None without a driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        text = ctypes.create_string_buffer(96)
        nvml.nvmlSystemGetDriverVersion(text, len(text))
        driver, count = text.value.decode(), ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        found = []
        for index in range(count.value):
            handle, sizes = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()  # total, free, used
            nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
            nvml.nvmlDeviceGetName(handle, text, len(text))
            nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(sizes))
            found.append((text.value.decode(errors="replace"), sizes[0], sizes[1]))
        return (driver, found) if found else None
    finally:
        nvml.nvmlShutdown()


def _torch_cuda() -> str | None:
    """The CUDA that torch was built for, from its files: importing it takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return None
    found = re.search(r"^cuda[^=]*= '([^']+)'", text, re.MULTILINE)
    return found[1] if found else None


def models() -> Iterator[Finding]:
    here = [entry for entry in list_models(cache_folder()) if entry.present]
    facts = {"cached": [{"name": entry.name, "bytes": entry.bytes} for entry in here]}
    if not here:
        mend = "outrider models pull smollm2-135m"
        yield Finding("models", "note", "none fetched yet", mend, facts)
        return
    names = ", ".join(f"{entry.name} ({file_size(entry.bytes)})" for entry in here[:6])
    more = f" and {len(here) - 6} more" if len(here) > 6 else ""
    yield Finding("models", "ok", f"fetched: {names}{more}", facts=facts)


def drafts() -> Iterator[Finding]:
    text = "lookup needs nothing; --draft MODEL takes a smaller model with the target's tokens, too"
    yield Finding("drafts", "ok", text, "which fit: outrider models show MODEL")
    pairs, problems = list_pairs(cache_folder())
    if pairs:
        names = ", ".join(f"{pair.name} (for {pair.card.target.name})" for pair in pairs)
        facts = {"pairs": [{"name": pair.name, "target": pair.card.target.name} for pair in pairs]}
        yield Finding("drafts", "ok", f"paired, taken by --draft auto: {names}", facts=facts)
    for problem in problems:
        mend = "mend its card.json, or: outrider pairs remove NAME"
        yield Finding("drafts", "warning", f"a pair cannot be used: {problem}", mend)


def folders() -> Iterator[Finding]:
    places = {
        "cache": (cache_folder(), "set OUTRIDER_CACHE to a folder you may write to"),
        "hub cache": (hub_cache(), "set HF_HUB_CACHE to a folder you may write to"),
        "temporary": (Path(tempfile.gettempdir()), "set TMPDIR to a folder you may write to"),
    }
    for name, (folder, mend) in places.items():
        topic, there = "folders", _nearest(folder)
        free = shutil.disk_usage(there).free
        facts: dict[str, Any] = {"folder": str(folder), "free_bytes": free}
        if not os.access(there, os.W_OK | os.X_OK):
            state: State = "error" if name == "cache" else "warning"
            yield Finding(topic, state, f"{name} {folder} cannot be written to", mend, facts)
        elif free < LITTLE_DISK:
            text = f"{name} {folder} has only {shown_size(free)} left"
            yield Finding(topic, "warning", text, "make room there, or choose another folder: " + mend, facts)
        else:
            yield Finding(topic, "ok", f"{name} {folder}, {shown_size(free)} free", facts=facts)


def _nearest(folder: Path) -> Path:
    """The folder itself, or the one above it in which it would be made."""
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())


def shell() -> Iterator[Finding]:
    from outrider.cli.demo import activation

    if line := activation():
        yield Finding("shell", "note", "outrider is not on the PATH", line)
    if (sys.stdout.encoding or "").lower().replace("-", "") != "utf8":
        text = f"the terminal's encoding is {sys.stdout.encoding}; some answers cannot be written"
        yield Finding("shell", "warning", text, "export PYTHONUTF8=1")
    if names := sorted(name for name in os.environ if name.startswith(("OUTRIDER_", "OMP_", "HF_HUB_OFF"))):
        facts = {"variables": names}
        yield Finding("shell", "ok", f"set in the environment: {', '.join(names)}", facts=facts)


def port() -> Iterator[Finding]:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", PORT))
        except OSError:
            text = f"{PORT}, which outrider serve listens on, is taken"
            yield Finding("port", "note", text, "outrider serve --port 8001")
            return
    yield Finding("port", "ok", f"{PORT} is free for outrider serve")
