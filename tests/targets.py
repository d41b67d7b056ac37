"""A small random model on disk, whose heads are of a size that the C kernels take, and drafts for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from outrider.bench.as_if import config_json
from outrider.load.checkpoint import expected_shapes, open_checkpoint
from outrider.load.config import ModelConfig
from outrider.load.pairs import fingerprint
from tests.load.pairs import some_card, write_pair
from tests.load.tiny import byte_level_backend, vocabulary
from tests.tiny import eagle_tensors, noised, random_tensors, tiny_config, write_eagle


def target_config(**changes: Any) -> ModelConfig:
    return tiny_config(**{"vocab": len(vocabulary()), "eos_ids": (0,), **changes})


def write_target(folder: Path, noise: float = 0.0, **changes: Any) -> Path:
    """With `noise` on its weights it is a draft for the one without: often right, not always."""
    folder.mkdir(parents=True, exist_ok=True)
    config = target_config(**changes)
    read = noised(config, 0, noise) if noise else random_tensors(config)
    save_file({name: read(name) for name, _ in expected_shapes(config)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_json(config)))
    byte_level_backend().save(str(folder / "tokenizer.json"))
    return folder


def pair_head(folder: Path, target: Path) -> Path:
    """A random EAGLE head for a target that `write_target` made, with a card."""
    config = target_config()
    write_pair(folder, some_card(fingerprint(open_checkpoint(target)) or ""))
    return write_eagle(folder, config, eagle_tensors(config, 50))
