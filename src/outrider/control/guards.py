"""Every tuned number of the planner, with what set it. tests/control/test_guards.py counts them.

Numbers that a user may set are fields of `Guards`. Log entries (log/NNN) hold commands and figures. "Carried over
(log/086)": the planner before this one had the number, and no log entry measures it by itself.
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
PRIOR_WEIGHT = 2.0  # steps that the starting point of an estimate counts for: two instead of four (log/072)
SEQUENCE_MEMORY = 12  # steps that a sequence's estimate averages over (log/049)
DRAFTER_MEMORY = 200  # the same of the prior over all sequences; carried over (log/086)
# Share of the way back to NEXT after a draft that was accepted as far as it went; carried over (log/086).
RECOVERY = 0.02
# Part of the standard deviation between sequences that a shared tree must earn as well: sequences with low acceptance
# finish last, in a batch that has shrunk. One deviation in log/017 and log/074; half is carried over (log/086).
CAUTION = 0.5

# ------------------------------------------------------------------------------------------ trees.py

# Acceptance of the second choice where the first was rejected, and of each later one where those before it were. The
# planner before this one had .55 and .4 (log/086).
SECOND = 0.5
TYPICAL = 0.73  # acceptance of first choices that the captured trees are shaped for; carried over (log/086)

# ------------------------------------------------------------------------------------------ planner.py

# Expected gain before drafting begins or the drafter changes; it ends where no gain is left. Carried over (log/086).
MARGIN = 0.05
# Tokens that count as written when a request's slowdown is computed: two steps are no tail. 16 in log/079; 8 was set
# together with other changes (log/086).
GRACE = 8
PROBE_INTERVAL = 24  # plain steps without a draft before one is tried again; carried over (log/086)
PROBE_SHARE = 0.005  # of the time, at most, for probes: half of the hundredth that "never slower" leaves
BASELINE_INTERVAL = 100  # drafting steps between two plain ones that are measured; carried over (log/086)
# Steps that a plan without drafts is kept at most, four times as many where planning would hold up the device, and half
# of it a plan with drafts there. Four steps in log/058 and log/077; 8 was not measured by itself (log/086).
HOLD = 8

# ------------------------------------------------------------------------------------------ costs.py

KEEP = 0.9  # weight of the known time against a new measurement; carried over (log/086)
KNOWN_AFTER = 8  # steps of one size before their time outweighs the measured curve; carried over (log/086)
UNMEASURED_ROW = 0.05  # of a step, for a row of unknown cost: low, so that it gets measured (log/086)

# ------------------------------------------------------------------------------------------ prefill.py

CROWDED = 0.5  # waiting prompts per decoding sequence, above which prefill gets more of a step (log/078)
BURST_STEPS = 2  # longest steps in which a burst of prompts is prefilled at once (log/078)
FEW_DECODING = 16  # sequences up to which prompts arrive one at a time; carried over (log/086)


@dataclass(frozen=True, slots=True)
class Guards:
    """Bounds on what the planner may decide. The first four are settings of the same name."""

    max_batch: int | None = None  # sequences above which nothing is drafted; None: measured costs decide
    max_depth: int = 15  # of a draft: the longest captured chain
    max_temperature: float = 1.5  # above it nothing is drafted; carried over (log/086)
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
