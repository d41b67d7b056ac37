"""Every shell and Python block of the documents is run, in the order of its page; see tests/shell.py.

A block that cannot be run here has `<!-- not run: REASON -->` on the line above it. One that begins with
`# file: NAME` is written to that file as well, for the blocks after it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from outrider import LLM
from tests.serve.conftest import Served, start_server, write_tiny
from tests.shell import MODEL, TOKENS, Shell, check_pip, shorter
from tests.test_structure import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN = ("sh", "python")
REASONS = {"needs a GPU", "needs root", "needs another model", "takes minutes"}
MOST_NOT_RUN = 8
URL = "http://127.0.0.1:8000"

BLOCK = re.compile(r"^(?:<!-- not run: (.+?) -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    line: int
    language: str
    text: str
    reason: str = ""  # why it is not run
    file: str = ""  # where it is written


def blocks_of(text: str) -> list[Block]:
    found = []
    for match in BLOCK.finditer(text):
        reason, language, body = match.groups()
        line = text.count("\n", 0, match.start(3)) + 1
        file = re.match(r"# file: (\S+)\n", body)
        found.append(Block(line, language, body, reason or "", file[1] if file else ""))
    return found


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documents") / "tiny"
    write_tiny(folder)
    return folder


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[Served]:
    """One for all pages, by the name that they ask for."""
    served = start_server(tiny, "--served-name", MODEL, "--batch-folder", str(tiny.parent / "kept"))
    yield served
    assert served.stop() == 0


@pytest.fixture
def shell(tmp_path: Path, tiny: Path, llm: LLM) -> Shell:
    return Shell(tmp_path, tiny, llm)


def run_page(page: Path, shell: Shell, url: str) -> list[str]:
    """What went wrong, block by block."""
    wrong = []
    for block in blocks_of(page.read_text()):
        if block.file:
            (shell.folder / block.file).write_text(block.text)
        if block.language not in RUN or block.reason:
            continue
        text = block.text.replace(URL, url)
        try:
            if block.language == "python":
                shell.python(text)
            elif (ended := shell.sh(text)).code:
                raise AssertionError(f"exit code {ended.code}\n{ended.out}{ended.err}")
        except Exception as error:
            wrong.append(f"{page.name}:{block.line}: {type(error).__name__}: {error}\n{text}")
    return wrong


@pytest.mark.model
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_runs(page: Path, request: pytest.FixtureRequest) -> None:
    if not any(block.language in RUN and not block.reason for block in blocks_of(page.read_text())):
        return
    url = request.getfixturevalue("server").url if URL in page.read_text() else ""
    shell: Shell = request.getfixturevalue("shell")
    wrong = run_page(page, shell, url)
    assert not wrong, "\n".join(wrong)
    if page.name == "drafters.md":
        its_drafter_is_right_often_enough("".join(shell.printed))


@pytest.mark.model
@pytest.mark.parametrize("script", ["generate.py", "batch.py", "chat.py", "stream.py"])
def test_examples_without_a_server_run(script: str, shell: Shell) -> None:
    ended = shell.sh(f"python examples/{script}")
    assert ended.code == 0, ended.err
    assert ended.out


@pytest.mark.model
def test_the_notebook_runs(shell: Shell) -> None:
    printed = shell.notebook(ROOT / "examples" / "outrider.ipynb")
    assert "the same tokens: True" in printed
    drafted, plain = map(int, re.findall(r"steps: (\d+) with speculation, (\d+) without", printed)[0])
    assert drafted < plain


def its_drafter_is_right_often_enough(printed: str) -> None:
    """The page's figures are of an LLM of its own, so that no text of other tests is in its table."""
    (fewer, tokens, _), (steps, same, _) = re.findall(r"(\d+) steps for (\d+) tokens; (\d+) draft", printed)
    assert int(fewer) < int(steps) == int(tokens) == int(same)


@pytest.mark.model
def test_the_curl_example_runs_where_there_is_no_curl(shell: Shell, server: Served) -> None:
    ended = shell.sh(f"sh examples/curl.sh {server.url}")
    assert ended.code == 0, ended.out + ended.err
    assert "data: [DONE]" in ended.out
    assert "outrider:spec_decode_num_drafts_total" in ended.out


SECTIONS = {
    "Chat": "chat/completions",
    "Completions": "completions",
    "Responses": "responses",
    "Messages": "messages",
}


def bodies(page: Path) -> Iterator[tuple[str, dict]]:
    """Requests that stand in JSON on a page, with the route that their section is about; else it is chat's."""
    for section in re.split(r"^(?=#+ )", page.read_text(), flags=re.MULTILINE):
        route = SECTIONS.get(section.partition("\n")[0].strip("# "), "chat/completions")
        for block in blocks_of(section):
            body = json.loads(block.text) if block.language == "json" else {"error": None}
            if not body.keys() & {"error", "draft"}:  # which are parts of answers
                yield f"/v1/{route}", body


def test_requests_that_are_shown_are_answered(server: Served) -> None:
    asked = list(bodies(ROOT / "docs" / "serving.md"))
    assert len(asked) > 6
    for route, body in asked:
        length = "max_output_tokens" if route.endswith("responses") else "max_tokens"
        answer = server.post(route, {**body, length: min(body.get(length, TOKENS), TOKENS)})
        assert answer.status_code == 200, f"{route} {body}: {answer.text}"


def test_only_few_blocks_are_not_run_and_they_say_why() -> None:
    not_run = [(page.name, block) for page in PAGES for block in blocks_of(page.read_text()) if block.reason]
    assert {block.reason for _, block in not_run} <= REASONS
    assert len(not_run) <= MOST_NOT_RUN
    comments = sum(len(re.findall(r"^<!-- not run", page.read_text(), re.MULTILINE)) for page in PAGES)
    assert comments == len(not_run), "a comment that stands before no block"


def test_every_fence_is_read() -> None:
    """A block whose fence is indented or unclosed would be left out in silence."""
    for page in PAGES:
        assert page.read_text().count("```") == 2 * len(blocks_of(page.read_text())), page.name


# ------------------------------------------------------------------------------------- the check checked


@pytest.mark.model
@pytest.mark.parametrize(
    ("language", "text", "complaint"),
    [
        ("sh", "outrider generate smollm2-135m hello --temprature 0", "temperature"),
        ("sh", "outrider generate nosuchmodel hello", "nosuchmodel"),
        ("sh", "outrider generate smollm2-135m --prompts nowhere.jsonl | cat", "nowhere.jsonl"),
        ("sh", "outrider serve --config nowhere.toml", "nowhere.toml"),
        ("sh", "pip install 'outrider[serve]'", "published"),
        ("sh", "pip install -e '.[server]'", "server"),
        ("sh", "make deploy", "deploy"),
        ("sh", f"curl {URL}/v1/nothing", "nothing"),
        ("sh", f"curl {URL}/tokenize -H 'Content-Type: text/plain' -d '{{}}'", "application/json"),
        ("sh", "nosuchcommand", "not found"),
        ("python", "print(no_such_name)", "no_such_name"),
        (
            "python",
            "from outrider import LLM\nLLM('smollm2-135m').generate('x', temprature=1)",
            "temperature",
        ),
    ],
)
def test_what_is_wrong_is_seen(
    language: str, text: str, complaint: str, tmp_path: Path, shell: Shell, server: Served
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"Words.\n\n```{language}\n{text}\n```\n")
    wrong = run_page(page, shell, server.url)
    assert len(wrong) == 1
    assert complaint in wrong[0]


def test_blocks_are_read_with_what_stands_above_them() -> None:
    text = "a\n```sh\nx\n```\n<!-- not run: needs root -->\n```sh\ny\nz\n```\n```python\n# file: a.py\n```\n"
    assert blocks_of(text) == [
        Block(3, "sh", "x\n"),
        Block(7, "sh", "y\nz\n", reason="needs root"),
        Block(11, "python", "# file: a.py\n", file="a.py"),
    ]


def test_commands_are_cut_down() -> None:
    words = ["audit", "m", "--million", "--max-tokens", "128", "--limit", "1", "--seed", "99"]
    cut = ["audit", "m", "--tokens", "300", "--max-tokens", "8", "--limit", "1", "--seed", "99"]
    assert shorter(words) == cut
    assert check_pip(["install", "torch==2.13.0", "-e", ".[serve,hf]"]) == 0


# ------------------------------------------------------------------------------------ flags and variables

FOREIGN = {"--now", "--shell", "--home-dir", "--lf", "--strict"}  # of other people's commands


def known_flags() -> set[str]:
    """Of every command, of other engines where they are understood, and of the scripts in bench/ and deploy/."""
    from typer.main import get_command

    from outrider.cli.coming_from import FLAGS
    from outrider.cli.main import make_app

    found, commands = set(FLAGS), [get_command(make_app())]
    while commands:
        command = commands.pop()
        commands += getattr(command, "commands", {}).values()
        found |= {
            "--help",
            "--help-all",
            *(flag for p in command.params for flag in (*p.opts, *p.secondary_opts)),
        }
    for script in (*(ROOT / "bench").rglob("*.py"), *(ROOT / "deploy").rglob("*.py")):
        found |= set(re.findall(r'"(--[a-z-]+)"', script.read_text()))
    return found


def test_flags_and_variables_that_are_named_exist() -> None:
    flags = known_flags()
    variables = {f"OUTRIDER_{flag.lstrip('-').upper().replace('-', '_')}" for flag in flags}
    plural = {f"{variable}S" for variable in variables}  # flags that can be repeated
    known = (
        variables
        | plural
        | {f"OUTRIDER_{name}" for name in ("CACHE", "CONFIG", "COSTS", "DEBUG", "KEY_FILE", "PAIRS")}
    )
    for page in PAGES:
        text = page.read_text()
        if page.name == "coming-from.md":
            text = re.sub(r"^\| .*?\|", "|", text, flags=re.MULTILINE)  # the first column is the others'
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
        assert named <= flags | FOREIGN, f"{page.name}: {sorted(named - flags - FOREIGN)}"
        said = set(re.findall(r"OUTRIDER_[A-Z_]+", text))
        assert said <= known, f"{page.name}: {sorted(said - known)}"
