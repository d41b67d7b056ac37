"""Wheels that carry the C kernels: each for its machine, and this machine's used without a compiler."""

from __future__ import annotations

import platform
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from deploy.wheels import TARGETS, Target, build_wheels, compiler

from outrider.model.kernels import build
from outrider.settings import cache_folder
from tests.model.families import NEEDS_COMPILER

# Where a library says its machine: the first bytes, then the number's place and format.
ELF, MACH, PE = b"\x7fELF", struct.pack("<I", 0xFEEDFACF), b"MZ"
HEADERS = {
    ("linux", "x86_64"): (ELF, 18, "<H", 0x3E),
    ("linux", "aarch64"): (ELF, 18, "<H", 0xB7),
    ("darwin", "aarch64"): (MACH, 4, "<I", 0x0100000C),
    ("darwin", "x86_64"): (MACH, 4, "<I", 0x01000007),
    ("win32", "x86_64"): (PE, None, "<H", 0x8664),
}


def carried(wheel: Path) -> tuple[str, bytes]:
    with ZipFile(wheel) as opened:
        (name,) = (name for name in opened.namelist() if "/carried/" in name)
        return name, opened.read(name)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.triple)
def test_the_kernels_compile_for_every_system(target: Target, tmp_path: Path) -> None:
    """Unoptimised and not linked: a tenth of what its wheel takes. Unoptimised code would get checks for undefined
    behaviour, which a wheel's has not and which take as long again.
    """
    pytest.importorskip("ziglang", reason="no cross-compiler: pip install ziglang")
    for source in build.SOURCES:
        changes = ("-O0", "-fno-sanitize=undefined", "-c")
        command = [*compiler(target), *build.FLAGS, *changes, str(source), "-o", f"{source.stem}.o"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and (tmp_path / f"{source.stem}.o").stat().st_size, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_wheels_for_every_system(tmp_path: Path) -> None:
    """One test, as several would build them in several processes."""
    pytest.importorskip("ziglang", reason="no cross-compiler: pip install ziglang")
    wheels = dict(zip(TARGETS, build_wheels(tmp_path / "wheels"), strict=True))
    each_carries_a_library_for_its_machine(wheels)
    each_says_what_it_is_and_what_it_holds(wheels)
    the_one_of_this_machine_needs_no_compiler(wheels, tmp_path)


def each_carries_a_library_for_its_machine(wheels: dict[Target, Path]) -> None:
    for target, wheel in wheels.items():
        name, library = carried(wheel)
        assert name == f"outrider/model/kernels/carried/{target.library}"
        first, at, form, machine = HEADERS[target.system, target.machine]
        # Windows' header says where the one with the machine begins.
        at = struct.unpack_from("<I", library, 0x3C)[0] + 4 if at is None else at
        assert library.startswith(first) and struct.unpack_from(form, library, at) == (machine,), target
        assert b"outrider_layers\0" in library and b"outrider_chosen\0" in library, target
        if target.system == "linux":
            versions = [int(found) for found in re.findall(rb"GLIBC_2\.(\d+)", library)]
            assert versions and max(versions) <= 17, versions


def each_says_what_it_is_and_what_it_holds(wheels: dict[Target, Path]) -> None:
    for target, wheel in wheels.items():
        assert wheel.name.endswith(f"-py3-none-{target.tag}.whl")
        with ZipFile(wheel) as opened:
            names = opened.namelist()
            info = next(name.partition("/")[0] for name in names if ".dist-info/" in name)
            said = opened.read(f"{info}/WHEEL").decode()
            recorded = [
                line.partition(",")[0] for line in opened.read(f"{info}/RECORD").decode().splitlines()
            ]
        assert f"Tag: py3-none-{target.tag}\n" in said and "Root-Is-Purelib: false" in said
        assert sorted(recorded) == sorted(names), "pip removes what is recorded"


def the_one_of_this_machine_needs_no_compiler(wheels: dict[Target, Path], tmp_path: Path) -> None:
    fits = {target.library: wheel for target, wheel in wheels.items()}
    wheel = fits.get(build.carried_name(sys.platform, platform.machine().lower()))
    if wheel is None:
        pytest.skip("no wheel for this machine")
    pytest.importorskip("pip")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    python = tmp_path / "env" / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    script = (
        "import ctypes; from pathlib import Path; from outrider.model.kernels.build import library\n"
        f"lib = library(Path({str(tmp_path / 'cache')!r})); lib.outrider_chosen.restype = ctypes.c_char_p\n"
        "print(lib._name, lib.outrider_chosen().decode())"
    )
    environment = {"PATH": str(tmp_path), "SYSTEMROOT": ""}
    done = subprocess.run(
        [python, "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    name, variant = done.stdout.split()
    assert Path(name).is_relative_to(tmp_path / "env") and variant
    assert not (tmp_path / "cache").exists(), "nothing was built"


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the package would carry the library of this machine."""
    monkeypatch.setattr(build, "CARRIED", tmp_path)
    monkeypatch.setattr(build, "library", build.library.__wrapped__)  # which keeps what it loaded
    return tmp_path / build.carried_name(sys.platform, platform.machine().lower())


def test_a_library_of_other_sources_or_machines_is_not_taken(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build.carried() is None
    place.touch()
    if platform.machine() not in ("x86_64", "AMD64"):
        assert build.carried() == place
    monkeypatch.setattr(build, "FLAGS", [*build.FLAGS, "-DOTHER"])
    assert build.carried() is None


@pytest.mark.skipif(sys.platform != "linux", reason="fakes what Linux says of a processor")
def test_a_library_for_x86_needs_avx2(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    (place.parent / build.carried_name("linux", "x86_64")).touch()
    for flags, taken in (("flags : sse2 avx2 fma", True), ("flags : sse2 avx", False)):
        monkeypatch.setattr(build, "_processor", lambda flags=flags: flags)
        assert (build.carried() is not None) is taken


@NEEDS_COMPILER
def test_a_damaged_library_is_built_instead(place: Path) -> None:
    kernel_folder = cache_folder() / "kernels"
    good = build.library(kernel_folder)._name
    place.write_bytes(b"nonsense")
    assert build.library(kernel_folder)._name == good
    shutil.copy(good, place)
    assert build.library(kernel_folder)._name == str(build.carried() or good)
