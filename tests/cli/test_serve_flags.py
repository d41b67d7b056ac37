"""`outrider serve` and `outrider keys`: every setting has a flag, and what is typed is what the server gets."""

from __future__ import annotations

import re
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from outrider.cli import keys
from outrider.cli.options import SERVE
from outrider.serve.keys import Keyring, read_key_file
from outrider.serve.model_spec import ModelSpec
from outrider.serve.settings import ServeSettings
from outrider.settings import Settings
from outrider.types import SamplingParams
from tests.full_disk import file_size_limit

from .conftest import Outrider


class Served:
    """Stands in for the server: keeps what it was started with, and leaves with `code`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.code = 0
        self.table: list[ModelSpec] = []
        self.model, self.draft = "", ""
        self.given: frozenset[str] = frozenset()  # of the parameters a model may set
        self.params, self.settings, self.serve = SamplingParams(), Settings(), ServeSettings()
        server = types.ModuleType("outrider.serve.server")
        server.run_server = self.run_server  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "outrider.serve.server", server)

    def run_server(self, *started: Any) -> int:
        self.table, self.serve = started
        spec = self.table[0]
        self.model, self.draft, self.params = spec.source, spec.draft, spec.params
        self.settings, self.given = spec.settings, spec.given
        return self.code


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    return Served(monkeypatch)


def test_every_server_setting_has_a_flag() -> None:
    assert [flag.name for flag in SERVE.flags] == [field.name for field in fields(ServeSettings)]


def test_flags_left_alone_build_the_defaults() -> None:
    assert SERVE.build({p.name: p.default for p in SERVE.parameters()}) == ServeSettings()


def test_the_server_gets_what_was_typed(outrider: Outrider, served: Served) -> None:
    given = ("or-0123456789abcdef", "or-fedcba9876543210")
    ran = outrider(
        *("serve", "some-model", "--draft", "none", "--temperature", 0.5, "--threads", 1, "--port", 0),
        *("--api-key", given[0], "--api-key", given[1], "--max-body-bytes", "1M", "--cors-origin", "*"),
        *("--allowed-host", "a.example", "--stream-padding", "--request-timeout", 5, "--log-level", "debug"),
    )
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    assert (served.model, served.draft) == ("some-model", "none")
    assert served.given == {"temperature"}
    assert served.params == SamplingParams(temperature=0.5) and served.settings == Settings(threads=1)
    assert served.serve == ServeSettings(
        port=0,
        api_keys=given,
        max_body_bytes=1 << 20,
        cors_origins=("*",),
        allowed_hosts=("a.example",),
        stream_padding=True,
        request_timeout=5,
        log_level="debug",
    )


def test_zero_flags_serve_the_default_model(outrider: Outrider, served: Served) -> None:
    assert outrider("serve").code == 0
    assert served.model == "smollm2-135m" and served.serve == ServeSettings()


def test_the_length_of_answers_is_the_servers_own_setting(
    outrider: Outrider, served: Served, tmp_path: Path
) -> None:
    assert outrider("serve", "--max-tokens", 256).code == 0 and served.serve.max_tokens == 256
    assert served.params == SamplingParams()
    for text in ("max_tokens = 9", "[sampling]\nmax_tokens = 9", "[serve]\nmax-tokens = 9"):
        (tmp_path / "own.toml").write_text(text)
        assert outrider("serve", "--config", tmp_path / "own.toml").code == 0 and served.serve.max_tokens == 9
    assert "--max-tokens N" in (told := outrider("serve", "--help").out) and "[256]" not in told
    assert "max_tokens must be at least 1" in outrider("serve", "--max-tokens", 0).err


def test_variables(outrider: Outrider, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_API_KEYS", "or-0123456789abcdef or-fedcba9876543210")
    monkeypatch.setenv("OUTRIDER_PORT", "9000")
    monkeypatch.setenv("OUTRIDER_LOG_PROMPTS", "1")
    assert outrider("serve", "--host", "::1", "--no-log-prompts").code == 0
    assert served.serve.api_keys == ("or-0123456789abcdef", "or-fedcba9876543210")
    assert (served.serve.host, served.serve.port, served.serve.log_prompts) == ("::1", 9000, False)


def test_the_servers_exit_code_is_the_commands(outrider: Outrider, served: Served) -> None:
    served.code = 7
    assert outrider("serve").code == 7


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--port", "70000"], "port must be between 0 and 65535"),
        (["--prot", "1"], "no such option: --prot"),
        (["--max-body-bytes", "big"], "is not a size"),
        (["--host", "http://x"], "leave out http://"),
        (["--metrics-compat", "vlm"], "did you mean 'vllm'"),
        (["--temperature", "-1"], "temperature must be in"),
    ],
)
def test_bad_flags(outrider: Outrider, served: Served, args: list[str], says: str) -> None:
    ran = outrider("serve", *args)
    assert ran.code == 2 and ran.err.startswith("error: ") and says in ran.err and served.model == ""


def test_without_its_packages_it_says_how_to_get_them(
    outrider: Outrider, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Missing:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "outrider.serve.server":
                raise ModuleNotFoundError("no", name="uvicorn")

    monkeypatch.delitem(sys.modules, "outrider.serve.server", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    ran = outrider("serve")
    assert (
        ran.code == 1
        and "a server needs uvicorn" in ran.err
        and re.search(r"pip install .*'uvicorn\S*'", ran.err)
    )


# ---------------------------------------------------------------------------------------------------- keys


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def test_a_made_key_opens_the_server(outrider: Outrider, file: Path) -> None:
    ran = outrider("keys", "add", "team-a", "--file", file, "--requests-per-minute", 60, "--max-running", 8)
    secret = ran.out.strip()
    assert ran.code == 0 and secret.startswith("or-") and len(secret) >= 40 and secret not in ran.err
    assert secret not in file.read_text() and file.stat().st_mode & 0o777 == 0o600
    key = Keyring.of(ServeSettings(key_file=str(file))).check(f"Bearer {secret}")
    assert key and key.name == "team-a"
    assert (key.limits.requests_per_minute, key.limits.tokens_per_minute, key.limits.max_running) == (
        60,
        0,
        8,
    )


def test_keys_are_listed(outrider: Outrider, file: Path) -> None:
    outrider("keys", "add", "a", "--file", file, "--tokens-per-minute", 500, "--max-running", 2)
    outrider("keys", "add", 'b "é"', "--file", file)
    assert outrider("keys", "list", "--file", file).out == (
        'a\t500 tokens a minute, 2 requests at once\nb "é"\tno limits\n'
    )
    outrider("keys", "add", "c", "--file", file, "--admin", "--keep-traffic")
    assert outrider("keys", "list", "--file", file).out.endswith("c\tadmin, keep_traffic\n")
    marks = {"admin": False, "keep_traffic": False, "models": []}
    assert outrider("keys", "list", "--json", "--file", file).rows[2]["keep_traffic"] is True
    limits = {"requests_per_minute": 0, "tokens_per_minute": 500, "max_running": 2}
    assert outrider("keys", "list", "--json", "--file", file).rows[0] == {"name": "a", **limits, **marks}


def test_what_is_in_the_file_stays(outrider: Outrider, file: Path) -> None:
    begin = "# Our keys.\n\n"
    file.write_text(begin)
    file.chmod(0o644)
    outrider("keys", "add", "a", "--file", file)
    with file.open("a") as out:
        out.write("\n# B is leaving in May.\n")
    outrider("keys", "add", "b", "--file", file)
    outrider("keys", "add", "c", "--file", file)
    text = file.read_text()
    assert text.startswith(begin) and file.stat().st_mode & 0o777 == 0o600
    assert outrider("keys", "remove", "a", "--file", file).code == 0
    left = file.read_text()
    assert "# Our keys." in left and "# B is leaving in May.\n\n[[key]]" in left
    assert left.endswith(text[text.index('name = "b"') :])
    assert [key.name for key in read_key_file(file)] == ["b", "c"]
    for name in ("c", "b"):
        assert outrider("keys", "remove", name, "--file", file).code == 0
    assert file.read_text().split("\n\n") == ["# Our keys.", "# B is leaving in May.\n"]
    assert list(file.parent.iterdir()) == [file]  # nothing half-written beside it


def test_a_link_stays_a_link(outrider: Outrider, file: Path) -> None:
    link = file.with_name("link.toml")
    file.write_text("")
    link.symlink_to(file)
    outrider("keys", "add", "a", "--file", link)
    assert link.is_symlink() and len(read_key_file(file)) == 1


def test_a_file_that_cannot_be_edited_safely_is_left_alone(outrider: Outrider, file: Path) -> None:
    text = f'key = [{{name = "a", hash = "sha256:{"0" * 64}"}}]\n'
    file.write_text(text)
    for command in ("add b", "remove a"):
        ran = outrider("keys", *command.split(), "--file", file)
        assert ran.code == 1 and "edit it by hand" in ran.err and ran.out == ""
    assert file.read_text() == text


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["add", "a"], 2, "has a key named 'a'"),
        (["add", " "], 2, "needs a name"),
        (["add", "x\ny"], 2, "needs a name"),
        (["add", "x\u202ey"], 2, "needs a name"),
        (["add", "x" * 101], 2, "needs a name"),
        (["add", "b\udcff"], 2, "needs a name"),
        (["add", "b", "--max-running", "-1"], 2, "--max-running"),
        (["remove", "team"], 2, "has no key named 'team'"),
        (["list", "--file", "/no/such.toml"], 2, "/no/such.toml cannot be read"),
        (["add", "a", "--file", "/no/such/keys.toml"], 1, "/no/such/keys.toml cannot be written"),
    ],
)
def test_bad_commands(outrider: Outrider, file: Path, args: list[str], code: int, says: str) -> None:
    outrider("keys", "add", "a", "--file", file)
    before = file.read_text()
    ran = outrider("keys", *args, *([] if "--file" in args else ["--file", file]))
    assert (ran.code, ran.out) == (code, "") and ran.err.startswith("error: ") and says in ran.err
    assert file.read_text() == before


def test_a_full_disk_changes_nothing(outrider: Outrider, file: Path) -> None:
    before = f"# {'x' * 100_000}\n"  # longer than what this test writes elsewhere
    file.write_text(before)
    with file_size_limit(len(before)):
        ran = outrider("keys", "add", "b", "--file", file)
    assert (ran.code, ran.out) == (1, "") and "cannot be written: File too large" in ran.err
    assert file.read_text() == before and list(file.parent.iterdir()) == [file]


def test_keys_added_at_once_are_all_there(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command reads the file and replaces it: without a lock the last one would drop the others' keys."""
    swap, names = keys._swap, [f"k{i}" for i in range(6)]

    def slow(path: Path, text: str) -> None:
        threading.Event().wait(0.02)  # long enough for another one to read
        swap(path, text)

    monkeypatch.setattr(keys, "_swap", slow)
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(lambda name: keys.add(name, str(file)), names))
    assert sorted(key.name for key in read_key_file(file)) == names
    assert list(file.parent.iterdir()) == [file]


def test_a_broken_file_is_not_added_to(outrider: Outrider, file: Path) -> None:
    file.write_text("[[keys]]\n")
    ran = outrider("keys", "add", "a", "--file", file)
    assert ran.code == 2 and "did you mean 'key'" in ran.err and file.read_text() == "[[keys]]\n"
