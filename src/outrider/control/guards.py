"""Bounds on what the planner may decide: settings, each with its reason. One set, whatever the device."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from outrider.types import SamplingParams

# Sampling that leaves out so little is as good as unfiltered.
FLAT_TOP_K, FLAT_TOP_P, FLAT_MIN_P = 200, 0.98, 0.01
FEW = 16  # sequences


@dataclass(frozen=True, slots=True)
class Guards:
    # Sequences of a step above which nothing is drafted: the step is full of real work. None: what is measured decides.
    max_batch: int | None = None
    tree_batch: int = 4  # sequences up to which a step has rows to spare for a tree
    max_temperature: float = 1.5  # above, hardly any draft is accepted
    # The same where sampling leaves out next to nothing: the tail of unlikely tokens grows with temperature, and no
    # draft guesses which of them is drawn.
    flat_temperature: float = 1.3
    max_depth: int = 15  # of a draft; how deep pays is for expectation to say
    # Drafts of a request, after which one that still gains less than it costs is probed less often: its text is not
    # what the drafter knows.
    patience: int = 24
    patience_share: float = 0.5  # of the time for probes, that such a request has
    # What a request's tokens may take, in times of what plain decoding takes, so that others draft: a bound on p99 time
    # per token. A step that would stretch further is not made while somebody is beyond it. Among more sequences than
    # FEW it is larger in proportion: what one loses, as many more gain.
    max_stretch: float = 1.15
    # Tokens of a request that count as written when its stretch is looked at: two steps are no tail.
    grace: int = 16
    # What a step may take, in times of a plain one, to draft for a request of which no draft was right so far. That is
    # for drafters that are scored on what is verified anyway: nothing is learned by trying deeper.
    unproven_stretch: float = 1.1
    # Levels of the first draft for a text by a drafter that takes passes. Every accepted token allows one more, and a
    # rejected draft halves those. A text that is not what the drafter knows is found out at the least cost.
    start_depth: int = 1
    # A draft token beside prompt rows, in times of what one is worth elsewhere: whoever is answered meanwhile waits for
    # those rows at every step.
    worth_beside_prompts: float = 2.0
    # What such a step may take, in times of one without drafts: first tokens wait for it.
    hold_up: float = 1.3
    # "throughput": most tokens per second of all sequences together. "latency": least time per token, on average over
    # sequences, so that one with little acceptance counts more.
    objective: str = "throughput"
    # Speed-up to expect before drafting begins; it ends where none is left. Costs are known to a few percent.
    break_even: float = 1.05
    # Of what another drafter promises, that a sequence leaves the one it has for: estimates are no better.
    switch: float = 1.05
    # Steps after which one is plain although drafts pay: what plain decoding takes here and now is measured, never
    # extrapolated.
    baseline_interval: int = 100

    tree_cost: float = 1.1  # of a chain's step, at most, for a eager tree of twice its rows
    probe_depth: int = 2  # of a chain: it shows both rates, of the first token and of the next
    costly_probe: float = 1.3  # plain steps' time above which a probe takes the smallest tree instead
    probe_interval: float = 24  # plain steps' time without a draft before one is tried
    probe_share: float = 0.002  # of the time, at most, for probes where nothing is drafted
    spare_probe_share: float = 0.01  # the same where another drafter pays
    # Of what is left of the answers, for one probe longer than a plain step.
    probe_answer_share: float = 0.005
    min_trials: float = 46  # drafts of a drafter before sequences are taken to differ
    # In which drafting must earn the time that a drafter needs to catch up, until it is known how long answers are.
    payback_steps: float = 32

    # What prompt rows may add to a step beside decoding sequences, in times of what it takes without them: a bound on
    # the time between two tokens. It is raised in proportion once a prompt has waited `prefill_wait` seconds.
    prefill_stretch: float = inf
    prefill_wait: float = 1.0
    # Captured steps, as long as may be, in which a burst of prompts is read whatever that bound: who decodes pauses so
    # often, not in every step of many, and soon everybody decodes.
    prefill_at_once: int = 2
    min_prompt_rows: int = 8  # beside decoding sequences: fewer take a CPU as long as so many

    def stretch(self, sequences: int) -> float:
        """The bound of `max_stretch` among so many."""
        return 1 + (self.max_stretch - 1) * max(1.0, sequences / FEW)


def is_flat(params: SamplingParams) -> bool:
    """Whether next to no token is left out before one is drawn."""
    wide = params.top_k == 0 or params.top_k > FLAT_TOP_K
    return wide and params.top_p > FLAT_TOP_P and params.min_p < FLAT_MIN_P
