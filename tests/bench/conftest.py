"""A tiny model in another shape, with a draft of its own: what the measuring code is tried on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

from outrider import Settings
from outrider.bench.as_if import AsIf
from outrider.cache.store import KeyValueStore
from outrider.types import Batch
from tests.targets import write_target

SHAPE, DRAFT = "64:3:8:4:64:300", "64:2:8:4:48:300"
SETTINGS = Settings(device="cpu", max_sequences=8, cache_bytes=1 << 22)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def wide(folder: Path) -> Iterator[AsIf]:
    with AsIf(folder, SHAPE, SETTINGS, draft_shape=DRAFT) as llm:
        yield llm


@pytest.fixture
def leaky(wide: AsIf) -> Iterator[AsIf]:
    """The same with the fault that everything here is there to find: rows that feel how many share their pass."""
    runner, sound = wide.engine.runner, wide.engine.model
    runner.model = Leaky(sound)  # type: ignore[assignment]
    yield wide
    runner.model = sound


class Leaky:
    def __init__(self, inner) -> None:
        self.inner = inner

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    def forward(self, batch: Batch, store: KeyValueStore) -> Tensor:
        logits = self.inner.forward(batch, store)
        return logits.roll(batch.rows, 1)[:, : logits.shape[1]] if batch.rows > 1 else logits


def prompts(count: int) -> list[list[int]]:
    """Short, no two alike, and with something in them to look up."""
    return [[5 + i, 17, 30, 44 + i, 17, 30] * 2 for i in range(count)]
