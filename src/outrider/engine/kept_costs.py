"""What passes cost here, kept from one start to the next: one file for each model, machine, settings and version.

Only a CPU's passes are: captured steps are measured while they are captured, which every start does anyway.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outrider.control.costs import CostModel
from outrider.control.planner import Planner
from outrider.draft.names import Part
from outrider.engine.certificate import package_version, processor
from outrider.engine.runner import EagerRunner, Runner
from outrider.load.json_files import plain_bytes
from outrider.model.decoder import Decoder, Model
from outrider.settings import Settings, cache_folder

log = logging.getLogger(__name__)

FOLDER = "OUTRIDER_COSTS"  # the variable that names another folder; empty: nothing is kept
STEPS = 64  # after which what they taught is written down
CHECKED = 8  # rows, at most, of the pass that is held against what is kept
FITS = 1.25  # times as long or as short, against a pass of one row, that the checked one may be
MOST_ROWS = 1 << 12  # of a pass that anybody may have written down
MAX_BYTES = 1 << 20  # of a file; a sound one has a few thousand
SECONDS = (1e-8, 1e4)  # that a pass can take
ROOT = 0  # the user id whose files may be trusted besides one's own


class KeptCosts:
    """The file of one engine, and the cost model that it is for."""

    def __init__(self, file: Path | None, about: Mapping[str, Any], costs: CostModel) -> None:
        self.file, self.about, self.costs = file, dict(about), costs
        self.written = 0  # steps that had been learned from by then
        self.unwritten = False  # the last attempt failed

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
            "draft": [f"{part.kind} {part.text}" for part in drafts],
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
            self.unwritten = False
        except OSError as error:
            with contextlib.suppress(OSError):
                own.unlink()
            if not self.unwritten:  # every later attempt would log the same
                log.info("costs are not kept: %s", error)
            self.unwritten = True

    def _read(self) -> tuple[dict[int, float], dict[str, float]] | None:
        """Seconds of passes by rows, one row among them, and of drafts' levels by drafter."""
        if self.file is None:
            return None
        try:
            kept = json.loads(_own_text(self.file))
            if kept["about"] != self.about:
                raise ValueError("it is of another model, machine or version")
            curve = {int(rows): float(seconds) for rows, seconds in kept["curve"].items()}
            per_level = {str(name): float(seconds) for name, seconds in kept["per_level"].items()}
            least, most = SECONDS
            if not all(0 < rows <= MOST_ROWS and least <= s <= most for rows, s in curve.items()):
                raise ValueError("no pass has these rows or takes this long")
            if not all(0 <= s <= most for s in per_level.values()):
                raise ValueError("no draft takes this long")
            curve[1]  # what the others are compared with
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as e:
            log.info("costs kept in %s are ignored: %s: %.200s", self.file, type(e).__name__, e)
            return None
        return curve, per_level


def _own_text(file: Path) -> str:
    """The text of a plain file that this user or root wrote."""
    if file.stat().st_uid not in (os.geteuid(), ROOT):
        raise ValueError("another user wrote it")
    return plain_bytes(file, MAX_BYTES).decode()


def recall_costs(
    model: Model, settings: Settings, drafts: Seq[Part], planner: Planner, runner: Runner
) -> KeptCosts | None:
    """Take up what was kept; None where steps are captured, or nothing is drafted."""
    if type(runner) is not EagerRunner or not isinstance(model, Decoder) or planner.default == "none":
        return None
    kept = KeptCosts.of(model, settings, drafts, planner.costs)
    kept.recall(runner.measure_pass)
    return kept
