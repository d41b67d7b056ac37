"""Copies the pages of the documentation to build/docs, with links that hold in the site.

A page links to files of the repository (`../log/005-...md`, `../deploy/nginx.conf`). The site has the log and the
glossary as pages, and shows every other linked file on a page of its own.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from posixpath import dirname, relpath

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "docs"
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
PLACES = {
    "README.md": "index.md",
    "docs": "index.md",
    "log": "log/index.md",
    "LOG.md": "log/index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "src/outrider/glossary.md": "glossary.md",
}
LANGUAGES = {
    ".py": "python",
    ".yml": "yaml",
    ".sh": "sh",
    ".toml": "toml",
    ".json": "json",
    ".ipynb": "json",
    ".c": "c",
}
CODE_OR_BRACKETS = re.compile(r"(`+)(?:.*?)\1(?!`)|\]\[", re.DOTALL)
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"


def pages() -> list[Path]:
    """Every page that the site has by itself. Files that they link to come on top."""
    single = [ROOT / name for name in PLACES if name.endswith(".md") and name != "README.md"]
    return [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "log").glob("*.md")), *single]


def place(file: Path) -> str:
    """The path in the site of a file or folder of the repository."""
    name = file.relative_to(ROOT).as_posix()
    if name in PLACES:
        return PLACES[name]
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    return name if re.fullmatch(r"log/[^/]+\.md", name) else f"files/{name}.md"


def shown(file: Path) -> str:
    """A page for a file that is no page: its text as code, or the contents of a folder."""
    name = file.relative_to(ROOT).as_posix()
    if file.is_dir():
        parts = sorted(part for part in file.iterdir() if not part.name.startswith((".", "_")))
        return f"# {name}\n\n" + "".join(f"- [{part.name}]({part.name})\n" for part in parts)
    fence = "`" * 6
    return f"# {name}\n\n{fence}{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text()}\n{fence}\n"


def rewritten(text: str, file: Path, linked: list[Path]) -> str:
    """The text with links between places in the site; adds the files that it links to."""
    folder = file if file.is_dir() else file.parent

    def relink(match: re.Match[str]) -> str:
        label, link, anchor = match.groups()
        target = (folder / link).resolve()
        if "://" in link or not target.exists() or not target.is_relative_to(ROOT):
            return match[0]
        linked.append(target)
        if label == target.name and label.endswith(".md"):  # a reader of the site knows titles, not files
            label = target.read_text().partition("\n")[0].removeprefix("# ")
        if target == ROOT / "README.md":
            anchor = ""  # the site's first page has other headings
        return f"[{label}]({relpath(place(target), dirname(place(file)) or '.')}{anchor or ''})"

    # Brackets in a row outside of code are shapes, such as [N/16][K], and no references.
    text = CODE_OR_BRACKETS.sub(lambda match: match[0] if match[1] else "]\\[", text)
    return LINK.sub(relink, text)


def stage(out: Path = OUT) -> None:
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(
        ROOT / "docs" / "site", out / "pages" / "site", ignore=shutil.ignore_patterns("*.py", "*.toml", "_*")
    )
    settings = (ROOT / "docs" / "site" / "zensical.toml").read_text()
    (out / "zensical.toml").write_text(settings.replace("../../src", str(ROOT / "src")))
    waiting, done = pages(), {ROOT / "README.md"}
    own = set(waiting)
    while waiting:
        file = waiting.pop()
        if file in done:
            continue
        done.add(file)
        where = place(file)
        target = out / "pages" / where
        target.parent.mkdir(parents=True, exist_ok=True)
        if not where.endswith(".md"):
            shutil.copyfile(file, target)
        elif file in own or where not in PLACES.values():
            head = UNSEARCHED if where.startswith(("log/", "files/")) else ""
            text = file.read_text() if file in own else shown(file)
            target.write_text(head + rewritten(text, file, waiting))


if __name__ == "__main__":
    stage()
