"""`outrider help`: commands and words, from an installed package as well as from a clone."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata

import pytest

from outrider.cli.help import glossary
from outrider.errors import install
from tests.test_structure import ROOT, SOURCE

from .conftest import Outrider


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("coupled", "coupled: verification that gives the tokens of plain decoding"),
        ("Acceptance rate", "Acceptance rate: accepted over drafted tokens"),
        ("TTFT", "TTFT: from the request to its first token"),
        ("cache_salt", "cache_salt: who shares"),
        ("draft", "The command: outrider draft --help"),
        ("bench serve", "Usage: outrider bench serve [OPTIONS]"),
        ("models rm", "Usage: outrider models rm [OPTIONS]"),
        ("", "Usage: outrider [OPTIONS] COMMAND"),
    ],
)
def test_words_and_commands(outrider: Outrider, asked: str, says: str) -> None:
    ran = outrider("help", *asked.split())
    assert ran.code == 0 and says in ran.out and "](" not in ran.out


def test_an_unknown_word_suggests(outrider: Outrider) -> None:
    ran = outrider("help", "acceptence", "rate")
    assert ran.code == 2 and "did you mean 'acceptance rate'?" in ran.err


def test_every_word_of_the_glossary_is_found_and_is_installed() -> None:
    known = glossary()
    assert len(known) > 80 and "word" not in known and not any("|" in text for text in known.values())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "glossary.md" in project["tool"]["setuptools"]["package-data"]["outrider"]


def test_what_is_printed_names_no_file_that_only_a_clone_has() -> None:
    for file in (SOURCE / "cli").glob("*.py"):
        code = re.sub(r'\A""".*?"""', "", file.read_text(), flags=re.DOTALL)
        assert not re.search(r"\bdocs/\w+\.md|\ba clone\b", code), file


def test_how_to_install_an_extra_names_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ["torch>=2", "a>=1; extra == 'one'", "outrider[one]; extra == 'two'", 'b<2,>=1; extra == "two"']
    monkeypatch.setattr(metadata, "requires", lambda _: needs)
    assert install("two") == "pip install 'a>=1' 'b<2,>=1'"

    def nothing(_: str) -> None:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "requires", nothing)
    assert install("two") == "install Outrider with its extra 'two'"
