"""Bounds on what the planner may decide: settings, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Guards:
    # A ragged step of more sequences is full of real work, and its cost by rows is hardly measured. Captured steps
    # are measured for every size before anything is planned, so there measurement decides.
    max_batch: int = 16
    max_temperature: float = 1.5  # above, hardly any draft is accepted
    max_depth: int = 4  # of a ragged draft; an acceptance rate of 0.8 leaves a fifth level to 1 in 3
    tree_batch: int = 4  # sequences up to which a ragged step has rows to spare for a tree
    tree_cost: float = 1.1  # of a chain's step, at most, for a tree of twice its rows
    break_even: float = (
        1.05  # speed-up to expect before a ragged step drafts: costs are known to a few percent
    )
    # Of what another drafter promises, that a sequence leaves the one it has for: estimates are no better.
    switch: float = 1.05
    probe_depth: int = 2  # of a chain: it shows both rates, of the first token and of the next
    costly_probe: float = 1.3  # plain steps' time above which a probe takes the smallest tree instead
    probe_interval: float = 24  # plain steps' time without a draft before one is tried
    probe_share: float = 0.002  # of the time, at most, for probes where nothing is drafted
    spare_probe_share: float = 0.01  # the same where another drafter pays
    # Of what is left of the answers, for one probe longer than a plain step.
    probe_answer_share: float = 0.005
    min_trials: float = 46  # drafts of a drafter before sequences are taken to differ
    payback_steps: float = 32  # in which drafting must earn the time that a drafter needs to catch up

    # What prompt rows may add to a step beside decoding sequences, in times of what it takes without them: a bound on
    # the time between two tokens. It is raised in proportion once a prompt has waited `prefill_wait` seconds.
    prefill_stretch: float = inf
    prefill_wait: float = 1.0
    min_prompt_rows: int = 8  # beside decoding sequences: fewer take a CPU as long as so many

    def depth_at(self, temperature: float) -> int:
        """Less depth as temperature rises: a deep draft is rarely accepted to its end."""
        return self.max_depth - (temperature > 0.7) - (temperature > 1.0)
