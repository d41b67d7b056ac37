"""What the GPU's kernels do not have, by a model's config alone: known before anything is loaded."""

from __future__ import annotations

from outrider.load.config import ModelConfig

MAX_DIM, MAX_GROUP = 256, 16


def gpu_obstacle(config: ModelConfig, ranks: int = 1) -> str | None:
    """Which part of a model these kernels do not have where `ranks` processes share it."""
    for spec in config.specs:
        for there, what in (
            (spec.chunk, "attention in chunks"),
            (spec.softcap, "soft-capped scores"),
            (spec.head_dim > MAX_DIM, f"heads of {spec.head_dim} numbers, more than {MAX_DIM}"),
            (spec.heads // spec.kv_heads > MAX_GROUP, f"more than {MAX_GROUP} heads to a key"),
            (ranks > 1 and spec.qk_norm == "whole", "norms over heads of several ranks"),
        ):
            if there:
                return what
    if len(set(config.kv_shapes)) > 1:
        return "layers of different head sizes"
    return None
