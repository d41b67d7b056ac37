"""Prints the oldest versions that pyproject.toml allows, as constraints for pip: what `make test-lowest` installs.

Every `name>=version` becomes `name==version`. torch is left out, as its oldest versions have no build for CPUs on
some indexes; the Makefile names the one to take. So is the extra `gpu`: `dev` has a triton of its own.
"""

import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parent.parent / "pyproject.toml"
LEFT_OUT = {"torch"}
BOUND = re.compile(r"([\w-]+)>=([\w.]+)")


def lowest(project: dict) -> dict[str, str]:
    extras = project["optional-dependencies"]
    asked = [
        *project["dependencies"],
        *(one for name, some in extras.items() if name != "gpu" for one in some),
    ]
    found = (BOUND.match(one) for one in asked)
    return {match[1]: match[2] for match in found if match and match[1] not in LEFT_OUT}


if __name__ == "__main__":
    for name, version in lowest(tomllib.loads(PROJECT.read_text())["project"]).items():
        print(f"{name}=={version}")
