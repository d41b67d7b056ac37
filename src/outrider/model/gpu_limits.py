"""What the GPU's kernels do not have, by a model's config alone: known before anything is loaded."""

from __future__ import annotations

from outrider.load.config import QUERY_BETA, TRAINED, ModelConfig

MAX_DIM, MAX_GROUP = 256, 16


def gpu_obstacle(config: ModelConfig, positions: int = 0) -> str | None:
    """Which part of a model these kernels do not have, for a context of so many positions."""
    for spec in config.specs:
        trained = spec.rope.scaling.get(TRAINED) if spec.rope and spec.rope.scaling.get(QUERY_BETA) else None
        for there, what in (
            (spec.chunk, "attention in chunks"),
            (spec.norm_after, "norms after attention and MLP"),
            (spec.qk_norm == "whole", "norms over all heads of queries or keys together"),
            (spec.activation != "silu", f"the activation {spec.activation}"),
            (spec.softcap or config.softcap, "soft-capped scores or logits"),
            (trained and positions > trained, f"scaled queries: say --context {trained} at most"),
            (spec.head_dim > MAX_DIM, f"heads of {spec.head_dim} numbers, more than {MAX_DIM}"),
            (spec.heads // spec.kv_heads > MAX_GROUP, f"more than {MAX_GROUP} heads to a key"),
        ):
            if there:
                return what
    if len(set(config.kv_shapes)) > 1:
        return "layers of different head sizes"
    return None
