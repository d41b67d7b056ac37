"""Builds wheels of Outrider into a folder, each with the C kernels compiled for one system: `make wheels`.

The ziglang package compiles for all of them on any of them. Where no wheel fits, Outrider compiles the kernels itself.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

from outrider.model.kernels import build

ROOT = Path(__file__).parent.parent
BUILD = "from setuptools import build_meta; build_meta.build_wheel('dist')"


@dataclass(frozen=True, slots=True)
class Target:
    system: str  # as sys.platform names it
    machine: str
    triple: str  # the compiler's name for both, with the oldest version of the system
    tag: str  # the wheel's
    cpu: str

    @property
    def library(self) -> str:
        return build.carried_name(self.system, self.machine)


TARGETS = (
    Target("linux", "x86_64", "x86_64-linux-gnu.2.17", "manylinux_2_17_x86_64", "x86_64_v3"),
    Target("linux", "aarch64", "aarch64-linux-gnu.2.17", "manylinux_2_17_aarch64", "generic"),
    Target("darwin", "aarch64", "aarch64-macos.11.0", "macosx_11_0_arm64", "apple_m1"),
    Target("darwin", "x86_64", "x86_64-macos.11.0", "macosx_11_0_x86_64", "x86_64_v3"),
    Target("win32", "x86_64", "x86_64-windows-gnu", "win_amd64", "x86_64_v3"),
)


def compiler(target: Target) -> list[str]:
    return [sys.executable, "-m", "ziglang", "cc", "-target", target.triple, f"-mcpu={target.cpu}"]


def compiled(target: Target, folder: Path) -> Path:
    """The kernels as a library for a target."""
    file = folder / target.library
    command = [*compiler(target), *build.FLAGS, "-s", *map(str, build.SOURCES), "-o", str(file), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    return file


def plain_wheel(folder: Path) -> Path:
    """The project's wheel without a library, from a copy of its files: building writes beside them."""
    tree = folder / "tree"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", build.CARRIED.name)
    shutil.copytree(ROOT / "src", tree / "src", ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    subprocess.run([sys.executable, "-c", BUILD], cwd=tree, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = (tree / "dist").iterdir()
    return wheel


@dataclass(frozen=True, slots=True)
class Bare:
    """A wheel's files without those that differ between systems."""

    file: Path
    name: str  # of the project, with its version
    info: str  # the folder of its metadata
    wheel: str
    record: str

    @classmethod
    def of(cls, plain: Path, folder: Path) -> Bare:
        name = "-".join(plain.name.split("-")[:2])
        info, file = f"{name}.dist-info", folder / "bare.zip"
        apart = {f"{info}/WHEEL": "", f"{info}/RECORD": ""}
        with ZipFile(plain) as source, ZipFile(file, "w", ZIP_DEFLATED) as to:
            for each in source.infolist():
                if each.filename in apart:
                    apart[each.filename] = source.read(each).decode()
                else:
                    to.writestr(each, source.read(each), ZIP_DEFLATED, 1)
        return cls(file, name, info, *apart.values())

    def with_library(self, library: Path, tag: str, folder: Path) -> Path:
        """A wheel that carries a library."""
        path = folder / f"{self.name}-py3-none-{tag}.whl"
        wheel = re.sub(r"(?m)^Tag: .*$", f"Tag: py3-none-{tag}", self.wheel)
        wheel = wheel.replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
        inside = build.CARRIED.relative_to(ROOT / "src").as_posix()
        added = {f"{inside}/{library.name}": library.read_bytes(), f"{self.info}/WHEEL": wheel.encode()}
        kept = [line for line in self.record.splitlines() if not line.startswith(f"{self.info}/WHEEL,")]
        record = "\n".join([*(recorded(*one) for one in added.items()), *kept]) + "\n"
        shutil.copy(self.file, path)
        with ZipFile(path, "a", ZIP_DEFLATED) as to:
            for name, content in (*added.items(), (f"{self.info}/RECORD", record.encode())):
                to.writestr(name, content)
        return path


def recorded(name: str, content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}"


def build_wheels(folder: Path, targets: Iterable[Target] = TARGETS) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    targets = list(targets)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(os.cpu_count()) as pool:
        libraries = pool.map(partial(compiled, folder=Path(scratch)), targets)
        bare = Bare.of(plain_wheel(Path(scratch)), Path(scratch))
        return [
            bare.with_library(library, target.tag, folder)
            for library, target in zip(libraries, targets, strict=True)
        ]


if __name__ == "__main__":
    for path in build_wheels(Path(sys.argv[1] if len(sys.argv) > 1 else "dist")):
        print(path)
