"""Kinds of reasons for the planner's decisions, as the step record, logs, answers and /metrics name them."""

from __future__ import annotations

from outrider.types import Reason

AUTO = Reason("auto")  # left to measurement; never leaves the planner
PREFILL = Reason("prefill")
OFF = Reason("off")
BASELINE = Reason("baseline")
NOTHING_FOUND = Reason("nothing found")

# Every kind that a decision may have, and what it means.
KINDS = {
    "pays": "a draft is expected to pay",
    "probe": "a drafter is tried after a while without drafts",
    "asked": "the request fixed it",
    "below break-even": "a draft would cost more than it brings",
    "slowdown": "drafts would slow down a request whose time per token is at its bound",
    "nothing found": "lookup has nothing to propose",
    "batch": "more sequences share the step than may draft",
    "temperature": "the temperature is above the bound for drafting",
    "baseline": "a plain step, to measure what plain decoding takes",
    "unmeasured": "plain steps of this size have not been measured yet",
    "off": "speculation is off",
    "prefill": "the prompt is still being prefilled",
}
