"""A tiny random target with a chat template, loaded once for the folder's tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider import LLM, Settings
from tests.load.tiny import write_folder

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role[0] }}{{ m.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>a{% endif %}"
)


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_folder(folder)
    config = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def target(target_folder: Path) -> Iterator[LLM]:
    with LLM(
        target_folder, settings=Settings(threads=1, kernels="torch", max_sequences=8, cache_bytes=1 << 22)
    ) as llm:
        yield llm
