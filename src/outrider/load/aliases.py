"""Models that have a short name: the built-in one and files of the hub, with what a user must know before a download.

Sizes are of the file that is fetched. A GGUF file keeps its number format in memory, so its size is nearly what its
weights take there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from outrider.load import hub
from outrider.load.builtin import SMOLLM2, BuiltIn
from outrider.load.hub import HubId

NEAR = 3  # suggestions, at most


@dataclass(frozen=True, slots=True)
class HubModel:
    alias: str
    about: str
    hub: HubId
    parameters: int
    bytes: int  # of the download, to three digits
    pair: str | None = None  # the shipped draft head for it
    sampling: Mapping[str, float] = field(
        default_factory=dict
    )  # as its makers publish, which the file does not say

    def place(self, cache: Path) -> Path | None:
        """Where the hub's library put it; None before it was fetched. `cache` is for built-in models."""
        for snapshot in hub.snapshots(self.hub.repo):
            path = snapshot if self.hub.file is None else snapshot / self.hub.file
            if path.exists():
                return path
        return None

    def present(self, cache: Path) -> bool:
        return self.place(cache) is not None


Alias = BuiltIn | HubModel

QWEN2_5 = {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
QWEN3 = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
LLAMA3 = {"temperature": 0.6, "top_p": 0.9}
M, G = 10**6, 10**9


def _gguf(
    alias: str,
    about: str,
    repo: str,
    file: str,
    parameters: float,
    size: float,
    sampling: Mapping[str, float],
) -> HubModel:
    return HubModel(alias, about, HubId(repo, file), int(parameters), int(size), sampling=sampling)


# fmt: off
HUB_MODELS = (
    _gguf("smollm2-360m", "SmolLM2 360M Instruct, 8-bit (Apache-2.0)", "HuggingFaceTB/SmolLM2-360M-Instruct-GGUF",
          "smollm2-360m-instruct-q8_0.gguf", 362 * M, 386 * M, SMOLLM2.sampling),
    _gguf("qwen2.5-0.5b", "Qwen2.5 0.5B Instruct, 4-bit (Apache-2.0)", "Qwen/Qwen2.5-0.5B-Instruct-GGUF",
          "qwen2.5-0.5b-instruct-q4_k_m.gguf", 494 * M, 491 * M, QWEN2_5),
    _gguf("qwen3-0.6b", "Qwen3 0.6B, 8-bit (Apache-2.0)", "Qwen/Qwen3-0.6B-GGUF",
          "Qwen3-0.6B-Q8_0.gguf", 596 * M, 639 * M, QWEN3),
    _gguf("llama-3.2-1b", "Llama 3.2 1B Instruct, 4-bit (Llama 3.2 licence)", "bartowski/Llama-3.2-1B-Instruct-GGUF",
          "Llama-3.2-1B-Instruct-Q4_K_M.gguf", 1.24 * G, 808 * M, LLAMA3),
    _gguf("smollm2-1.7b", "SmolLM2 1.7B Instruct, 4-bit (Apache-2.0)", "HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF",
          "smollm2-1.7b-instruct-q4_k_m.gguf", 1.71 * G, 1.06 * G, SMOLLM2.sampling),
    _gguf("qwen2.5-1.5b", "Qwen2.5 1.5B Instruct, 4-bit (Apache-2.0)", "Qwen/Qwen2.5-1.5B-Instruct-GGUF",
          "qwen2.5-1.5b-instruct-q4_k_m.gguf", 1.54 * G, 1.12 * G, QWEN2_5),
    HubModel("qwen2.5-coder-1.5b", "Qwen2.5 Coder 1.5B Instruct, 4-bit (Apache-2.0)",
             HubId("Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"),
             int(1.54 * G), int(1.12 * G), "qwen2.5-coder-1.5b-eagle", QWEN2_5),
    _gguf("qwen3-1.7b", "Qwen3 1.7B, 8-bit (Apache-2.0)", "Qwen/Qwen3-1.7B-GGUF",
          "Qwen3-1.7B-Q8_0.gguf", 1.72 * G, 1.83 * G, QWEN3),
    HubModel("gemma-3-1b", "Gemma 3 1B (Gemma terms, HF_TOKEN), bfloat16, CPU only",
             HubId("google/gemma-3-1b-it"), int(1.0 * G), int(2.0 * G)),
    _gguf("llama-3.2-3b", "Llama 3.2 3B Instruct, 4-bit (Llama 3.2 licence)", "bartowski/Llama-3.2-3B-Instruct-GGUF",
          "Llama-3.2-3B-Instruct-Q4_K_M.gguf", 3.21 * G, 2.02 * G, LLAMA3),
    _gguf("qwen2.5-3b", "Qwen2.5 3B Instruct, 4-bit (Qwen research licence)", "Qwen/Qwen2.5-3B-Instruct-GGUF",
          "qwen2.5-3b-instruct-q4_k_m.gguf", 3.09 * G, 2.10 * G, QWEN2_5),
    _gguf("qwen3-4b", "Qwen3 4B, 4-bit (Apache-2.0)", "Qwen/Qwen3-4B-GGUF",
          "Qwen3-4B-Q4_K_M.gguf", 4.02 * G, 2.50 * G, QWEN3),
    _gguf("qwen2.5-7b", "Qwen2.5 7B Instruct, 4-bit (Apache-2.0)", "bartowski/Qwen2.5-7B-Instruct-GGUF",
          "Qwen2.5-7B-Instruct-Q4_K_M.gguf", 7.62 * G, 4.68 * G, QWEN2_5),
    _gguf("llama-3.1-8b", "Llama 3.1 8B Instruct, 4-bit (Llama 3.1 licence)",
          "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF", "Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf", 8.03 * G, 4.92 * G,
          LLAMA3),
    _gguf("qwen3-8b", "Qwen3 8B, 4-bit (Apache-2.0)", "Qwen/Qwen3-8B-GGUF",
          "Qwen3-8B-Q4_K_M.gguf", 8.19 * G, 5.03 * G, QWEN3),
)
# fmt: on
ALIASES: dict[str, Alias] = {model.alias: model for model in (SMOLLM2, *HUB_MODELS)}


def near_aliases(name: str) -> list[str]:
    """Aliases that may be meant: those with the same letters and digits in front, else those spelt nearly so.

    Punctuation does not count, so that Ollama's `llama3.2:1b` finds `llama-3.2-1b`.
    """
    plain = {_letters(alias): alias for alias in ALIASES}
    asked = _letters(name[:99])
    found = [alias for letters, alias in plain.items() if len(asked) > 2 and letters.startswith(asked)]
    found = found or [alias for letters, alias in plain.items() if asked.startswith(letters)]
    return found[:NEAR] or [plain[one] for one in get_close_matches(asked, plain, n=NEAR, cutoff=0.8)]


def did_you_mean(name: str) -> str:
    """The end of a message about an unknown model."""
    if near := near_aliases(name):
        return f"; did you mean {' or '.join(map(repr, near))}?"
    return "; outrider models lists the names that are known"


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())
