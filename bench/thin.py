"""Writes a thinner copy of a model: some of its layers left out. A stand-in for a draft where no smaller
model is at hand.

    python bench/thin.py smollm2-135m FOLDER --drop 20,21,22,23

The copy is a real model with a real loss: it says other things than the original, so its guesses are
sometimes wrong.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save_file

from outrider.bench.as_if import config_json
from outrider.load.checkpoint import open_checkpoint
from outrider.load.find import find
from outrider.settings import cache_folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--drop", required=True, help="layers to leave out, such as 20,21")
    given = parser.parse_args()
    source = open_checkpoint(find(given.model, cache_folder()))
    config = source.config
    if config is None:
        raise SystemExit("only families the decoder knows can be thinned")
    dropped = {int(layer) for layer in given.drop.split(",")}
    kept = [layer for layer in range(config.layers) if layer not in dropped]
    tensors = {}
    for name in source.names():
        if not name.startswith("model.layers."):
            tensors[name] = source.tensor(name).clone()
    for new, old in enumerate(kept):
        prefix = f"model.layers.{old}."
        for name in source.names():
            if name.startswith(prefix):
                tensors[f"model.layers.{new}.{name.removeprefix(prefix)}"] = source.tensor(name).clone()
    given.folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, given.folder / "model.safetensors")
    raw = config_json(replace(config, layers=len(kept)))
    (given.folder / "config.json").write_text(json.dumps(raw, indent=1))
    (given.folder / "tokenizer.json").write_text(source.tokenizer.to_json())
    print(f"{given.folder}: {len(kept)} of {config.layers} layers")


if __name__ == "__main__":
    main()
