"""The table of models that a server offers: each with its draft, its engine's settings and its limits."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from outrider.errors import InvalidRequest, invalid
from outrider.serve.settings import ServeSettings
from outrider.settings import Settings
from outrider.types import SamplingParams


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model of the table. `given`: the parameters that the operator set; the others yield to the model's own."""

    name: str
    source: str  # a folder, a file, an alias or a hub id
    draft: str = "auto"
    params: SamplingParams = field(default_factory=SamplingParams)
    settings: Settings = field(default_factory=Settings)
    serve: ServeSettings = field(default_factory=ServeSettings)  # the model's limits
    given: frozenset[str] = frozenset()

    @property
    def names(self) -> list[str]:
        """What clients may call the model, first the name it is shown by."""
        return list(dict.fromkeys(filter(None, (self.serve.served_name, self.name, self.source))))

    @property
    def shown_names(self) -> list[str]:
        return self.names[: 2 if self.serve.served_name else 1]


def read_model(text: str) -> tuple[str, str]:
    """The name and the source of a model on the command line: `SOURCE` or `NAME=SOURCE`."""
    name, equals, source = text.partition("=")
    if equals and re.fullmatch(r"[\w.:-]+", name) and not Path(text).expanduser().exists():
        if not source:
            raise InvalidRequest(f"{text!r} names no model after the =", "model")
        return name, source
    return shown_name(text), text


def shown_name(source: str) -> str:
    """What clients call a model: a path by its last part, anything else as the operator wrote it."""
    return Path(source).name if source.startswith((".", "/", "~")) else source


def check_table(table: Sequence[ModelSpec]) -> None:
    """Refuses a table in which two models share a name, a folder of kept traffic or an address for events."""
    shown: set[str] = set()
    folders: set[str] = set()
    addresses: set[str] = set()
    for spec in table:
        if taken := shown.intersection(spec.shown_names):
            raise InvalidRequest(
                f"two models are called {min(taken)!r}; name one of them NAME=MODEL", "model"
            )
        shown.update(spec.shown_names)
        if spec.serve.keep_traffic in folders:
            raise InvalidRequest(
                f"two models keep traffic in {spec.serve.keep_traffic}, and tokens of different models must not be "
                "mixed; give each model its own keep_traffic",
                "keep_traffic",
            )
        folders.update(filter(None, [spec.serve.keep_traffic]))
        for name in ("kv_events", "kv_events_replay"):
            if (address := getattr(spec.serve, name)) in addresses:
                raise invalid(name, f"two engines cannot share {address}; give each model its own")
            addresses.update(filter(None, [address]))


def by_name(table: Sequence[ModelSpec]) -> Mapping[str, int]:
    """The position of a model in the table by each of its names. A source that two models share names the first."""
    shown = {name: i for i, spec in enumerate(table) for name in spec.shown_names}
    return {name: i for i, spec in reversed([*enumerate(table)]) for name in spec.names} | shown
