"""The planner's tuned numbers: few, in one file, each with the measurement or derivation that set it."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path

from outrider.control import guards
from outrider.control.guards import Guards
from outrider.control.reasons import KINDS
from outrider.engine.build import guards_of
from outrider.settings import Settings

FOLDER = Path(guards.__file__).parent
MOST = 25
# A tuned number says where it comes from: a log entry, or the quantities that it follows from.
SOURCE = re.compile(r"log/\d{3}|: the longest captured chain|: half of|: a\n?.*bound on p99|Set per device")
# Limits of an array or a float, draft shapes, and the statistics of advice (expected.py) are not tuned.
NOT_TUNED = {
    "acceptance.py": {"LEAST"},
    "candidates.py": {"NOT_ALLOWED"},
    "expected.py": {"SAMPLES", "SHARE", "TAIL", "NEVER"},
    "planner.py": {"PROBE_TREE"},
    "prefill.py": {"MAX_PROMPT_ROWS", "MOST_EAGER_ROWS"},
    "trees.py": {"CHAINS", "TREES", "RATES"},
}
# Not tuned for speed, but they count: the default of a request, and the steps between two reports.
ELSEWHERE = {"candidates.py": {"ASKED_DEPTH"}, "history.py": {"REPORT_STEPS"}}


def numbers_of(file: Path) -> dict[str, int]:
    """Numeric module constants of a file, and the line of each."""
    found = {}
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and any(_is_number(part) for part in ast.walk(node.value)):
            for target in node.targets:
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                found |= {
                    name.id: node.lineno for name in names if isinstance(name, ast.Name) and name.id.isupper()
                }
    return found


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def tuned() -> dict[str, int]:
    """Numbers of guards.py: constants, and defaults of `Guards` that no setting gives."""
    settable = {"max_batch", "max_depth", "max_temperature", "objective", "prefill_slowdown", "prefill_wait"}
    (made,) = (
        node for node in ast.parse(Path(guards.__file__).read_text()).body if isinstance(node, ast.ClassDef)
    )
    lines = {
        node.target.id: node.lineno
        for node in made.body
        if isinstance(node, ast.AnnAssign) and node.value is not None and isinstance(node.target, ast.Name)
    }
    assert settable <= lines.keys() == {field.name for field in fields(Guards)}
    return numbers_of(Path(guards.__file__)) | {
        name: at for name, at in lines.items() if name not in settable
    }


def test_tuned_numbers_are_few_and_in_one_file() -> None:
    count = len(tuned())
    for file in FOLDER.glob("*.py"):
        if file.name != "guards.py":
            found = numbers_of(file).keys() - NOT_TUNED.get(file.name, set())
            assert found == ELSEWHERE.get(file.name, set()), file.name
            count += len(found)
    assert 10 < count <= MOST


def test_each_tuned_number_names_its_measurement_or_derivation() -> None:
    lines = Path(guards.__file__).read_text().splitlines()
    for name, at in tuned().items():
        first, last = at - 1, at - 1
        while lines[first - 1].strip().startswith("#"):
            first -= 1
        while lines[last].endswith("("):  # the value and its comment stand on the next lines
            last += 1
        assert SOURCE.search("\n".join(lines[first : last + 2])), name


def test_settings_reach_the_guards() -> None:
    made = guards_of(
        Settings(draft_max_batch=3, draft_max_depth=4, draft_max_temperature=0.5, objective="latency")
    )
    assert made == Guards(3, 4, 0.5, "latency")


def test_the_documents_list_every_reason() -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    table = text.split("| reason | meaning |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `([\w -]+)` \|", table, re.MULTILINE) == list(KINDS)
