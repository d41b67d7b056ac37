"""Measured costs of a CPU's passes, kept from one start to the next: a file for each model, machine, settings and
version. Captured steps of a GPU are measured at every start, when they are captured.
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

from outrider.control.costs import EagerCosts
from outrider.control.experts import Known, checked
from outrider.draft.names import Part
from outrider.engine.certificate import package_version, processor
from outrider.load.json_files import plain_bytes
from outrider.model.decoder import Decoder
from outrider.settings import Settings, cache_folder

log = logging.getLogger(__name__)

FOLDER = "OUTRIDER_COSTS"  # the variable that names another folder; empty: nothing is kept
STEPS = 64  # new steps after which the file is written again
CHECKED = 8  # most rows of a pass that checks the file
FITS = 1.25  # largest ratio between a checked pass and the file, both relative to a pass of one row
MOST_ROWS = 1 << 12  # more rows in a file are an error
MAX_BYTES = 1 << 20  # of a file; a valid one has a few thousand
SECONDS = (1e-8, 1e4)  # shortest and longest pass that a file may hold
ROOT = 0  # the user id whose files are trusted besides one's own


class KeptCosts:
    """The file of one engine, and the cost model that it is for."""

    def __init__(self, file: Path | None, about: Mapping[str, Any], costs: EagerCosts) -> None:
        self.file, self.about, self.costs = file, dict(about), costs
        self.written = 0  # steps in the cost model at the last write
        self.failed = False  # the last write failed

    @classmethod
    def of(cls, model: Decoder, settings: Settings, drafts: Seq[Part], costs: EagerCosts) -> KeptCosts:
        about = {
            "version": package_version("outrider"),
            "processor": processor(),
            "threads": settings.threads,
            "ranks": settings.tensor_parallel,
            "kernels": model.kernels.name,
            "weights": model.formats,
            "kv_cache": str(model.kept),
            "draft": [f"{part.kind} {part.text}" for part in drafts],
            "draft_weights": settings.draft_weights,
            "model": {k: v for k, v in asdict(model.config).items() if k not in ("raw", "eos_ids")},
        }
        folder = os.environ.get(FOLDER, str(cache_folder() / "costs"))
        text = json.dumps(about, sort_keys=True, default=str)
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        return cls(Path(folder).expanduser() / f"{name}.json" if folder else None, json.loads(text), costs)

    def recall(self, measure: Callable[[int], float]) -> bool:
        """Takes the kept costs if they still fit: passes of two and of a few rows must cost as much, relative to a pass
        of one row, as they did. Other load slows all passes alike, so kept times are scaled to the present speed.
        """
        kept = self._read()
        if kept is None:
            return False
        curve, per_draft, per_level, experts = kept
        few, alone = sorted(n for n in curve if 1 < n <= CHECKED), measure(1)
        for rows in dict.fromkeys((*few[:1], *few[-1:])):
            grown = measure(rows) / alone / (curve[rows] / curve[1])
            if not 1 / FITS <= grown <= FITS:
                what = "step costs are measured anew: those in %s no longer fit (%d rows: %.2f times as long)"
                log.debug(what, self.file, rows, grown)
                return False
        pace = alone / curve[1]
        for rows, seconds in curve.items():
            self.costs.learn_pass(rows, pace * seconds)
        for known, costs in ((per_draft, self.costs.per_draft), (per_level, self.costs.per_level)):
            costs.update((name, pace * seconds) for name, seconds in known.items())
        if self.costs.experts is not None and experts is not None:
            self.costs.experts.recall(experts)
        return True

    def keep(self, always: bool = False) -> None:
        """Saves the costs if they changed. Call only while the engine is idle."""
        if self.file is None or not (always or self.costs.learned >= self.written + STEPS):
            return
        curve = self.costs.known_curve()
        if 1 not in curve:  # without it, the next start could not check the file
            return
        self.written = self.costs.learned
        drafting = {"per_draft": self.costs.per_draft, "per_level": self.costs.per_level}
        kept = {"about": self.about, "curve": curve, **drafting}
        if self.costs.experts is not None:
            kept["experts"] = self.costs.experts.known()
        # Other processes may write at the same time.
        own = self.file.with_name(f"{self.file.name}.{os.getpid()}")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            own.write_text(json.dumps(kept, indent=1))
            own.replace(self.file)
            self.failed = False
        except OSError as error:
            with contextlib.suppress(OSError):
                own.unlink()
            if not self.failed:  # log the first of several failures
                log.info("costs are not kept: %s", error)
            self.failed = True

    def _read(self) -> tuple[dict[int, float], dict[str, float], dict[str, float], Known | None] | None:
        """Seconds of passes by rows, of drafts and of a level of them by drafter; what is known of experts. None if the
        file is missing or not valid.
        """
        if self.file is None:
            return None
        try:
            if self.file.stat().st_uid not in (os.geteuid(), ROOT):
                raise ValueError("another user wrote it")
            kept = json.loads(plain_bytes(self.file, MAX_BYTES).decode())
            if kept["about"] != self.about:
                raise ValueError("it is of another model, machine or version")
            curve = {int(rows): float(seconds) for rows, seconds in kept["curve"].items()}
            per_draft, per_level = (
                {str(name): float(seconds) for name, seconds in kept[part].items()}
                for part in ("per_draft", "per_level")
            )
            least, most = SECONDS
            if not all(0 < rows <= MOST_ROWS and least <= s <= most for rows, s in curve.items()):
                raise ValueError("no pass has these rows or takes this long")
            if not all(0 <= s <= most for s in (*per_draft.values(), *per_level.values())):
                raise ValueError("no draft takes this long")
            experts = None if self.costs.experts is None else checked(kept["experts"])
            curve[1]  # raises if it is missing: `recall` compares with it
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as e:
            log.info("costs kept in %s are ignored: %s: %.200s", self.file, type(e).__name__, e)
            return None
        return curve, per_draft, per_level, experts
