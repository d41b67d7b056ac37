"""What installs Outrider: bounds that were tested, a demo without the tests' tools, metadata, the container file."""

from __future__ import annotations

import re
import tomllib

from packaging.requirements import Requirement

from tests.lowest import lowest
from tests.test_structure import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_lower_bound_is_installed_by_the_lowest_check() -> None:
    extras = PROJECT["optional-dependencies"]
    asked = [Requirement(one) for one in PROJECT["dependencies"]]
    apart = ("gpu", "ray")  # of other machines; 2.60 is the version of Ray that was run
    asked += [Requirement(one) for name, some in extras.items() if name not in apart for one in some]
    pinned = lowest(PROJECT)
    for one in asked:
        bounds = [each.version for each in one.specifier if each.operator == ">="]
        if one.name not in ("outrider", "torch"):
            assert [pinned.get(one.name)] == bounds, one
    assert len(pinned) > 25 and all(re.fullmatch(r"[\d.]+", version) for version in pinned.values())


def test_the_demo_installs_no_tools_of_the_tests() -> None:
    rules = (ROOT / "Makefile").read_text()
    ready, installed = (rules.index(f"\n$({name}):") for name in ("READY", "INSTALLED"))
    assert "\ndemo: $(READY) ##" in rules and "\ninstall: $(INSTALLED) ##" in rules
    assert ".[serve]" in rules[ready:installed] and ".[dev]" not in rules[ready:installed]
    assert "--quiet -c" not in rules  # pip shows how far it is


def test_metadata_names_authors_and_no_home_that_is_not_there() -> None:
    assert PROJECT["authors"] == [{"name": "The Outrider developers"}]
    assert PROJECT["keywords"] and "Typing :: Typed" in PROJECT["classifiers"]
    assert "urls" not in PROJECT


def test_the_container_serves_without_rights_and_says_whether_it_is_well() -> None:
    lines = (ROOT / "deploy" / "Dockerfile").read_text().splitlines()
    words = [line.partition(" ")[0] for line in lines if line and not line.startswith("#")]
    assert words.index("USER") < words.index("ENTRYPOINT") and {"HEALTHCHECK", "VOLUME"} <= set(words)
    named = re.findall(r"OUTRIDER_\w+", "\n".join(lines))
    assert set(named) == {"OUTRIDER_API_KEYS", "OUTRIDER_CACHE"}
