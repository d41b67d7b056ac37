"""What the files of a draft say of it, for its card: kind, layout, size, and the engines that load it."""

from __future__ import annotations

import math
from pathlib import Path

from outrider.draft.head_layouts import IGNORED, OWN, engines_that_load, read_head
from outrider.draft.table import is_eagle
from outrider.load.cards import ENGINES, DraftFacts
from outrider.load.checkpoint import Checkpoint, GgufCheckpoint, open_checkpoint


def card_facts(draft: Path, target: Checkpoint) -> DraftFacts:
    opened = open_checkpoint(draft)
    if not is_eagle(draft):
        layout = "gguf" if isinstance(opened, GgufCheckpoint) else "huggingface"
        return DraftFacts("lm", layout, count_parameters(opened), ENGINES[layout])
    raw = opened.raw_config
    layout = "outrider" if OWN in raw else "speculators" if "speculators_model_type" in raw else "eagle3"
    assert target.config is not None
    able = engines_that_load(read_head(draft, target.config)[0], target.config)
    engines = tuple(name for name in ENGINES[layout] if name in able)
    return DraftFacts("eagle", layout, count_parameters(opened), engines)


def count_parameters(checkpoint: Checkpoint) -> int:
    """Without maps, and copies of what the target has."""
    names = (name for name in checkpoint.names() if name not in IGNORED and name != "d2t")
    return sum(math.prod(checkpoint.shape(name)) for name in names)
