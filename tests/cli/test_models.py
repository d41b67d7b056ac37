"""`outrider models`: nothing here downloads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from outrider.cli.models import memory_needed
from outrider.load.aliases import ALIASES
from outrider.load.families import FAMILIES
from outrider.load.find import list_models
from outrider.load.progress import file_size
from tests.test_structure import ROOT

from .conftest import Outrider


def test_an_empty_cache_lists_aliases_as_not_fetched(outrider: Outrider, empty_cache: Path) -> None:
    rows = outrider("models", "--json").rows
    assert [(row["name"], row["present"], row["path"]) for row in rows] == [
        (name, False, None) for name in ALIASES
    ]
    first, *others = outrider("models").out.splitlines()
    assert first.split("\t")[:4] == ["smollm2-135m", "135M", "98 MB", "1.8 GB"] and len(others) >= 10
    assert first.split("\t")[5:7] == ["yes", ""]  # a head comes with Outrider; nothing is on disk


def test_what_fits_depends_on_the_memory_that_is_free(
    outrider: Outrider, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = {entry.name: memory_needed(entry) for entry in list_models(empty_cache)}
    monkeypatch.setattr("outrider.cli.models.free_memory", lambda: needed["qwen3-4b"])
    rows = {row["name"]: row for row in outrider("models", "--json").rows}
    assert (
        {name for name, row in rows.items() if not row["fits"]}
        == {name for name in needed if needed[name] > needed["qwen3-4b"]}
        >= {"qwen3-8b", "llama-3.1-8b"}
    )
    assert rows["qwen3-4b"]["hub"] == "Qwen/Qwen3-4B-GGUF:Qwen3-4B-Q4_K_M.gguf"
    monkeypatch.setattr("outrider.cli.models.free_memory", lambda: None)
    assert {row["fits"] for row in outrider("models", "--json").rows} == {None}


def test_the_document_has_every_row(empty_cache: Path) -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    for entry in list_models(empty_cache):
        sizes = f"{file_size(entry.bytes)} | {file_size(memory_needed(entry))} |"
        assert re.search(
            rf"^\| `{re.escape(entry.name)}` \| .* \| {re.escape(sizes)}$", page, re.MULTILINE
        ), entry.name


@pytest.mark.parametrize("width", [80, 132])
def test_the_table_fits_a_terminal(
    outrider: Outrider, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", outrider("models").out).splitlines()
    assert lines[0].split() == ["name", "params", "download", "memory", "fits", "head", "on", "disk"]
    assert [line.split()[0] for line in lines[1 : 1 + len(ALIASES)]] == list(ALIASES)
    assert max(map(len, lines)) <= width and "outrider models families" in " ".join(lines)


def test_families_and_what_works_for_each(outrider: Outrider) -> None:
    """From the table that the decoder is made by; the document names the same."""
    rows = {row["family"]: row for row in outrider("models", "families", "--json").rows}
    assert list(rows) == list(FAMILIES)
    assert rows["granite"] == {
        "family": "granite", "cpu": "yes", "gguf": "granite", "quantised": "yes", "heads": "yes", "gpu": "yes",
    }  # fmt: skip
    assert rows["gemma2"]["gpu"] == "no: soft-capped scores" and rows["olmoe"]["gpu"] == "yes, on one GPU"
    ran = outrider("models", "families")
    assert [line.split("\t")[0] for line in ran.out.splitlines()] == ["family", *FAMILIES]
    assert "other model_types run through transformers" in ran.err
    table = (
        (ROOT / "docs" / "models.md").read_text().partition("## Families")[2].partition("## Fewer bits")[0]
    )
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    for name in FAMILIES:
        [line] = [line for line in lines if f"`{name}`" in line.split("|")[1]]
        assert (f"`{FAMILIES[name].gguf}`" if FAMILIES[name].gguf else "no") in line.split("|")[3]
        assert line.split("|")[4].strip() == rows[name]["gpu"]


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


@pytest.mark.parametrize(
    ("args", "near"),
    [
        (("models", "pull", "smolm2-135m"), "'smollm2-135m'?"),
        (("models", "path", "qwen3:8b"), "'qwen3-8b'?"),
        (("generate", "llama3.2"), "'llama-3.2-1b' or 'llama-3.2-3b'?"),
        (("chat", "gemma3"), "'gemma-3-1b'?"),
    ],
)
def test_an_unknown_name_suggests_near_ones(
    outrider: Outrider, empty_cache: Path, args: tuple[str, ...], near: str
) -> None:
    ran = outrider(*args)
    assert ran.code == 1 and ran.err.startswith("error: ") and f"did you mean {near}" in ran.err


@pytest.mark.parametrize("args", [("models", "--json", "extra"), ("models", "pull")])
def test_bad_usage(outrider: Outrider, args: tuple[str, ...]) -> None:
    ran = outrider(*args)
    assert ran.code == 2 and ran.err.startswith("error: ")


# ------------------------------------------------------------------------------------------------ deleting


@pytest.fixture
def full_cache(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The built-in model by its size, a file of the user's own, and a repository of the hub."""
    place = ALIASES["smollm2-135m"].place(empty_cache)
    place.parent.mkdir(parents=True)
    with place.open("wb") as file:
        file.truncate(ALIASES["smollm2-135m"].bytes)
    (place.parent / "mine.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv("HF_HUB_CACHE", str(empty_cache / "hub"))
    repo = empty_cache / "hub" / "models--org--name"
    (repo / "blobs").mkdir(parents=True)
    (repo / "blobs" / "0f").write_bytes(b"0" * 3_000_000)
    (repo / "snapshots" / "1").mkdir(parents=True)
    (repo / "snapshots" / "1" / "model.safetensors").symlink_to(repo / "blobs" / "0f")
    return empty_cache


@pytest.mark.parametrize(
    ("name", "size", "gone"),
    [
        ("smollm2-135m", "98 MB", "models/SmolLM2-135M-Instruct.Q4_1.gguf"),
        ("org/name", "3 MB", "hub/models--org--name"),
    ],
)
def test_a_fetched_model_is_deleted(
    outrider: Outrider, full_cache: Path, name: str, size: str, gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = outrider("models", "rm", name)
    assert ran.code == 2 and "--yes" in ran.err and (full_cache / gone).exists()
    asked: list[str] = []
    monkeypatch.setattr("outrider.cli.models._agreed", lambda question: bool(asked.append(question)))
    ran = outrider("models", "rm", name)
    assert (ran.code, ran.err) == (1, "nothing was deleted\n") and (full_cache / gone).exists()
    assert asked == [f"Delete {name} ({size}) in {full_cache / gone}?"]
    ran = outrider("models", "rm", name, "--yes")
    assert (ran.code, ran.out, ran.err) == (0, "", f"deleted {name}: {size} freed\n")
    assert not (full_cache / gone).exists() and (full_cache / "models" / "mine.gguf").exists()
    assert "is not on this machine" in outrider("models", "rm", name, "--yes").err


def test_what_the_user_put_there_is_not_deleted(
    outrider: Outrider, full_cache: Path, tiny_folder: Path
) -> None:
    for name in ("mine", tiny_folder, full_cache / "models" / "mine.gguf"):
        ran = outrider("models", "remove", name, "--yes")
        assert ran.code == 2 and "was not fetched by Outrider" in ran.err
    assert (full_cache / "models" / "mine.gguf").exists() and any(tiny_folder.iterdir())


def test_a_list_by_its_name_and_json_in_its_place(outrider: Outrider, empty_cache: Path) -> None:
    for group in ("models", "pairs"):
        assert outrider(group, "list").out == outrider(group).out
        assert outrider(group, "list", "--json").out == outrider(group, "--json").out
        ran = outrider(group, "--json", "show", "x")
        assert ran.code == 2 and f"write outrider {group} show --json" in ran.err


@pytest.mark.model
def test_the_built_in_model_has_one_size(outrider: Outrider) -> None:
    size = file_size(ALIASES["smollm2-135m"].bytes)
    assert size == "98 MB"
    for words in (("models",), ("models", "show"), ("doctor",)):
        assert size in outrider(*words).out
    for page in ("README.md", "docs/start.md", "docs/models.md"):
        assert {*re.findall(r"\b9\d(?:\.\d)? Mi?B\b", (ROOT / page).read_text())} <= {size}
