"""From settings to the planner's bounds."""

from __future__ import annotations

from math import inf

from outrider.control.guards import Guards
from outrider.settings import Settings


def guards_of(settings: Settings) -> Guards:
    """As the user set them; one set for every device."""
    share, usual = settings.draft_probe_share, Guards()
    return Guards(
        max_batch=settings.draft_max_batch,
        tree_batch=settings.tree_max_batch,
        max_depth=settings.draft_max_depth,
        max_temperature=settings.draft_max_temperature,
        flat_temperature=settings.draft_flat_temperature,
        break_even=settings.draft_break_even,
        patience=settings.draft_patience,
        max_stretch=settings.draft_max_stretch,
        probe_share=share,
        spare_probe_share=share / usual.probe_share * usual.spare_probe_share,
        baseline_interval=settings.draft_baseline_interval,
        objective=settings.objective,
        prefill_stretch=settings.prefill_stretch or inf,
        prefill_wait=settings.prefill_wait or usual.prefill_wait,
    )
