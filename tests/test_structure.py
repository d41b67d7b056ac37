"""The shape of the project: who may import whom, and whether the documents say what is so."""

from __future__ import annotations

import ast
import html
import importlib
import io
import re
import shlex
import subprocess
import tokenize
import typing
from collections.abc import Container, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from outrider.cli.main import make_app

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "outrider"
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "LOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
LOG = sorted((ROOT / "log").glob("*.md"))
FOLDED = {*range(18, 41), 55, 57, 61, 62, 65, 67, 70}  # into 016, 017, 058, 059 and 060

# From the top down. The face is outrider/__init__.py, which shows users what the rows beneath it hold.
ROWS = [
    {"__main__"},
    {"cli"},
    {"serve", "bench", "distill"},
    {"face"},
    {"engine"},
    {"draft"},
    {"device"},
    {"model"},
    {"load", "cache", "verify", "control", "settings"},
    {"types"},
    {"sampling_params"},
    {"fields"},
    {"errors", "wrap"},
]
HEIGHT = {part: -i for i, row in enumerate(ROWS) for part in row}


# ---------------------------------------------------------------------------------------------- imports


def part_of(module: str) -> str:
    """`outrider.load.find` -> `load`."""
    pieces = module.split(".")
    return pieces[1] if len(pieces) > 1 else "face"


parsed = cache(ast.parse)  # several checks read every file of the source
nodes = cache(lambda code: list(ast.walk(parsed(code))))
make_command = cache(lambda: get_command(make_app()))


def imported(code: str, package: str, known: Container[str] = ()) -> Iterator[str]:
    """Every module of Outrider that `code`, a file of `package`, imports, wherever in it that is. Names that are
    imported from a folder may be `known` as modules.
    """
    for node in nodes(code):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "outrider")
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                module = ".".join([*above, *filter(None, [module])])
            if module == "outrider":  # `from outrider import load` is the folder, `import LLM` the face
                yield from (f"outrider.{a.name}" if a.name in HEIGHT else "outrider" for a in node.names)
            elif module.startswith("outrider."):
                names = (f"{module}.{alias.name}" for alias in node.names)
                yield from (name if name in known else module for name in names)


def violations(code: str, module: str, package: str) -> list[str]:
    own = part_of(module)
    assert own in HEIGHT, f"{module} is in no row"
    bad = []
    for name in imported(code, package):
        part = part_of(name)
        if part != own and not HEIGHT.get(part, 1) < HEIGHT[own]:
            bad.append(f"{module} ({own}) imports {name} ({part})")
    return bad


def modules() -> list[tuple[str, str, Path]]:
    """Module name, the package its relative imports start from, file."""
    found = []
    for file in sorted(SOURCE.rglob("*.py")):
        pieces = ["outrider", *file.relative_to(SOURCE).with_suffix("").parts]
        package = ".".join(pieces[:-1])
        found.append((package if pieces[-1] == "__init__" else ".".join(pieces), package, file))
    return found


def test_imports_go_down() -> None:
    bad = [line for name, package, file in modules() for line in violations(file.read_text(), name, package)]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("outrider.model.decoder", "from outrider.engine.engine import Engine"),
        ("outrider.model.decoder", "import outrider.engine.engine"),
        ("outrider.model.decoder", "from outrider import LLM"),
        ("outrider.model.decoder", "from outrider import engine"),
        ("outrider.model.decoder", "def f():\n    from outrider.draft.drafter import Drafter"),
        ("outrider.model.decoder", "if TYPE_CHECKING:\n    from ..cli import main"),
        ("outrider.load.find", "from outrider.cache.pool import SlotPool"),  # islands do not know each other
        ("outrider.load.find", "from outrider.settings import Settings"),
        ("outrider.settings", "from outrider.load.find import find"),
        ("outrider.errors", "from outrider.types import Draft"),
        ("outrider.serve.app", "from outrider.bench.speed import measure"),  # nor do the parts of the outside
        ("outrider.engine.llm", "from outrider.nowhere import x"),
    ],
)
def test_the_check_finds_what_goes_up_or_across(module: str, code: str) -> None:
    assert violations(code, module, module.rpartition(".")[0])


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("outrider.cli.main", "from outrider import __version__"),
        ("outrider.engine.engine", "from .text import Writer"),
        (
            "outrider.engine.engine",
            "from outrider.load import find\nimport torch\nfrom outrider.types import Draft",
        ),
        ("outrider.load.find", "from outrider.load import hub\nfrom outrider.errors import OutriderError"),
    ],
)
def test_the_check_lets_pass_what_goes_down(module: str, code: str) -> None:
    assert not violations(code, module, module.rpartition(".")[0])


def circle(imports: dict[str, set[str]]) -> list[str] | None:
    """Modules of which each imports the one before it, and the first the last; None if there are none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def test_no_module_imports_itself_in_a_circle() -> None:
    """Inside folders too, and wherever in a file the import stands."""
    files = {name: (package, file) for name, package, file in modules()}
    graph = {
        name: set(imported(file.read_text(), package, files)) & files.keys() - {name}
        for name, (package, file) in files.items()
    }
    assert sum(map(len, graph.values())) > len(graph)
    assert (found := circle(graph)) is None, " <- ".join(found or ())


def test_circles_are_seen() -> None:
    names = {"outrider.cli.a", "outrider.cli.b", "outrider.cli"}
    late = "def f():\n    from outrider.cli import b"
    graph = {
        "outrider.cli.a": set(imported(late, "outrider.cli", names)) & names,
        "outrider.cli.b": set(imported("from .a import x", "outrider.cli", names)) & names,
    }
    assert set(circle(graph) or ()) == {"outrider.cli.a", "outrider.cli.b"}
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) is None


# -------------------------------------------------------------------------------------------------- sizes

MAX_LINES, MAX_FUNCTION = 500, 60


def functions(code: str) -> Iterator[tuple[str, int]]:
    """Names and lines."""
    for node in nodes(code):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def too_long(code: str) -> list[str]:
    long = [f"{name}: {lines} lines" for name, lines in functions(code) if lines > MAX_FUNCTION]
    return long + [f"{lines} lines" for lines in (code.count("\n"),) if lines > MAX_LINES]


def test_files_and_functions_fit_in_the_head() -> None:
    """Kernels may be longer: theirs is one loop each."""
    bad = [
        f"{file.relative_to(SOURCE)}: {what}"
        for name, _, file in modules()
        if not name.startswith("outrider.model.kernels")
        for what in too_long(file.read_text())
    ]
    assert not bad, "\n".join(bad)


def test_what_is_too_long_is_seen() -> None:
    assert not too_long("def f():\n" + "    x = 1\n" * 59)
    assert too_long("def f():\n" + "    x = 1\n" * 60) == ["f: 61 lines"]
    assert too_long("x = 1\n" * 501) == ["501 lines"]


# ------------------------------------------------------------------------------------------------- names


VAGUE = re.compile(r"(^|_)(utils?|helpers?|managers?|workers?|impl|common|misc|base|new|old|legacy|v\d)(_|$)")


def own_names(code: str) -> Iterator[str]:
    for node in nodes(code):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name
        elif isinstance(node, ast.ClassDef):
            yield re.sub(r"(?<=[a-z])(?=[A-Z])", "_", node.name).lower()


def test_names_say_something() -> None:
    names = [
        (module, name)
        for module, _, file in modules()
        for name in (*module.split("."), *own_names(file.read_text()))
    ]
    assert not [named for named in names if VAGUE.search(named[1])]


@pytest.mark.parametrize("name", ["utils", "cache_manager", "base_drafter", "runner_v2", "impl"])
def test_vague_names_are_seen(name: str) -> None:
    assert VAGUE.search(name)


def test_every_file_says_what_it_is() -> None:
    silent = [
        str(file)
        for _, _, file in modules()
        if file.stat().st_size and not ast.get_docstring(parsed(file.read_text()))
    ]
    assert not silent


# ------------------------------------------------------------------------------------------------- words

# Metaphors that were given up for the field's words (glossary.md). "In flight" is one of those.
GIVEN_UP = (
    r"(?<!\bin[ -])flights?|fly|flies|flying|flown|board(s|ed|ing)?|ground(s|ed)?|land(s|ed|ing)?|told"
    r"|fore(told|tells?)|habits?|dear(er|est)?|warmth|obey(s|ed)?|spoken|(take|takes|taking|taken|took)[ -]off"
)
SAID = re.compile(rf"\b({GIVEN_UP})\b", re.IGNORECASE)
NAMED = re.compile(rf"\b({GIVEN_UP}|guess(es|ed|ing)?)\b")
# Coined words and unclear pronouns that were given up later. Folders and documents join as they are rewritten.
REWRITTEN = (
    "bench", "cache", "cli", "control", "device", "distill", "draft", "engine", "load", "model", "serve", "verify",
)  # fmt: skip
REWRITTEN_DOCUMENTS = [d for d in DOCUMENTS if d.name not in ("LOG.md", "CHANGELOG.md")]
COINED = re.compile(
    r"\b(bets?|riding|ragged|foresee[ns]?|bites?|judg(e|es|ed|ing)|heats?|stretch(es|ed)?|straight|payoffs?|doors?"
    r"|roomy|ways|heard)\b"
)
UNCLEAR = re.compile(r"\b(bets?|riding|ragged|foresee[ns]?|payoffs?|roomy|nobody|whoever)\b", re.IGNORECASE)


def given_up_names(names: Iterator[str], banned: re.Pattern[str] = NAMED) -> list[str]:
    """`boarded_rows`, `TakeOff` and `flight`, but not `in_flight` or `keyboard`."""
    found = []
    for name in set(names):
        spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("_", " ")
        found += [name] if banned.search(spaced) else []
    return sorted(found)


def names_in(code: str) -> Iterator[str]:
    """Every identifier: of functions, classes, variables, attributes, arguments and imports."""
    for node in nodes(code):
        for field in ("name", "id", "attr", "arg", "asname", "module"):
            if isinstance(name := getattr(node, field, None), str):
                yield from name.split(".")


def given_up_words(text: str, banned: re.Pattern[str] = SAID) -> list[str]:
    """Each with what stands before and after it."""
    text = re.sub(r"\s+", " ", text)
    return [text[max(0, found.start() - 30) : found.end() + 30] for found in banned.finditer(text)]


@cache
def prose_in(code: str) -> list[tuple[int, str]]:
    """Line and text of every comment and string: docstrings, help texts, errors, log lines."""
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    return [(token.start[0], token.string) for token in tokens if token.type in kinds]


def test_the_code_speaks_the_words_of_the_field() -> None:
    for module, _, file in modules():
        code = file.read_text()
        assert not given_up_names(iter([*module.split("."), *names_in(code)])), module
        wrong = [(line, *found) for line, text in prose_in(code) if (found := given_up_words(text))]
        assert not wrong, module


@pytest.mark.parametrize(
    "file", sorted(f for f in SOURCE.rglob("*.[ch]")), ids=lambda f: str(f.relative_to(SOURCE))
)
def test_c_speaks_the_words_of_the_field(file: Path) -> None:
    assert not given_up_names(iter([file.stem, *re.findall(r"[A-Za-z_]\w*", file.read_text())]))


@pytest.mark.parametrize(
    "document",
    [d for d in [*DOCUMENTS, *sorted((ROOT / "docs").glob("*.html"))] if d.name != "LOG.md"],
    ids=lambda d: d.name,
)
def test_documents_speak_the_words_of_the_field(document: Path) -> None:
    """The log is history: its figures belong to the words of their time."""
    text = document.read_text()
    if document.suffix == ".html":
        text = html.unescape(re.sub(r"<style>.*?</style>|<[^>]*>", " ", text, flags=re.DOTALL))
    assert not given_up_words(text)


@pytest.mark.parametrize("folder", REWRITTEN)
def test_rewritten_folders_have_no_coined_names_and_no_unclear_words(folder: str) -> None:
    for file in sorted((SOURCE / folder).rglob("*.py")):
        code = file.read_text()
        assert not given_up_names(names_in(code), COINED), file
        assert not [(line, *f) for line, text in prose_in(code) if (f := given_up_words(text, UNCLEAR))], file
    for file in sorted((SOURCE / folder).rglob("*.[ch]")):
        assert not given_up_names(iter(re.findall(r"[A-Za-z_]\w*", file.read_text())), COINED), file
        assert not given_up_words(file.read_text(), UNCLEAR), file


@pytest.mark.parametrize("document", REWRITTEN_DOCUMENTS, ids=lambda d: d.name)
def test_rewritten_documents_have_no_unclear_words(document: Path) -> None:
    assert not given_up_words(re.sub(r"\]\([^)]*\)", "]", document.read_text()), UNCLEAR)


@pytest.mark.parametrize(
    "name", ["NO_BET", "_heard", "JudgeRows", "max_stretch", "RaggedCosts", "ways", "Door"]
)
def test_coined_names_are_seen(name: str) -> None:
    assert given_up_names(names_in(f"a.{name} = 1"), COINED) == [name]
    assert not given_up_names(iter(["better", "arbiter", "always", "outdoor", "preheated"]), COINED)


def test_unclear_words_are_seen() -> None:
    assert len(given_up_words("Nobody waits; whoever asks. The better way, a payoff.", UNCLEAR)) == 3


@pytest.mark.parametrize(
    "name", ["Flight", "boarded_rows", "_take_off", "TakeOff", "told", "landing", "guesses"]
)
def test_given_up_names_are_seen(name: str) -> None:
    assert given_up_names(names_in(f"def f(x, {name}=1): pass")) == [name]
    assert given_up_names(names_in(f"a.{name} = 1")) == [name]


def test_words_of_the_field_and_plain_ones_pass() -> None:
    assert not given_up_names(iter(["in_flight", "InFlightStep", "keyboard", "background", "island"]))
    assert not given_up_words("two steps in\n    flight; an in-flight step over a background")
    assert len(given_up_words("The flight takes\noff.")) == 2
    seen = [text for _, text in prose_in('x = f"told {y} a"  # landed')]
    assert any("told" in text for text in seen) and any("landed" in text for text in seen)


# --------------------------------------------------------------------------------------------- documents


def blocks(document: Path, language: str) -> list[str]:
    """The document's fenced blocks of one language; fences come in pairs, so every second piece is inside."""
    pieces = re.split(r"^```", document.read_text(), flags=re.MULTILINE)[1::2]
    return [body for head, _, body in (piece.partition("\n") for piece in pieces) if head.strip() == language]


def shown_tree(text: str) -> set[str]:
    """Folders of an indented tree, as paths from the outermost; each ends in a slash."""
    paths, above = set(), []
    margin = len(text) - len(text.lstrip())
    for line in text.splitlines():
        depth = (len(line) - len(line.lstrip()) - margin) // 2
        above[depth:] = [line.split()[0].rstrip("/")]
        paths.add("/".join(above) + "/")
    return paths


def test_readme_shows_every_folder_and_no_other() -> None:
    [tree] = [block for block in blocks(ROOT / "README.md", "") if "\nsrc/outrider/\n" in block]
    top, _, source = tree.partition("src/outrider/\n")
    real = {f"{f.parent.relative_to(SOURCE)}/" for f in SOURCE.rglob("__init__.py")} - {"./"}
    shown = shown_tree(source)
    assert shown == real, f"missing in README: {sorted(real - shown)}; gone: {sorted(shown - real)}"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folders = {f.partition("/")[0] + "/" for f in tracked.split() if "/" in f and not f.startswith(".")}
    assert shown_tree(top) == folders - {"src/"}


def test_a_tree_is_read_right() -> None:
    assert shown_tree("a/  x\n  b/\n    c/  y\nd/\n") == {"a/", "a/b/", "a/b/c/", "d/"}
    assert shown_tree("  a/  x\n    b/\n") == {"a/", "a/b/"}


def test_log_entries_are_numbered_and_indexed() -> None:
    numbers = [int(file.name[:3]) for file in LOG]
    assert numbers == [n for n in range(1, numbers[-1] + 1) if n not in FOLDED]
    index = (ROOT / "LOG.md").read_text()
    for file in LOG:
        text = file.read_text()
        assert text.startswith(f"# {file.name[:3]} "), file.name
        assert all(part in text for part in ("**Question.**", "\n## Result\n", "\n## Decision\n")), file.name
        assert f"](log/{file.name})" in index, f"LOG.md has no row for {file.name}"


def commands(document: Path) -> list[list[str]]:
    """Lines of the document's shell blocks, each command of a pipe by itself."""
    lines = [line for block in blocks(document, "sh") for line in block.replace("\\\n", " ").splitlines()]
    parts = [part for line in lines for part in re.split(r"[|<>]", line)]
    return [words for part in parts if (words := shlex.split(part, comments=True))]


def check_outrider(words: list[str]) -> None:
    """Every subcommand and flag exists; raises what a user would see."""
    command = make_command()
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    is_group = isinstance(command, TyperGroup)
    assert not is_group or not words or words[0].startswith("-"), f"no command {words}"
    if "--help" not in words:
        command.make_context("outrider", words, resilient_parsing=False)


def check_make(words: list[str]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = [word for word in words if "=" not in word]
    assert set(named) <= targets, f"make has no {set(named) - targets}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_commands_in_documents_are_real(document: Path) -> None:
    for words in commands(document):
        if words[0] == "outrider":
            check_outrider(words[1:])
        elif words[0] == "make":
            check_make(words[1:])


def test_documents_have_commands_to_check() -> None:
    assert (
        sum(words[0] in ("outrider", "make") for document in DOCUMENTS for words in commands(document)) > 10
    )


@pytest.mark.parametrize("line", ["generate m p --temprature 1", "generat m", "models push x", "chat --json"])
def test_wrong_commands_are_seen(line: str) -> None:
    with pytest.raises(Exception, match=r"temprature|no command|json"):
        check_outrider(shlex.split(line))


def test_wrong_targets_are_seen() -> None:
    with pytest.raises(AssertionError, match="deploy"):
        check_make(["deploy"])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_python_in_documents_compiles_and_names_what_exists(document: Path) -> None:
    for block in blocks(document, "python"):
        check_python(block)


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.py")), ids=lambda f: f.name)
def test_examples_compile_and_name_what_exists(file: Path) -> None:
    check_python(file.read_text())


def check_python(code: str) -> None:
    """It compiles; what it imports of Outrider exists, and so do the methods and options it names."""
    from outrider import LLM, SamplingParams, Settings

    tree = ast.parse(code)
    known = {*typing.get_type_hints(SamplingParams), *typing.get_type_hints(Settings), "draft"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "outrider":
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called.startswith("llm."):
            assert hasattr(LLM, called[4:]), f"LLM has no {called[4:]}"
        if called.startswith("llm.") or called in ("LLM", "SamplingParams", "Settings"):
            named = {keyword.arg for keyword in node.keywords if keyword.arg}
            assert named <= known, f"{called} has no {named - known}"


@pytest.mark.parametrize(
    "code",
    [
        "from outrider import LLMs",
        "from outrider import LLM\nllm = LLM('m')\nllm.generat('x')",
        "from outrider import SamplingParams\nSamplingParams(temprature=1)",
        "def f(:",
    ],
)
def test_wrong_python_is_seen(code: str) -> None:
    with pytest.raises((AssertionError, SyntaxError)):
        check_python(code)


def anchors(document: Path) -> set[str]:
    """Headings as links name them."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", [*DOCUMENTS, *LOG], ids=lambda d: d.name)
def test_links_lead_somewhere(document: Path) -> None:
    for link, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", document.read_text()):
        if "://" not in link:
            target = document.parent / link if link else document
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), f"{link}#{anchor}"


def test_sampling_document_has_every_parameter() -> None:
    from outrider.sampling_params import GRAMMARS, SamplingParams, Speculation

    rows = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "sampling.md").read_text(), re.MULTILINE))
    assert rows == {*typing.get_type_hints(SamplingParams), *typing.get_type_hints(Speculation), *GRAMMARS}


def test_make_lists_its_commands() -> None:
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in (
        "install",
        "demo",
        "test",
        "test-all",
        "test-planted",
        "lint",
        "format",
        "bench",
        "docs",
        "clean",
    ):
        assert f"make {target} " in listed


def test_what_failed_last_time_is_known_to_the_next_run(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.pluginmanager.hasplugin("cacheprovider")  # for --lf
