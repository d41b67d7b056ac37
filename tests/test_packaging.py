"""What installs Outrider: bounds that were tested, a demo without the tests' tools, metadata, packages, containers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml
from deploy.try_container import Tree, assignments, copied, instructions
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from outrider.serve.about import ROUTES
from outrider.serve.settings import ServeSettings
from tests.lowest import lowest
from tests.test_structure import ROOT, check_make, check_outrider

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONTAINERS = {file.stem: file for file in sorted((ROOT / "deploy" / "docker").iterdir())}
WORKFLOW = ROOT / ".github" / "workflows" / "check.yml"
NAME = f"outrider-{PROJECT['version']}"
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


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


# ----------------------------------------------------------------------------------------------- packages


def found(tool: str) -> str:
    """A tool that the suite does not install: `make wheel` does, or the user."""
    own = ROOT / ".venv-release" / "bin" / tool
    path = str(own) if own.exists() else shutil.which(tool)
    return path or pytest.skip(f"no {tool} here: `make wheel` or pip installs it")


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An sdist of what a container file copies, and a wheel of that sdist. Weights are cut short to save time."""
    folder = tmp_path_factory.mktemp("packages")
    tree = Tree(folder, {}, {})
    for word, text in instructions(CONTAINERS["cpu"].read_text()):
        if word == "COPY":
            tree.apply(word, text, ROOT)
    shutil.copy(ROOT / "MANIFEST.in", folder / "src")
    for file in folder.rglob("*"):
        if file.is_file() and file.stat().st_size > 1_000_000:
            file.write_bytes(b"weights")
    for planted in ("tests/test_x.py", "src/outrider/model/kernels/carried/cpu.so"):
        (folder / "src" / planted).parent.mkdir(exist_ok=True)
        (folder / "src" / planted).touch()

    def build(kind: str, source: Path) -> Path:
        command = [sys.executable, "-c", BUILD, f"build_{kind}", str(folder / "dist")]
        subprocess.run(command, cwd=source, check=True, capture_output=True)
        return next((folder / "dist").glob("*.whl" if kind == "wheel" else "*.tar.gz"))

    sdist = build("sdist", folder / "src")
    with tarfile.open(sdist) as opened:
        opened.extractall(folder / "unpacked", filter="data")
    return sdist, build("wheel", folder / "unpacked" / NAME)


def test_the_wheel_holds_the_package_and_nothing_of_one_machine(packages: tuple[Path, Path]) -> None:
    sdist, wheel = packages
    assert (sdist.name, wheel.name) == (f"{NAME}.tar.gz", f"{NAME}-py3-none-any.whl")
    with tarfile.open(sdist) as opened:
        listed = opened.getnames()
    names = ZipFile(wheel).namelist()
    assert not [name for name in [*listed, *names] if "tests/" in name or name.endswith((".so", ".pyc"))]
    source = {
        file.relative_to(ROOT / "src") for file in (ROOT / "src" / "outrider").rglob("*") if file.is_file()
    }
    kept = {file.as_posix() for file in source if not {"__pycache__", "carried"} & set(file.parts)}
    assert len(kept) > 200 and kept <= set(names)
    assert f"{NAME}.dist-info/licenses/LICENSE" in names


def test_packages_pass_twine(packages: tuple[Path, Path]) -> None:
    command = [found("twine"), "check", "--strict", *map(str, packages)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("PASSED") == 2, done.stdout


def test_the_wheel_installs_into_an_empty_environment(packages: tuple[Path, Path], tmp_path: Path) -> None:
    """Dependencies are this environment's, as the tests fetch none."""
    pytest.importorskip("pip")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    scripts = tmp_path / "env" / ("Scripts" if sys.platform == "win32" else "bin")
    install = [sys.executable, "-m", "pip", "--python", str(scripts / "python"), "install"]
    command = [*install, "--no-deps", "--no-index", str(packages[1])]
    subprocess.run(command, check=True, capture_output=True)
    [site] = {file.parent for file in (tmp_path / "env").rglob(f"{NAME}.dist-info")}
    (site / "dependencies.pth").write_text("\n".join(path for path in sys.path if "-packages" in path))
    said = subprocess.run([scripts / "outrider", "--version"], capture_output=True, text=True)
    assert said.stdout == f"outrider {PROJECT['version']}\n", said.stderr
    where = [scripts / "python", "-c", "import outrider; print(outrider.__file__)"]
    file = subprocess.run(where, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert Path(file.strip()).is_relative_to(site)


# --------------------------------------------------------------------------------------------- containers


@pytest.fixture(params=CONTAINERS)
def steps(request: pytest.FixtureRequest) -> list[tuple[str, str]]:
    return instructions(CONTAINERS[request.param].read_text())


def test_containers_serve_without_rights(steps: list[tuple[str, str]]) -> None:
    words, values = [word for word, _ in steps], dict(steps)
    uid, gid = map(int, values["USER"].split(":"))
    assert words.count("USER") == 1 and "RUN" not in words[words.index("USER") :] and uid == gid > 0
    runs = " ".join(text for word, text in steps if word == "RUN")
    assert f"useradd --uid {uid} --create-home outrider" in runs
    assert f"install -d -o outrider -g outrider {values['VOLUME']} " in f"{runs} "
    assert assignments(values["ENV"], {})["OUTRIDER_CACHE"] == values["VOLUME"]


def test_containers_run_a_real_command_and_check_its_health(steps: list[tuple[str, str]]) -> None:
    values = dict(steps)
    name, *words = json.loads(values["ENTRYPOINT"]) + json.loads(values["CMD"])
    assert name in PROJECT["scripts"]
    check_outrider(words)
    assert values["EXPOSE"] == str(ServeSettings().port)
    *_, code = json.loads(values["HEALTHCHECK"].partition("CMD ")[2])
    compile(code, "the health check", "exec")
    [(port, path)] = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", code)
    assert port == values["EXPOSE"] and path in {route.path for route in ROUTES}


@pytest.mark.parametrize("device", CONTAINERS)
def test_containers_have_the_project_s_versions_and_no_registry(device: str) -> None:
    text = CONTAINERS[device].read_text()
    steps = instructions(text)
    values = {word: text for word, text in steps if word != "ARG"}
    label = assignments(values["LABEL"], {})
    assert label["org.opencontainers.image.version"] == PROJECT["version"]
    arguments = dict(text.partition("=")[::2] for word, text in steps if word == "ARG")
    assert arguments.keys() == {"TORCH", "PIP_EXTRA_INDEX_URL"} and not arguments["PIP_EXTRA_INDEX_URL"]
    [asked] = [Requirement(one) for one in PROJECT["dependencies"] if one.startswith("torch")]
    torch = Requirement(arguments["TORCH"])
    [version] = [one.version for one in torch.specifier]
    oldest = f"{str(asked.specifier).removeprefix('>=')}.0"
    built_with = re.search(r"(?m)^TORCH \?= (.*)$", (ROOT / "Makefile").read_text())
    assert built_with and str(torch) == {"cpu": built_with[1], "cuda": f"torch=={oldest}"}[device]
    assert version in asked.specifier
    [python] = re.findall(r"Debian 12 stays at Python ([\d.]+\d)", text)
    assert values["FROM"] == "debian:bookworm-slim" and python in SpecifierSet(PROJECT["requires-python"])
    assert f"Programming Language :: Python :: {python}" in PROJECT["classifiers"]
    [extras] = re.findall(r"'/src\[(.*?)\]'", text)
    assert extras == {"cpu": "serve", "cuda": "serve,gpu"}[device]
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    assert re.findall(r"://([^/:]+)", text) == ["127.0.0.1"]


def test_the_containers_differ_in_what_a_gpu_needs_alone() -> None:
    cpu, cuda = (instructions(CONTAINERS[name].read_text()) for name in ("cpu", "cuda"))
    apart = [
        a for a, b in zip(cpu, [step for step in cuda if "NVIDIA" not in step[1]], strict=True) if a != b
    ]
    assert [word for word, _ in apart] == ["RUN", "ARG", "RUN", "HEALTHCHECK"]


def test_container_files_pass_hadolint() -> None:
    done = subprocess.run([found("hadolint"), *map(str, CONTAINERS.values())], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_instructions_are_read_as_a_builder_reads_them(tmp_path: Path) -> None:
    text = (
        "# a\nENV A=1 B=$A\n\nRUN one \\\n  # a comment\n    && two\nARG C=3\nARG D\nUSER 7:8\nWORKDIR /x/y\n"
    )
    steps = instructions(text)
    assert steps[1] == ("RUN", "one && two")
    tree = Tree(tmp_path, {"C": "4"}, {})
    for word, text in steps:
        if word != "RUN":
            tree.apply(word, text, ROOT)
    assert tree.env | {"PATH": ""} == {"PATH": "", "A": "1", "B": ""} and tree.args == {"C": "4"}
    assert (tree.user, tree.folder) == ("7:8", "/x/y") and (tmp_path / "x" / "y").is_dir()


def test_what_cannot_be_run_in_a_tree_is_refused_by_name(tmp_path: Path) -> None:
    tree = Tree(tmp_path, {}, {})
    for word, text, message in (
        ("ADD", "a b", "ADD"),
        ("FROM", "python:3.12-slim", "debian:SUITE-slim"),
        ("COPY", "tests /tests", "COPY tests: .dockerignore"),
    ):
        with pytest.raises(SystemExit, match=message):
            tree.apply(word, text, ROOT)


def test_copies_leave_out_what_dockerignore_names(tmp_path: Path) -> None:
    for file in ("src/a.py", "src/__pycache__/a.pyc", "src/carried/a.so"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    shutil.copy(ROOT / ".dockerignore", tmp_path)
    copied(tmp_path, "src", tmp_path / "to")
    assert [file.name for file in (tmp_path / "to").rglob("*")] == ["a.py"]


# ----------------------------------------------------------------------------------------------- workflow


def test_the_workflow_checks_what_ci_checks_and_builds_every_package() -> None:
    flow = yaml.safe_load(WORKFLOW.read_text())
    jobs = flow["jobs"]
    runs = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    assert runs["check"] == [".ci/run"] and (ROOT / ".ci" / "run").stat().st_mode & 0o111
    pythons = [
        f"Programming Language :: Python :: {one}" for one in jobs["check"]["strategy"]["matrix"]["python"]
    ]
    assert pythons == [one for one in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", one)]
    check_make(runs["packages"][0].split()[1:])
    assert jobs["containers"]["strategy"]["matrix"]["device"] == list(CONTAINERS)
    assert all("$DEVICE.Dockerfile" in run for run in runs["containers"])
    assert flow["permissions"] == {"contents": "read"} and all(
        "timeout-minutes" in job for job in jobs.values()
    )


def test_the_workflow_follows_its_schema() -> None:
    command = [found("check-jsonschema"), "--builtin-schema", "vendor.github-workflows", str(WORKFLOW)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
