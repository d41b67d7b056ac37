"""Other engines on the same prompts, through their public APIs. Today: transformers' own `generate`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.errors import OutriderError


@dataclass(slots=True)
class Run:
    """One prompt answered: tokens, the time to the first of them, and the whole time."""

    tokens: list[int]
    first_s: float
    total_s: float

    @property
    def decode_rate(self) -> float:
        """Tokens a second after the first."""
        return (len(self.tokens) - 1) / max(self.total_s - self.first_s, 1e-9)


class _FirstToken:
    """A transformers streamer that only notes when the first new token came."""

    def __init__(self) -> None:
        self.calls = 0
        self.at = 0.0

    def put(self, _: Any) -> None:
        self.calls += 1
        if self.calls == 2:  # the first call hands over the prompt
            self.at = time.perf_counter()

    def end(self) -> None:
        pass


class Transformers:
    name = "transformers"

    def __init__(self, path: Path, threads: int) -> None:
        try:
            import transformers  # an extra, and slow to import
        except ImportError:
            raise OutriderError('this comparison needs transformers: pip install "outrider[hf]"') from None
        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        place = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
        model = transformers.AutoModelForCausalLM.from_pretrained(place[0], dtype=torch.float32, **place[1])
        self.model = model.eval()
        self.version = transformers.__version__

    def greedy(self, prompt: list[int], tokens: int) -> Run:
        """Exactly `tokens` greedy tokens, end-of-text ignored."""
        first = _FirstToken()
        begin = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                do_sample=False, max_new_tokens=tokens, eos_token_id=None, pad_token_id=0, streamer=first,
            )  # fmt: skip
        end = time.perf_counter()
        return Run(out[0, len(prompt) :].tolist(), first.at - begin, end - begin)

    def top_two_gap(self, text: list[int]) -> float:
        """How far apart the two likeliest next tokens are, in logits: the room rounding has."""
        with torch.inference_mode():
            top = self.model(torch.tensor([text])).logits[0, -1].topk(2).values
        return float(top[0] - top[1])
