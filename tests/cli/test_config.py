"""A file of settings: it fills what flags and variables leave open, and nothing in it is overlooked."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.serve.settings import ServeSettings
from outrider.settings import Settings
from outrider.types import SamplingParams

from .conftest import Outrider
from .test_serve_flags import Served

FILE = """\
model = "from-file"
draft = "lookup"
top-k = 7

[sampling]
temperature = 1            # a whole number where a fraction may be
stop = ["one", "two"]
logit_bias = ["5=-1.5"]
speculation = 4
seed = 3

[engine]
cache_bytes = "512M"
threads = 1
prefix-reuse = false

[serve]
port = 9001
api-keys = "or-0123456789abcdef"
max_body_bytes = 4096
request_timeout = 12.5
stream_padding = true
"""


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    return Served(monkeypatch)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "outrider.toml"
    path.write_text(FILE)
    return path


def test_every_key_arrives(outrider: Outrider, served: Served, file: Path) -> None:
    ran = outrider("serve", "--config", file)
    assert (ran.code, ran.err) == (0, "")
    assert (served.model, served.draft) == ("from-file", "lookup")
    assert served.params == SamplingParams(
        top_k=7, temperature=1.0, stop=("one", "two"), logit_bias={5: -1.5}, speculation={"depth": 4}, seed=3
    )
    assert served.settings == Settings(cache_bytes=512 << 20, threads=1, prefix_reuse=False)
    assert served.serve == ServeSettings(
        port=9001,
        api_keys=("or-0123456789abcdef",),
        max_body_bytes=4096,
        request_timeout=12.5,
        stream_padding=True,
    )


def test_what_is_typed_wins_then_the_environment_then_the_file(
    outrider: Outrider, served: Served, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def settled() -> tuple[object, ...]:
        return (served.serve.port, served.params.top_k, served.model, served.params.stop)

    assert outrider("serve").code == 0
    assert settled() == (8000, 0, "smollm2-135m", ())
    assert outrider("serve", "--config", file).code == 0
    assert settled() == (9001, 7, "from-file", ("one", "two"))
    for name, value in (("PORT", "9002"), ("TOP_K", "8"), ("MODEL", "from-variable"), ("STOP", "three")):
        monkeypatch.setenv(f"OUTRIDER_{name}", value)
    assert outrider("serve", "--config", file).code == 0
    assert settled() == (9002, 8, "from-variable", ("three",))
    typed = ("typed", "--port", 9003, "--top-k", 0, "--stop", "four")
    assert outrider("serve", "--config", file, *typed).code == 0
    assert settled() == (9003, 0, "typed", ("four",))
    assert outrider("serve", *typed, "--config", file).code == 0  # wherever in the line it stands
    assert settled() == (9003, 0, "typed", ("four",))


def test_what_is_on_in_the_file_can_be_turned_off(
    outrider: Outrider, served: Served, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert outrider("serve", "--config", file, "--no-stream-padding", "--prefix-reuse").code == 0
    assert not served.serve.stream_padding and served.settings.prefix_reuse
    monkeypatch.setenv("OUTRIDER_STREAM_PADDING", "0")
    assert outrider("serve", "--config", file).code == 0
    assert not served.serve.stream_padding


def test_the_file_can_be_named_by_a_variable(
    outrider: Outrider, served: Served, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CONFIG", str(file))
    assert outrider("serve").code == 0
    assert (served.model, served.serve.port) == ("from-file", 9001)
    other = file.with_name("other.toml")
    other.write_text("port = 9009")
    assert outrider("serve", "--config", other).code == 0 and served.serve.port == 9009


def test_one_file_serves_every_command(outrider: Outrider, file: Path, empty_cache: Path) -> None:
    ran = outrider("generate", "--config", file, "--prompt", "hi")
    assert ran.code == 1 and "from-file" in ran.err  # the model was looked for: all its keys were taken


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot = 1", "unknown key 'prot'; did you mean 'port'?"),
        ("[server]\nport = 1", "unknown key 'server'; did you mean 'serve'?"),
        (
            "[serve]\nmax-boddy-bytes = 1",
            "unknown key 'max-boddy-bytes' in [serve]; did you mean 'max_body_bytes'",
        ),
        ("xyzzy = 1", "unknown key 'xyzzy'; keys are named like the flags"),
        ("tree_max_batch = 4", "unknown key 'tree_max_batch'"),
        ("config = 'other.toml'", "unknown key 'config'"),
        ("[serve]\ntemperature = 1", "temperature belongs in [sampling], not in [serve]"),
        ("[serve]\nmodel = 'x'", "model belongs at the top, before [serve]"),
        ("port = 1\n[serve]\nport = 2", "port is given twice"),
        ("top-k = 1\ntop_k = 2", "top_k is given twice"),
        ("serve = 5", "unknown key 'serve'"),
        ("port = 'x'", "port: must be a whole number, not text"),
        ("port = true", "port: must be a whole number, not true"),
        ("port = 1.5", "port: must be a whole number, not 1.5"),
        ("temperature = 'hot'", "temperature: must be a number, not text"),
        ("stream_padding = 1", "stream_padding: must be true or false, not 1"),
        ("stop = [1]", "stop: must be text, not 1"),
        ("host = 5", "host: must be text, not 5"),
        ("host = 2020-01-01", "host: must be text, not date"),
        ("model = ['a']", "model: must be text, not a list"),
        ("seed = {a = 1}", "seed: must be a whole number, not a table"),
        ("max_body_bytes = 'lots'", "max_body_bytes: 'lots' is not a size"),
        ("logit_bias = ['5']", "logit_bias: '5' is not TOKEN_ID=NUMBER"),
        ("port = 70000", "port must be between 0 and 65535"),
        ("host = 'a b'", "host: 'a b' is not a name"),
        ("temperature = nan", "temperature must be in [0, 100], got nan"),
        ("port = x", "is not TOML: Invalid value (at line 1"),
        ("a = 1\na = 2", "is not TOML: "),
    ],
)
def test_nothing_wrong_is_overlooked(
    outrider: Outrider, served: Served, file: Path, text: str, says: str
) -> None:
    file.write_text(text)
    ran = outrider("serve", "--config", file)
    assert (ran.code, ran.out, served.model) == (2, "", "")
    assert ran.err.startswith(f"error: {file}") and says in ran.err and "Traceback" not in ran.err


def test_a_wrong_key_is_told_to_every_command(outrider: Outrider, file: Path) -> None:
    file.write_text("[serve]\nprot = 1")
    ran = outrider("generate", "--config", file, "--prompt", "hi")
    assert ran.code == 2 and "did you mean 'port'?" in ran.err


def test_the_file_is_not_blamed_for_what_was_typed(outrider: Outrider, served: Served, file: Path) -> None:
    ran = outrider("serve", "--config", file, "--port", 70000)
    assert ran.code == 2 and ran.err == "error: port must be between 0 and 65535, got 70000\n"


def test_keys_in_the_file_are_not_repeated_in_errors(outrider: Outrider, served: Served, file: Path) -> None:
    for text in ('api_keys = {a = "or-secret"}', 'api_keys = [["or-secret"]]', 'api_keys = "or-secret'):
        file.write_text(text)
        ran = outrider("serve", "--config", file)
        assert ran.code == 2 and "secret" not in ran.err


def test_files_that_cannot_be_read(outrider: Outrider, served: Served, file: Path) -> None:
    ran = outrider("serve", "--config", "/no/such.toml")
    assert ran.code == 2 and "/no/such.toml cannot be read: No such file" in ran.err
    file.write_bytes(b"\xff\xfe")
    assert "is not UTF-8 text" in outrider("serve", "--config", file).err
    assert "cannot be read: Is a directory" in outrider("serve", "--config", file.parent).err


def test_help_answers_whatever_the_file_is(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CONFIG", "/no/such.toml")
    ran = outrider("serve", "--help")
    assert ran.code == 0 and "--config" in ran.out
