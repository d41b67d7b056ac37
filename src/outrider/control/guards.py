"""Every tuned number of the planner, each with the measurement that set it. tests/control/test_guards.py counts them.

Numbers that a user may set are fields of `Guards`. Log entries (log/NNN) hold commands and figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

# ------------------------------------------------------------------------------------------ acceptance.py

# Acceptance rate of a draft's first token and of each further one, before a drafter was tried. Slightly above what
# shipped heads reach (.54 to .81, log/077), so that a drafter is tried.
FIRST, NEXT = 0.7, 0.8
COOLING = 0.25  # a degree of temperature divides FIRST by 1 + COOLING: .68 at 0 against .57 at 0.7 (log/077)
PRIOR_WEIGHT = (
    2.0  # steps that the starting point of an estimate counts for: 4 costs new texts 2 to 4 % (log/072)
)
SEQUENCE_MEMORY = (
    12  # steps that a sequence's estimate averages over: texts alternate within 10 to 20 (log/049)
)
DRAFTER_MEMORY = 200  # the same of the prior over all sequences: requests change slowly (log/049)
RECOVERY = 0.02  # share of the way back to NEXT after a draft accepted as far as it went (log/053)
# Part of the standard deviation between sequences that a shared tree must earn as well: sequences with low acceptance
# finish last, in a batch that has shrunk. Without it, 4 to 16 sequences lose 2 to 5 % (log/069).
CAUTION = 0.5

# ------------------------------------------------------------------------------------------ trees.py

# Acceptance of the second choice where the first was rejected, and of each later one where those before it were: .55
# and .4 were measured (log/060).
SECOND = 0.5
TYPICAL = 0.73  # acceptance of first choices that the captured trees are shaped for (log/060)

# ------------------------------------------------------------------------------------------ planner.py

# Expected gain before drafting begins or the drafter changes; it ends where no gain is left. Costs are known to 3 to
# 5 % (log/065).
MARGIN = 0.05
# Tokens that count as written when a request's slowdown is computed: two steps are no tail (log/079).
GRACE = 8
PROBE_INTERVAL = 24  # plain steps without a draft before one is tried again (log/053)
PROBE_SHARE = 0.005  # of the time, at most, for probes: half of the hundredth that "never slower" leaves
BASELINE_INTERVAL = (
    100  # drafting steps between two plain ones that are measured: costs 0.3 % at 1.5x (log/077)
)
# Steps that a plan without drafts is kept at most, and half of it one with drafts where planning would hold up the
# device: a plan for 32 sequences takes as long as half a step of a 1.5B model (log/067, log/077).
HOLD = 8

# ------------------------------------------------------------------------------------------ costs.py

KEEP = 0.9  # weight of the known time against a new measurement: single steps vary by 5 to 20 % (log/065)
KNOWN_AFTER = 8  # steps of one size before their time outweighs the measured curve (log/070)
UNMEASURED_ROW = 0.05  # of a step, for a row whose cost is unknown; low, so that it gets measured (log/006)

# ------------------------------------------------------------------------------------------ prefill.py

CROWDED = 0.5  # waiting prompts per decoding sequence, above which prefill gets more of a step (log/078)
BURST_STEPS = 2  # longest steps in which a burst of prompts is prefilled at once (log/078)
FEW_DECODING = 16  # sequences up to which prompts arrive one at a time (log/078)


@dataclass(frozen=True, slots=True)
class Guards:
    """Bounds on what the planner may decide. The first four are settings of the same name."""

    max_batch: int | None = (
        None  # sequences of a step above which nothing is drafted; None: measured costs decide
    )
    max_depth: int = 15  # of a draft: the longest captured chain
    max_temperature: float = 1.5  # above, fewer than 1 in 5 draft tokens is accepted (log/052)
    # "throughput": most tokens per second of all sequences together. "latency": least mean time per token, so that a
    # sequence with little acceptance counts more.
    objective: str = "throughput"
    # Time per token of a request, relative to plain decoding, up to which other requests' drafts may slow it down: a
    # bound on p99 (goal 1.15x).
    max_slowdown: float = 1.15
    # Time that prefill may add to a step with decoding sequences, relative to the step without it, and the seconds a
    # prompt may wait before this bound grows in proportion. Set per device (settings.py).
    prefill_slowdown: float = inf
    prefill_wait: float = 1.0
