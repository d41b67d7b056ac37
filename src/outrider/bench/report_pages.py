"""The results of `outrider audit`, `advise` and `distill` as pages in the look of page.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from outrider.bench.page import (
    Bars,
    Series,
    bars,
    certified,
    chart,
    charts,
    document,
    facts,
    number,
    section,
    table,
)
from outrider.load.cards import Card, Score

Found = Mapping[str, Any]

# ------------------------------------------------------------------------------------------------------------ audit


def audit_page(report: Found, model: str) -> str:
    found = report.get("identity") or report.get("arrivals")
    body = [_identity(found)] if found else []
    body.append(section("Same distribution", _distribution(report.get("distribution", ()))))
    body.append(section("What was audited", certified(report["certificate"])))
    said = audit_headline(found) if found else _distribution_headline(report.get("distribution", ()))
    return document(f"Audit: {model}", said, "".join(body))


def audit_headline(found: Found) -> str:
    drafted = sum(found["drafted"].values())
    verdict = "identical" if not found["differing"] else f"{found['differing']:,} DIFFER"
    verdict = verdict if drafted else "NOTHING WAS PUT TO THE TEST"
    return f"{found['compared']:,} tokens compared, {drafted:,} drafted: {verdict}"


def _identity(found: Found) -> str:
    drafted = {name: count for name, count in found["drafted"].items() if count}
    names = list(drafted)
    rates = [found["accepted"].get(name, 0) / drafted[name] for name in names]
    drawn = [
        bars("Drafted", names, [Bars("drafted", [drafted[n] for n in names])], "tokens"),
        bars("Accepted", names, [Bars("accepted", [100 * rate for rate in rates])], "%"),
    ]
    kinds = found.get("by_way_and_temperature") or found.get("by_kind_and_temperature") or {}
    batches = [[escape(size), number(count)] for size, count in found.get("by_batch", {}).items()]
    wrong = [
        [str(one["prompt"]), f"{one['temperature']:g}", escape(one["method"]), str(one["position"])]
        for one in found["divergences"]
    ]
    counts = {
        name: found.get(name) for name in ("aborted", "together", "logprobs", "differing_logprobs", "seconds")
    }
    return "".join(
        (
            section("Drafts that were put to the test", charts(drawn) if names else ""),
            section("Divergences", table(["~Prompt", "~T", "Method", "~Position"], wrong) if wrong else ""),
            section("Tokens compared", _by_temperature(kinds),
                    table(["Batch", "~Tokens"], batches) if batches else "", facts(counts)),
        )
    )  # fmt: skip


def _by_temperature(kinds: Mapping[str, int]) -> str:
    """From counts by names such as `lookup T=0.7`: a column a temperature."""
    found = {tuple(name.rsplit(" T=", 1)): count for name, count in kinds.items()}
    temperatures = sorted({at for _, at in found}, key=float)
    names = dict.fromkeys(name for name, _ in found)
    rows = [[escape(name), *(number(found.get((name, at), 0)) for at in temperatures)] for name in names]
    return table(["Tokens", *(f"~T={at}" for at in temperatures)], rows) if rows else ""


def _distribution_headline(tests: Sequence[Found]) -> str:
    failed = sum(not one["holds"] for one in tests)
    return f"{len(tests)} tests of the distribution: {'all hold' if not failed else f'{failed} FAIL'}"


def _distribution(tests: Sequence[Found]) -> str:
    rows = [
        [str(one["prompt"]), f"{one['temperature']:g}", f"{one['p_value']:.3g}", _held(one)] for one in tests
    ]
    return table(["~Prompt", "~T", "~p", "Holds"], rows) if rows else ""


def _held(one: Found) -> str:
    return '<span class="met">yes</span>' if one["holds"] else '<span class="missed">no</span>'


# ----------------------------------------------------------------------------------------------------------- advise


def advise_page(report: Found, model: str, said: Sequence[str]) -> str:
    """`said` is the advice in words; its first line is the headline."""
    drafts, what_if = report.get("drafts", ()), report.get("what_if", ())
    words = f"<pre>{escape(chr(10).join(said[1:]))}</pre>" if said[1:] else ""
    body = (
        section("Why", words),
        section("Expected speed-up", charts([_expected(drafts)])),
        section("Acceptance by depth", charts([_by_depth(drafts)])),
        section("All figures", _advised(drafts)),
        section("What if", charts([_what_if(what_if)])),
        section("What was measured", certified(report["certificate"]) if "certificate" in report else ""),
    )
    return document(f"Which draft: {model}", said[0].removesuffix(":"), "".join(body))


def _expected(drafts: Sequence[Found]) -> str:
    """By batch; the error bars hold 90 %."""
    batches = list(dict.fromkeys(one["batch"] for draft in drafts for one in draft["expected"]))
    made = []
    for draft in drafts:
        own = {one["batch"]: one for one in draft["expected"]}
        spans = [(own[b]["low"], own[b]["high"]) if b in own else None for b in batches]
        made.append(Bars(draft["draft"], [own[b]["speedup"] if b in own else None for b in batches], spans))
    return bars("By batch", [f"batch {b}" for b in batches], made, "times plain", 1.0)


def _by_depth(drafts: Sequence[Found]) -> str:
    lines = []
    for draft in drafts:
        known = [one for one in draft["acceptance"] if one["of"]]
        said = [f"depth {one['depth']}, of {one['of']}" for one in known]
        xs = [float(one["depth"]) for one in known]
        lines.append(Series(draft["draft"], xs, [100 * one["rate"] for one in known], said))
    deepest = int(max((x for line in lines for x in line.xs), default=1))
    return chart(
        "By depth, all tasks",
        lines,
        [(float(d), str(d)) for d in range(1, deepest + 1)],
        "depth",
        "% accepted",
    )


def _advised(drafts: Sequence[Found]) -> str:
    rows = [
        [escape(draft["draft"]), str(one["batch"]), str(one["depth"]), f"{one['speedup']:.2f}",
         f"{one['low']:.2f} to {one['high']:.2f}", f"{one['tokens_per_step']:.2f}", f"{one['acceptance']:.2f}",
         "never" if one["break_even"] is None else f"{one['break_even']:.2f}", f"{one['p99']:.2f}"]
        for draft in drafts
        for one in draft["expected"]
    ]  # fmt: skip
    heads = ["Draft", "~Batch", "~Depth", "~Speed-up", "90 %", "~Tokens per step", "~Acceptance", "~Breaks even at",
             "~p99 of a step"]  # fmt: skip
    return table(heads, rows) if rows else ""


def _what_if(rows: Sequence[Found]) -> str:
    names = [f"batch {row['batch']}, depth {row['depth']}" for row in rows]
    made = [
        Bars("as asked", [row["speedup"] for row in rows]),
        Bars("at the best depth", [row["best_speedup"] for row in rows]),
    ]
    return bars("Speed-up", names, made, "times plain", 1.0) if rows else ""


# ---------------------------------------------------------------------------------------------------------- distill


def score_page(card: Card) -> str:
    """Of a draft that was made: what it is, and how it does with the verifier that serves it."""
    title = f"A draft for {card.target.name}"
    about = {
        "target": f"{card.target.name}, {card.target.parameters:,} parameters",
        "draft": f"{card.draft.kind}, {card.draft.parameters:,} parameters, layout {card.draft.layout}",
        "trained on": None if card.trained_tokens is None else f"{card.trained_tokens:,} tokens",
        "licence": card.licence,
    }
    score = card.score
    if score is None:
        return document(title, "It has no score yet.", section("The draft", facts(about)))
    about |= {
        "scored": f"{score.date} on {score.machine}",
        "with": f"{score.versions}, commit {score.commit}",
    }
    body = (
        section("Acceptance", charts([*_by_task(score), _depths(score)])),
        section("All figures", _scores(score)),
        section("The draft", facts(about)),
    )
    return document(title, _score_headline(score), "".join(body))


def _score_headline(score: Score) -> str:
    speed = "" if score.speedup is None else f"{score.speedup:.2f}x plain decoding, "
    rate = "" if score.accept_rate is None else f"{100 * score.accept_rate:.0f} % of draft tokens accepted, "
    steps = "" if score.tokens_per_step is None else f"{score.tokens_per_step:.2f} tokens a pass"
    return f"{speed}{rate}{steps}" or "Nothing was accepted."


def _by_task(score: Score) -> list[str]:
    names = [f"{one.task} T={one.temperature:g}" for one in score.tasks]
    steps = [
        Bars("chain", [one.chain.tokens_per_step for one in score.tasks]),
        Bars("tree", [one.tree.tokens_per_step for one in score.tasks]),
    ]
    speeds = [
        Bars("expected", [one.expected_speedup for one in score.tasks]),
        Bars("measured", [one.speedup for one in score.tasks]),
    ]
    return [
        bars("Tokens per pass", names, steps, "tokens", 1.0),
        bars("Speed-up, one sequence", names, speeds, "times plain", 1.0),
    ]


def _depths(score: Score) -> str:
    lines = []
    for name, counts in (("chain", score.chain()), ("tree", score.tree())):
        known = [(d, rate) for d, rate in enumerate(counts.by_depth, 1) if rate is not None]
        said = [f"depth {d}, of {counts.reached[d - 1]}" for d, _ in known]
        lines.append(Series(name, [float(d) for d, _ in known], [100 * rate for _, rate in known], said))
    deepest = int(max((x for line in lines for x in line.xs), default=1))
    return chart(
        "By depth, all tasks",
        lines,
        [(float(d), str(d)) for d in range(1, deepest + 1)],
        "depth",
        "% accepted",
    )


def _scores(score: Score) -> str:
    def shown(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    rows = [
        [escape(one.task), f"{one.temperature:g}", str(one.prompts), shown(one.chain.rate),
         shown(one.chain.tokens_per_step), shown(one.tree.rate), shown(one.tree.tokens_per_step),
         shown(one.expected_speedup), shown(one.speedup), f"{one.differing} of {one.compared:,}"]
        for one in score.tasks
    ]  # fmt: skip
    heads = ["Task", "~T", "~Prompts", "~Accepted", "~Tokens per pass", "~Tree: accepted", "~Tokens per pass",
             "~Expected", "~Measured", "~Differ"]  # fmt: skip
    return table(heads, rows)
