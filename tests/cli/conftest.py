"""The command in this process, and a tiny random model that loads at once, with a chat template."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from outrider.cli.main import run
from tests.load.tiny import write_folder

TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'raise' %}{{ raise_exception('not this word') }}{% endif %}"
    "{{ m.role[0] }}{{ m.content }}\n{% endfor %}a"
)
CONTEXT = 128  # of the tiny model
# Options of a quick measurement with it.
SMALL = (
    "--max-tokens",
    6,
    "--max-sequences",
    4,
    "--cache-bytes",
    "8M",
    "--kernels",
    "torch",
    "--device",
    "cpu",
)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_folder(folder)
    config = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@dataclass
class Ran:
    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict]:
        return [json.loads(line) for line in self.out.splitlines()]


Outrider = Callable[..., Ran]


@pytest.fixture
def outrider(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Outrider:
    """`outrider("generate", ..., stdin="text")`: the entry point itself, as users see it."""

    def call(*args: object, stdin: str = "") -> Ran:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        capfd.readouterr()
        with pytest.raises(SystemExit) as left:
            run([str(arg) for arg in args])
        out, err = capfd.readouterr()
        return Ran(left.value.code or 0, out, err)

    return call
