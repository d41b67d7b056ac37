"""Words for the planner's decisions: kinds of reasons, as the step record, logs, answers and /metrics have them."""

from __future__ import annotations

from outrider.types import Reason

AUTO = Reason("auto")  # only the drafter is settled; never leaves the planner
PREFILL = Reason("prefill")
OFF = Reason("off")
BASELINE = Reason("baseline")
NOTHING_FOUND = Reason("nothing found")

# Every kind that a decision may have, and what it means.
KINDS = {
    "pays": "a draft is expected to pay",
    "probe": "a drafter is tried after a while without",
    "asked": "the request fixed it",
    "below break-even": "a draft would cost more than it brings",
    "low gain": "the same, and this request's own drafts have shown it for a while",
    "unproven": "none of this request's drafts was right so far, and trying one would cost much",
    "stretch": "somebody's tokens have taken too long already for a step as long as drafts would make it",
    "nothing found": "lookup has nothing to propose",
    "batch": "more sequences share the step than may draft",
    "temperature": "hotter than drafts are accepted at",
    "flat": "nearly as hot, and sampling leaves out next to nothing",
    "baseline": "a plain step, to measure what plain decoding takes",
    "unmeasured": "plain steps of this size have not been measured yet",
    "off": "speculation is off",
    "prefill": "the prompt is still being read",
}
