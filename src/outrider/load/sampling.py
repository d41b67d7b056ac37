"""How a model's makers sample it: what a checkpoint says of temperature and the like, as defaults.

From generation_config.json, or from a GGUF file's `general.sampling.*`. The files are not ours: a value of the
wrong type or out of range is left out with a warning that names it. What a user gives always wins.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.errors import InvalidRequest
from outrider.types import SamplingParams

# The parameters a model may set; all others are the user's.
NAMES = (
    *("temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
)
GGUF_NAMES = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
GENERATION_CONFIGS = ("auto", "none")  # whether the model's defaults are used
RANDOM_ONLY = ("top_k", "top_p", "min_p")  # mean nothing where the likeliest token is taken


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values by parameter, and where they are written."""

    values: Mapping[str, float] = field(default_factory=dict)
    source: str = "none: Outrider's own are used"

    def under(self, params: SamplingParams, given: Collection[str]) -> SamplingParams:
        """`params` with these defaults for everything but the parameters that were `given`."""
        left: dict[str, Any] = {name: v for name, v in self.values.items() if name not in given}
        return replace(params, **left) if left else params


def from_generation_config(raw: Mapping[str, Any], source: str) -> SamplingDefaults:
    """From generation_config.json. `do_sample: false` means the likeliest token, whatever else it says."""
    asked = {name: raw[name] for name in NAMES if raw.get(name) is not None}
    if raw.get("do_sample") is False:
        asked = {name: value for name, value in asked.items() if name not in RANDOM_ONLY}
        asked["temperature"] = 0
    return _checked(asked, source)


def from_gguf(metadata: Mapping[str, Any], source: str) -> SamplingDefaults:
    return _checked({ours: metadata[key] for key, ours in GGUF_NAMES.items() if key in metadata}, source)


def _checked(asked: Mapping[str, Any], source: str) -> SamplingDefaults:
    values: dict[str, float] = {}
    for name, value in asked.items():
        try:
            values[name] = getattr(SamplingParams(**{name: _fitted(name, value)}), name)
        except InvalidRequest as problem:
            warnings.warn(f"{source}: {problem}; this default is left out", stacklevel=2)
    return SamplingDefaults(values, source) if values else SamplingDefaults()


def _fitted(name: str, value: Any) -> Any:
    """-1 is a common way to write "all" for top_k, and 50.0 a common way to write 50."""
    if name == "top_k" and type(value) is float and value.is_integer():
        value = int(value)
    if name == "top_k" and type(value) is int and value == -1:
        return 0
    # A GGUF file holds 32-bit floats: 0.8999999761581421 was written as 0.9.
    return round(value, 6) if type(value) is float else value
