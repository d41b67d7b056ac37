"""Flags that bound what the planner may decide. Reasons: control/guards.py; meaning: docs/speculation.md."""

from __future__ import annotations

from outrider.cli.flag import Flag


def _auto_or_whole(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal():
        raise ValueError(f"{text!r} is neither auto nor a whole number")
    return int(text)


PLANNER = (
    Flag(
        "draft_max_batch",
        str,
        "Draft only in steps of up to N sequences; auto: what is measured decides.",
        _auto_or_whole,
        "auto|N",
        default="auto",
    ),
    Flag("tree_max_batch", int, "Draft trees only in steps of up to so many sequences.", metavar="N"),
    Flag("draft_max_depth", int, "Deepest draft; how deep pays is measured.", metavar="N"),
    Flag("draft_max_temperature", float, "Draft nothing for hotter requests.", metavar="F"),
    Flag(
        "draft_flat_temperature",
        float,
        "The same where top-k, top-p and min-p leave out next to nothing.",
        metavar="F",
    ),
    Flag(
        "draft_break_even",
        float,
        "Speed-up to expect before drafting begins; it ends at 1.",
        metavar="F",
    ),
    Flag(
        "draft_patience",
        int,
        "Drafts of a request after which one that does not gain is probed less often.",
        metavar="N",
    ),
    Flag(
        "draft_max_stretch",
        float,
        "Most that a request's tokens may take for others' drafts, in times of plain decoding; beyond 16 of them more.",
        metavar="F",
    ),
    Flag("draft_probe_share", float, "Share of the time for probes while nothing is drafted.", metavar="F"),
    Flag(
        "draft_baseline_interval",
        int,
        "Drafting steps after which a plain one is measured.",
        metavar="N",
    ),
    Flag(
        "release_draft",
        bool,
        "Give up a draft that has not paid for some thousand steps, and free its memory.",
        spelled=("--release-draft/--keep-draft",),
    ),
    Flag(
        "objective",
        str,
        "Most tokens per second of all, or least time per token of each.",
        metavar="throughput|latency",
    ),
)
