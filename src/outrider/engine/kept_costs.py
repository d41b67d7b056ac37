"""What passes cost here, kept from one start to the next: one file for each model, machine, settings and version.

Only a CPU's passes are: captured steps are measured while they are captured, which every start does anyway.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

from outrider.control.costs import CostModel
from outrider.control.planner import Planner
from outrider.draft.names import Part
from outrider.engine.certificate import package_version, processor
from outrider.engine.runner import EagerRunner, Runner
from outrider.model.decoder import Decoder, Model
from outrider.settings import Settings, cache_folder

log = logging.getLogger(__name__)

FOLDER = "OUTRIDER_COSTS"  # the variable that names another folder; empty: nothing is kept
STEPS = 64  # after which what they taught is written down
CHECKED = 8  # rows, at most, of the pass that is held against what is kept
FITS = 1.25  # times as long or as short, against a pass of one row, that the checked one may be
MOST_ROWS = 1 << 12  # of a pass that anybody may have written down


class KeptCosts:
    """The file of one engine, and the cost model that it is for."""

    def __init__(self, file: Path | None, about: Mapping[str, Any], costs: CostModel) -> None:
        self.file, self.about, self.costs = file, dict(about), costs
        self.written = 0  # steps that had been learned from by then

    @classmethod
    def of(cls, model: Decoder, settings: Settings, drafts: Seq[Part], costs: CostModel) -> KeptCosts:
        config = model.config
        shape = {name: value for name, value in asdict(config).items() if name not in ("raw", "eos_ids")}
        about = {
            "version": package_version("outrider"),
            "processor": processor(),
            "threads": settings.threads,
            "kernels": model.kernels.name,
            "weights": settings.weights,
            "draft": [[f"{part.kind} {part.text}" for part in drafts], settings.draft_vocabulary],
            "draft_weights": settings.draft_weights,
            "model": shape,
        }
        folder = os.environ.get(FOLDER, str(cache_folder() / "costs"))
        text = json.dumps(about, sort_keys=True, default=str)
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        return cls(Path(folder).expanduser() / f"{name}.json" if folder else None, json.loads(text), costs)

    def recall(self, measure: Callable[[int], float]) -> bool:
        """Take up what was kept, if it fits: passes of two and of a few rows take as many times one of a single row as
        they did then. Whatever else the machine does slows all down, so all is taken at the pace of now.
        """
        kept = self._read()
        if kept is None:
            return False
        curve, per_level = kept
        few, alone = sorted(n for n in curve if 1 < n <= CHECKED), measure(1)
        for rows in dict.fromkeys((*few[:1], *few[-1:])):
            grown = measure(rows) / alone / (curve[rows] / curve[1])
            if not 1 / FITS <= grown <= FITS:
                log.debug(
                    "step costs are measured anew: those in %s no longer fit (%d rows: %.2f times as long)",
                    *(self.file, rows, grown),
                )
                return False
        pace = alone / curve[1]
        self.costs.curve.update((n, pace * seconds) for n, seconds in curve.items())
        self.costs.per_level.update((name, pace * seconds) for name, seconds in per_level.items())
        return True

    def keep(self, always: bool = False) -> None:
        """Write down what is known by now, if there is something new. Nobody is answered meanwhile."""
        if self.file is None or not (always or self.costs.steps >= self.written + STEPS):
            return
        curve = self.costs.known_curve()
        if 1 not in curve:  # nothing to hold a check against
            return
        self.written = self.costs.steps
        kept = {"about": self.about, "curve": curve, "per_level": self.costs.per_level}
        own = self.file.with_name(f"{self.file.name}.{os.getpid()}")  # another process may write, too
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            own.write_text(json.dumps(kept, indent=1))
            own.replace(self.file)
        except OSError as error:
            log.info("costs are not kept: %s", error)

    def _read(self) -> tuple[dict[int, float], dict[str, float]] | None:
        """Seconds of passes by rows, one row among them, and of drafts' levels by drafter."""
        if self.file is None:
            return None
        try:
            kept = json.loads(self.file.read_text())
            if kept["about"] != self.about:
                return None
            curve = {int(rows): float(seconds) for rows, seconds in kept["curve"].items()}
            per_level = {str(name): float(seconds) for name, seconds in kept["per_level"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):  # none yet, or a damaged one
            return None
        sound = all(0 < rows <= MOST_ROWS and isfinite(s) and s > 0 for rows, s in curve.items())
        sound = sound and all(isfinite(s) and s >= 0 for s in per_level.values())
        return (curve, per_level) if sound and 1 in curve else None


def recall_costs(
    model: Model, settings: Settings, drafts: Seq[Part], planner: Planner, runner: Runner
) -> KeptCosts | None:
    """Take up what was kept; None where steps are captured, or nothing is drafted."""
    if type(runner) is not EagerRunner or not isinstance(model, Decoder) or planner.default == "none":
        return None
    kept = KeptCosts.of(model, settings, drafts, planner.costs)
    kept.recall(runner.measure_pass)
    return kept
