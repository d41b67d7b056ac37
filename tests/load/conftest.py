from __future__ import annotations

import os
from pathlib import Path

import pytest

from outrider.load.checkpoint import Checkpoint, open_checkpoint
from outrider.load.find import find

from . import tiny


@pytest.fixture(scope="session")
def smollm2() -> Path:
    cache = Path(os.environ.get("OUTRIDER_CACHE", "~/.cache/outrider")).expanduser()
    return find("smollm2-135m", cache)


@pytest.fixture(scope="session")
def smollm2_checkpoint(smollm2: Path) -> Checkpoint:
    return open_checkpoint(smollm2)


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound little llama; tests copy its bytes and break the copy."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tiny.write_gguf(path)
    return path
