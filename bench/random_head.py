"""Writes an EAGLE head with random weights for a model: it guesses nonsense, and nonsense must change
nothing.

    python bench/random_head.py smollm2-135m FOLDER
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

from outrider.draft.eagle_head import HeadConfig
from outrider.draft.head_layouts import eagle_taps, head_shapes, write_head
from outrider.load.checkpoint import open_checkpoint
from outrider.load.find import find
from outrider.settings import cache_folder


def main() -> None:
    config = open_checkpoint(find(sys.argv[1], cache_folder())).config
    if config is None:
        raise SystemExit("only families the decoder knows have heads")
    layer = replace(config, qkv_bias=False, out_bias=False, mlp_bias=False, qk_norm=False)
    head = HeadConfig(layer, config.vocab // 4, eagle_taps(config.layers))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(shape)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) / shape[1] ** 0.5
        for name, shape in head_shapes(head)
    }
    tensors["d2t"] = torch.arange(head.draft_vocab) * 3  # draft id d stands for target id 4 d
    write_head(Path(sys.argv[2]), head, tensors)


if __name__ == "__main__":
    main()
