"""No command runs Python code that lies in the working directory."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from outrider.load import builtin
from tests.serve.conftest import Served, start_server, write_tiny

SOURCE = Path(builtin.__file__).parents[1]
PLANTED = (
    "torch",
    "json",
    "starlette",
    "sitecustomize",
    "uvicorn",
    "tokenizers",
    "pip",
    "llguidance",
    "jinja2",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in the folder that is the working directory, as after a download."""
    folder = tmp_path_factory.mktemp("downloaded") / "model"
    write_tiny(folder)
    for name in PLANTED:
        plant(folder, name)
    return folder


def plant(folder: Path, name: str) -> None:
    (folder / f"{name}.py").write_text(f"open({str(folder / 'was_run')!r}, 'a').write({name!r})\n")


def was_run(folder: Path) -> str:
    mark = folder / "was_run"
    return mark.read_text() if mark.exists() else ""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an installer writes for `outrider`."""
    file = tmp_path_factory.mktemp("bin") / "outrider"
    file.write_text("import sys\nfrom outrider.cli.main import run\nsys.exit(run())\n")
    return file


COMMANDS = [["--help"], ["models"], ["doctor"], ["generate", ".", "a", "--max-tokens", "2"]]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_commands_run_nothing_of_the_working_directory(model: Path, script: Path, command: list[str]) -> None:
    plant(model, "outrider")
    done = subprocess.run([sys.executable, str(script), *command], cwd=model, capture_output=True, text=True)
    assert done.stdout and "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 0 or command == ["doctor"]  # which may find something to complain about
    assert not was_run(model)


def test_the_server_runs_nothing_of_the_working_directory(model: Path, script: Path) -> None:
    """Nor does its engine, nor whoever compiles its grammars."""
    plant(model, "outrider")
    served = start_server(".", command=[sys.executable, str(script)], cwd=model)
    try:
        assert answer(served).status_code == 200
    finally:
        assert served.stop() == 0
    assert not was_run(model)


def answer(served: Served) -> httpx.Response:
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "boolean"}}}
    return served.post("/v1/chat/completions", {**chat, "response_format": form})


def test_python_m_outrider_leaves_the_working_directory_out(model: Path) -> None:
    """Python itself looks there for `outrider`, before any line of ours; from then on nobody does."""
    (model / "outrider.py").unlink(missing_ok=True)
    command = [sys.executable, "-m", "outrider", "models"]
    done = subprocess.run(command, cwd=model, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not was_run(model)


def test_every_python_that_is_started_has_a_safe_path() -> None:
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.List, ast.Tuple)):
                words = [ast.unparse(item) for item in node.elts]
                assert "sys.executable" not in words or words[words.index("sys.executable") + 1] == "'-P'", (
                    file
                )
