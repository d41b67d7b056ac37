"""From names to files: paths, aliases, hub ids, and what to do where there is no network."""

from __future__ import annotations

import errno
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from outrider.errors import ModelNotFound
from outrider.load import builtin
from outrider.load.aliases import ALIASES, HUB_MODELS, near_aliases
from outrider.load.builtin import SMOLLM2
from outrider.load.families import FAMILIES
from outrider.load.find import fetched, find, list_models, parse_hub_id, published_sampling
from outrider.load.hub import HubId, hub_cache
from outrider.load.pairs import SHIPPED


@pytest.fixture(autouse=True)
def empty_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HUGGINGFACE_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    return tmp_path / "hf" / "hub"


def test_an_existing_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "smollm2-135m").mkdir()
    (tmp_path / "x.gguf").touch()
    for name in ("org/name", "smollm2-135m", "x.gguf", str(tmp_path / "x.gguf")):
        assert find(name, tmp_path / "cache") == Path(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find("~/x.gguf", tmp_path / "cache") == tmp_path / "x.gguf"


def test_an_alias_is_the_cached_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "_download", lambda *a: pytest.fail("nothing should be fetched"))
    place = tmp_path / "models" / SMOLLM2.file
    place.parent.mkdir()
    with place.open("wb") as file:
        file.truncate(SMOLLM2.bytes)
    assert find("smollm2-135m", tmp_path) == place


def test_a_gguf_in_the_cache_goes_by_its_stem(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.gguf").write_bytes(b"x")
    assert find("mine", tmp_path) == tmp_path / "models" / "mine.gguf"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("smolm2-135m", "did you mean 'smollm2-135m'"),
        ("", "a hub id such as org/name"),
        ("./missing", "no file or folder './missing'"),
        ("missing.gguf", "no file or folder"),
        ("dir/missing.gguf", "no file or folder"),
        ("/abs/missing", "no file or folder"),
        ("a/b/c", "a hub id such as"),
        ("../../no-such-folder", "no file or folder"),
        ("x\0y", "there is no model"),
        ("y" * 9999, "there is no model"),
    ],
)
def test_unknown_names(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        find(name, tmp_path)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 2000


def test_hub_ids() -> None:
    assert parse_hub_id("org/name") == HubId("org/name")
    assert parse_hub_id("Org-1/Na.me_2:a-Q4_K_M.gguf") == HubId("Org-1/Na.me_2", "a-Q4_K_M.gguf")
    for text in (
        "name",
        "a/b/c",
        "a/../b",
        "a/b:x.bin",
        "a/b:../x.gguf",
        "a/b:/x.gguf",
        "-a/b",
        "a/b.gguf",
        "a/b:",
    ):
        assert parse_hub_id(text) is None, text


class FakeHub:
    """Stands in for the hub's library: says what files there are, notes what is asked for."""

    def __init__(self, files: list[str]) -> None:
        self.files = files
        self.asked: dict[str, Any] = {}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hub = self

        class Api:
            def model_info(self, repo: str, timeout: float) -> Any:
                siblings = [type("S", (), {"rfilename": name})() for name in hub.files]
                return type("Info", (), {"siblings": siblings})()

        def snapshot(repo: str, **options: Any) -> str:
            hub.asked = options
            return f"/snapshot/{repo}"

        monkeypatch.setattr(huggingface_hub, "HfApi", Api)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
        monkeypatch.setattr(
            huggingface_hub, "hf_hub_download", lambda repo, file, **o: f"/file/{repo}/{file}"
        )


def test_a_repository_of_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(["model.safetensors", "pytorch_model.bin", "a.gguf", "config.json"])
    hub.install(monkeypatch)
    assert find("org/name", tmp_path) == Path("/snapshot/org/name")
    assert hub.asked["allow_patterns"] == ["*.safetensors", "*.json", "*.jinja"]
    assert not any("bin" in pattern or pattern == "*" for pattern in hub.asked["allow_patterns"])


def test_a_repository_of_ggufs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeHub(["a.gguf", "README.md"]).install(monkeypatch)
    assert find("org/name", tmp_path) == Path("/file/org/name/a.gguf")
    FakeHub(["a.gguf", "b.gguf"]).install(monkeypatch)
    with pytest.raises(ModelNotFound, match=r"org/name:a\.gguf\n +org/name:b\.gguf"):
        find("org/name", tmp_path)
    assert find("org/name:b.gguf", tmp_path) == Path("/file/org/name/b.gguf")
    FakeHub(["pytorch_model.bin"]).install(monkeypatch)
    with pytest.raises(ModelNotFound, match=r"no \.safetensors and no \.gguf"):
        find("org/name", tmp_path)


@pytest.mark.parametrize("name", ["org/name", "org/name:a.gguf"])
def test_offline_and_nothing_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_hub: Path, name: str
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound) as caught:
        find(name, tmp_path)
    assert "hf download org/name" in str(caught.value)
    assert str(empty_hub / "models--org--name") in str(caught.value)


def cached_repo(hub: Path) -> Path:
    repo = hub / "models--org--name"
    snapshot = repo / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    (snapshot / "model.safetensors").write_bytes(b"12345")
    (snapshot / "config.json").write_text("{}")
    return snapshot


def test_offline_and_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_hub: Path) -> None:
    snapshot = cached_repo(empty_hub)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find("org/name", tmp_path).resolve() == snapshot.resolve()


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (errors.RepositoryNotFoundError, "no repository 'org/name'"),
        (errors.GatedRepoError, "accept its terms"),
    ],
)
def test_refused_by_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Any, said: str) -> None:
    class Api:
        def model_info(self, repo: str, timeout: float) -> Any:
            raise problem.__new__(problem)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    with pytest.raises(ModelNotFound, match=said):
        find("org/name", tmp_path)


@pytest.mark.parametrize(
    "problem",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("Data processing error: I/O error: No space left on device (os error 28)"),
        PermissionError(errno.EACCES, "Permission denied"),
    ],
)
def test_a_cache_of_the_hub_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_hub: Path, problem: Exception
) -> None:
    """The way out is room, not another machine."""
    FakeHub(["model.safetensors"]).install(monkeypatch)

    def snapshot(repo: str, **options: Any) -> str:
        raise problem

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(
        ModelNotFound, match=r"org/name cannot be stored in .*: (No space|Permission)"
    ) as caught:
        find("org/name", tmp_path)
    assert str(empty_hub) in str(caught.value) and "hf download" not in str(caught.value)


def test_hub_cache_is_where_the_library_says(tmp_path: Path) -> None:
    assert hub_cache() == tmp_path / "hf" / "hub"
    code = "from huggingface_hub import constants as c; from outrider.load.hub import hub_cache as h; "
    code += "assert str(h()) == c.HF_HUB_CACHE, (h(), c.HF_HUB_CACHE)"
    for env in ({}, {"HF_HOME": "/x"}, {"XDG_CACHE_HOME": "/y"}, {"HF_HUB_CACHE": "/z"}):
        full = {"PATH": "/usr/bin", "HOME": "/home/u", "PYTHONPATH": ":".join(sys.path)} | env
        subprocess.run([sys.executable, "-c", code], env=full, check=True)


def test_list_models(tmp_path: Path, empty_hub: Path) -> None:
    entries = list_models(tmp_path)
    assert [(e.name, e.present, e.path, e.bytes) for e in entries] == [
        (name, False, None, model.bytes) for name, model in ALIASES.items()
    ]
    snapshot = cached_repo(empty_hub)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.gguf").write_bytes(b"123")
    (tmp_path / "models" / f".{SMOLLM2.file}.x.part").write_bytes(b"123")
    with (tmp_path / "models" / SMOLLM2.file).open("wb") as file:
        file.truncate(SMOLLM2.bytes)
    entries = list_models(tmp_path)
    assert [(e.name, e.present, e.bytes) for e in entries if e.present] == [
        ("smollm2-135m", True, SMOLLM2.bytes),
        ("mine", True, 3),
        ("org/name", True, 5),
    ]
    assert entries[-1].path == snapshot


# ------------------------------------------------------------------------------------------------ aliases


def test_aliases_can_be_loaded_and_are_listed_by_size() -> None:
    sizes = [model.bytes for model in ALIASES.values()]
    assert len(ALIASES) >= 10 and sizes == sorted(sizes)
    for model in HUB_MODELS:
        assert parse_hub_id(str(model.hub)) == model.hub, model.alias
        assert 0.4 < model.bytes / model.parameters < 2.2  # from 4 to 16 bits a weight
        known = any(model.alias.startswith(f"{name[:4]}") for name in FAMILIES) or "smollm" in model.alias
        assert known or "through transformers" in model.about, model.alias


def test_every_shipped_pair_has_an_alias() -> None:
    pairs = [model.pair for model in ALIASES.values() if model.pair]
    assert sorted(pairs) == sorted(folder.name for folder in SHIPPED.iterdir() if folder.is_dir())


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("llama3.2:1b", ["llama-3.2-1b"]),
        ("Llama3.2", ["llama-3.2-1b", "llama-3.2-3b"]),
        ("qwen2.5:7b-instruct", ["qwen2.5-7b"]),
        ("qwen3", ["qwen3-0.6b", "qwen3-1.7b", "qwen3-4b"]),
        ("mistral", []),
        ("y" * 9999, []),
    ],
)
def test_near_aliases(name: str, near: list[str]) -> None:
    assert near_aliases(name) == near


class LoopbackHub(BaseHTTPRequestHandler):
    """Answers as the hub does for one file: a HEAD with its digest and commit, then a GET."""

    content = b"GGUF of the hub"
    asked: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.asked.append(f"{self.command} {self.path}")
        self.send_response(200)
        self.send_header("X-Repo-Commit", "b" * 40)
        self.send_header("ETag", '"' + "c" * 40 + '"')
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(self.content)

    def log_message(self, *_: object) -> None: ...


def test_an_alias_of_the_hub_is_fetched_listed_and_deleted(tmp_path: Path, empty_hub: Path) -> None:
    """From a hub on the loopback, by the hub's own library, which reads its address when it is imported."""
    code = "import sys, pathlib; from outrider.load.find import find; "
    code += "print(find('qwen3-0.6b', pathlib.Path(sys.argv[1])))"
    LoopbackHub.asked.clear()
    with HTTPServer(("127.0.0.1", 0), LoopbackHub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        env = {"PATH": "/usr/bin", "HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
        env |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_CACHE": str(empty_hub)}
        ran = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], env=env, capture_output=True, text=True
        )
        server.shutdown()
    assert ran.returncode == 0, ran.stderr
    path = Path(ran.stdout.strip())
    assert path.read_bytes() == LoopbackHub.content
    assert {line.split()[1] for line in LoopbackHub.asked if "/resolve/" in line} == {
        "/Qwen/Qwen3-0.6B-GGUF/resolve/main/Qwen3-0.6B-Q8_0.gguf"
    }
    [entry] = [entry for entry in list_models(tmp_path) if entry.present]
    assert (entry.name, entry.path) == ("qwen3-0.6b", path)  # once, by its alias
    assert published_sampling(path, tmp_path).values["temperature"] == 0.6
    assert fetched("qwen3-0.6b", tmp_path) == empty_hub / "models--Qwen--Qwen3-0.6B-GGUF"
    (path.parent / "other.gguf").write_bytes(b"123")
    assert [entry.name for entry in list_models(tmp_path) if entry.present] == [
        "qwen3-0.6b",
        "Qwen/Qwen3-0.6B-GGUF",
    ]


def test_finding_does_not_import_the_heavy_libraries() -> None:
    code = "import sys, outrider.load.find; "
    code += "heavy = {'torch', 'huggingface_hub', 'jinja2', 'tokenizers', 'rich', 'numpy'}; "
    code += "sys.exit(bool(heavy & set(sys.modules)))"
    full = {"PATH": "/usr/bin", "PYTHONPATH": ":".join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=full).returncode == 0
