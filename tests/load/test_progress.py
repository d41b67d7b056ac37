"""The bar of a download or of loading: bytes and seconds on a terminal, at most a line elsewhere."""

from __future__ import annotations

import pytest

from outrider.load import progress
from outrider.load.progress import CLEAR, bar, download_shown


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock: its last number is what it shows."""
    at = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: at[-1])
    monkeypatch.setenv("COLUMNS", "200")
    return at


def test_a_bar_shows_bytes_and_seconds(seconds: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with bar("loading a model") as shown:
        assert capsys.readouterr().err == "", "nothing before there is something to show"
        for passed, done in ((0.5, 250), (0.55, 300), (1.0, 500), (2.0, 1000)):
            seconds.append(100 + passed)
            shown(done * 10**6, 10**9)
        written = capsys.readouterr().err
    lines = [line.removesuffix(CLEAR) for line in written.split("\r")[1:]]
    assert lines == [
        f"loading a model: 250 MB of 1.0 GB, 0.5 s, 500 MB/s [{'#' * 7:30}]",
        f"loading a model: 500 MB of 1.0 GB, 1.0 s, 500 MB/s [{'#' * 15:30}]",  # not so soon after the first
        f"loading a model: 1.0 GB of 1.0 GB, 2.0 s, 500 MB/s [{'#' * 30}]",
    ]
    assert capsys.readouterr().err == "\n"


def test_a_transient_bar_is_wiped_and_fits_its_terminal(
    seconds: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for columns in (60, 20):
        monkeypatch.setenv("COLUMNS", str(columns))
        with bar("loading a model", transient=True) as shown:
            seconds.append(seconds[-1] + 1)
            shown(4 * 10**8, 10**9)
        line, wiped = capsys.readouterr().err.split("\r")[1:]
        line = line.removesuffix(CLEAR)
        assert len(line) <= columns - 1 and wiped == CLEAR, line


def test_without_a_terminal_a_download_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with download_shown("a model", 98 * 10**6) as shown:
        shown(10**6)
    assert capsys.readouterr().err == "fetching a model (98 MB)\n"
