"""Every tuned number of the planner, with what set it. tests/control/test_guards.py counts them.

Numbers that a user may set are fields of `Guards`. Log entries (log/NNN) hold commands and figures. "Flat": half of
it and twice as much bring the same within the spread of log/088.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

# ------------------------------------------------------------------------------------------ acceptance.py

# Acceptance rate of a draft's first token and of each further one, before a drafter was tried. Shipped heads reach .54
# to .81 for the first, by task (log/077).
FIRST, NEXT = 0.7, 0.8
# A degree of temperature divides FIRST by 1 + COOLING: a head has .68 at temperature 0 and .57 at 0.7 (log/077).
COOLING = 0.25
# Steps that the starting point of an estimate counts for, two instead of four (log/072), until sequences have ended and
# say how much they differ; at least so many then, too.
PRIOR_WEIGHT = 2.0
# Steps that a sequence's estimate averages over (log/049), and the time of prompts beside decoding on a CPU (log/118).
SEQUENCE_MEMORY = 12
DRAFTER_MEMORY = 200  # the same of the prior over all sequences; flat (log/088)
# Share of the way back to NEXT after a draft that was accepted as far as it went. Without it drafts bring less; more of
# it brings nothing on the half of the prompts that decided (log/088).
RECOVERY = 0.02
# Part of the standard deviation between sequences that a shared tree must earn as well: sequences with low acceptance
# finish last, in a batch that has shrunk. One deviation loses 4 % of traffic, none brings the same (log/088).
CAUTION = 0.5

# ------------------------------------------------------------------------------------------ trees.py

# Acceptance of the second choice where the first was rejected, and of each later one where those before it were. Flat
# (log/088).
SECOND = 0.5
# Acceptance of first choices that the captured trees are shaped for; the same trees up to 0.9 (log/088).
TYPICAL = 0.73

# ------------------------------------------------------------------------------------------ planner.py

# Expected gain before drafting begins or the drafter changes; it ends where no gain is left. Twice as much brings
# less (log/088).
MARGIN = 0.05
# Tokens that count as written when a request's slowdown is computed: two steps are no tail. Flat (log/088).
GRACE = 8
PROBE_INTERVAL = 24  # plain steps without a draft before one is tried again; flat (log/088)
# Part of the time that probes take at most: half of the hundredth that "never slower" leaves. On a CPU plans and scores
# of lookup are made as often as takes that much (log/118).
PROBE_SHARE = 0.005
BASELINE_INTERVAL = 100  # drafting steps between two plain ones that are measured; flat (log/088)
# Steps that a plan without drafts is kept at most, and half of it a plan with drafts where planning would hold up the
# device. Four bring a little less, 16 the same (log/088). A plan without drafts is kept four times as long there, and
# on a CPU, where a copy drops it (log/118).
HOLD = 8

# ------------------------------------------------------------------------------------------ costs.py

KEEP = 0.9  # weight of the known time against a new measurement: 0.95 brings less (log/088)
KNOWN_AFTER = 8  # steps of one size before their time outweighs the measured curve (log/058); flat (log/088)
UNMEASURED_ROW = 0.05  # of a step, for a row of unknown cost: low, so that it gets measured; flat (log/088)

# ------------------------------------------------------------------------------------------ prefill.py

CROWDED = 0.5  # waiting prompts per decoding sequence, above which prefill gets more of a step (log/078)
BURST_STEPS = 2  # longest steps in which a burst of prompts is prefilled at once (log/078)
FEW_DECODING = 16  # sequences up to which prompts arrive one at a time; flat (log/088)


@dataclass(frozen=True, slots=True)
class Guards:
    """Bounds on what the planner may decide. The first four are settings of the same name."""

    max_batch: int | None = None  # sequences above which nothing is drafted; None: measured costs decide
    max_depth: int = 15  # of a draft: the longest captured chain
    max_temperature: float = 1.5  # above it nothing is drafted, nor without it (log/088)
    # "throughput": most tokens per second of all sequences together. "latency": least mean time per token, so that a
    # sequence with little acceptance counts more.
    objective: str = "throughput"
    # Time per token of a request, relative to plain decoding, up to which other requests' drafts may slow it down: a
    # bound on p99 (goal 1.15x).
    max_slowdown: float = 1.15
    # Time that prefill may add to a step with decoding sequences, relative to the step without it, and the seconds a
    # prompt may wait before this bound grows in proportion. Set per device (engine/placement.py).
    prefill_slowdown: float = inf
    prefill_wait: float = 1.0
