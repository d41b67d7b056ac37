"""`outrider models`: nothing here downloads."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.load.find import ALIASES

from .conftest import Outrider


def test_an_empty_cache_lists_aliases_as_not_fetched(outrider: Outrider, empty_cache: Path) -> None:
    rows = outrider("models", "--json").rows
    assert [(row["name"], row["present"], row["path"]) for row in rows] == [
        (name, False, None) for name in ALIASES
    ]
    assert outrider("models").out.startswith("smollm2-135m\t98 MB\tnot fetched\t")


def test_files_in_the_cache_are_listed_and_found(outrider: Outrider, empty_cache: Path) -> None:
    file = empty_cache / "models" / "mine.gguf"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"GGUF")
    assert {"name": "mine", "bytes": 4, "present": True, "path": str(file)}.items() <= outrider(
        "models", "--json"
    ).rows[-1].items()
    assert outrider("models", "path", "mine").out == f"{file}\n"
    assert outrider("models", "pull", "mine").out == f"{file}\n"


def test_path_of_what_is_not_here(outrider: Outrider, empty_cache: Path) -> None:
    ran = outrider("models", "path", "smollm2-135m")
    assert (ran.code, ran.out) == (1, "") and "outrider models pull smollm2-135m" in ran.err


def test_pull_of_an_unknown_name_suggests(outrider: Outrider, empty_cache: Path) -> None:
    ran = outrider("models", "pull", "smolm2-135m")
    assert ran.code == 1 and ran.err.startswith("error: ") and "did you mean 'smollm2-135m'?" in ran.err


@pytest.mark.parametrize("args", [("models", "--json", "extra"), ("models", "pull")])
def test_bad_usage(outrider: Outrider, args: tuple[str, ...]) -> None:
    ran = outrider(*args)
    assert ran.code == 2 and ran.err.startswith("error: ")
