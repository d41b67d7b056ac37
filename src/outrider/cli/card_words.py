"""A pair's card in words and tables, within 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from outrider.bench.compare import cut
from outrider.load.cards import Acceptance, Card, Score
from outrider.load.pairs import Pair
from outrider.wrap import wrapped

WIDTH = 80
HEADINGS = ("params", "ratio", "tokens", "accept", "tree", "speed-up")
WIDTHS = (8, 8, 8, 8, 7, 10)
LEGEND = (
    "tokens: trained on; accept and tree: accepted over reached positions of chains and of trees, mean of tasks; "
    "speed-up: wall clock, over plain decoding, one sequence, mean of what was measured"
)


def in_columns(pairs: Sequence[Pair]) -> Iterator[str]:
    """For people: the figures of a pair, and under them its target and where they were measured. Names are whole."""
    if not pairs:
        return
    wide = max(len("pair"), *(len(pair.name) for pair in pairs))
    if wide > WIDTH - sum(WIDTHS):  # then it has a line of its own
        wide = 0

    def line(values: Sequence[str]) -> str:
        return "".join(f"{value:>{width}}" for value, width in zip(values, WIDTHS, strict=True))

    yield f"{'pair':{wide}}{line(HEADINGS)}" if wide else f"{'':4}{line(HEADINGS)}"
    for pair in pairs:
        figures = line(_figures(pair)[2:])
        yield from (f"{pair.name:{wide}}{figures}",) if wide else (pair.name, f"{'':4}{figures}")
        about = [f"for {pair.card.target.name}"]
        if (score := pair.card.score) is not None:
            about.append(f"accepted: {score.date} on {score.machine}")
        about += [f"speed-up: {text}" for text in _measured_on(pair.card)]
        yield from (part for text in about for part in wrapped(f"  {text}", WIDTH).split("\n"))
    yield ""
    yield from wrapped(LEGEND, WIDTH).split("\n")


def _measured_on(card: Card) -> Iterator[str]:
    """What a speed-up outside the score was measured of, a text a machine."""
    for machine in dict.fromkeys(one.machine for one in card.measured):
        some = [one for one in card.measured if one.machine == machine]
        what = ", ".join(f"{one.task} {one.speedup:.2f}x (T={one.temperature:g})" for one in some)
        yield f"{what}; {some[0].date} on {machine}"


def in_tabs(pairs: Sequence[Pair]) -> Iterator[str]:
    """For grep and cut: one line a pair."""
    for pair in pairs:
        score = pair.card.score
        where = ("", "") if score is None else (score.machine, score.date)
        yield "\t".join((*_figures(pair), *where, pair.source))


def _figures(pair: Pair) -> tuple[str, ...]:
    card, score = pair.card, pair.card.score
    return (
        card.target.name,
        pair.name,
        short(card.draft.parameters),
        f"{100 * card.ratio:.1f} %",
        "" if card.trained_tokens is None else short(card.trained_tokens),
        rate(None if score is None else score.accept_rate),
        rate(None if score is None else score.effective_accept_rate),
        times(card.speedup),
    )


def described(pair: Pair) -> Iterator[tuple[str, str]]:
    card, score = pair.card, pair.card.score
    draft, target = card.draft, card.target
    yield "pair", f"{pair.name} ({pair.source})"
    yield "folder", str(pair.folder)
    yield "target", f"{target.name}, {short(target.parameters)} parameters"
    yield "fingerprint", target.fingerprint
    share = f"{100 * card.ratio:.1f} % of the target's"
    yield "draft", f"{draft.kind}, {short(draft.parameters)} parameters ({share}), layout {draft.layout}"
    yield "loaded by", ", ".join(draft.engines)
    yield "trained on", "not said" if card.trained_tokens is None else f"{short(card.trained_tokens)} tokens"
    yield "recipe", card.recipe or "not said"
    yield "licence", card.licence or "not said"
    if score is None:
        yield "score", f"none yet: outrider pairs score {target.name} {pair.folder} --prompts FILE"
        return
    yield "scored", f"{score.date} on {score.machine}"
    yield "with", f"{score.versions}, commit {score.commit}"
    for one in card.measured:
        what = f"{one.speedup:.2f}x, {one.task} at T = {one.temperature:g}, one sequence"
        yield "speed-up", f"{what}; {one.date} on {one.machine}, commit {one.commit}: {one.command}"


def score_table(score: Score) -> Iterator[str]:
    """By task and temperature: a line each, then the mean of the tasks and everything by depth."""
    wide = min(15, max(len("mean of tasks"), *(len(one.task) for one in score.tasks)))
    heads = ("T", "accept", "depth 1", "tok/step", "tree", "tok/step", "expected", "measured")
    widths = (5, 7, 8, 9, 7, 9, 9, 9)

    rows: list[tuple[str, tuple[str, ...]]] = [("task", heads)]
    alone = ((one, replace(score, tasks=(one,))) for one in score.tasks)
    rows += [(one.task, (f"{one.temperature:g}", *_columns(own))) for one, own in alone]
    for temperature in sorted({one.temperature for one in score.tasks}):
        same = replace(score, tasks=tuple(score.at(temperature)))
        rows.append(("mean of tasks", (f"{temperature:g}", *_columns(same))))
    filled = [i for i in range(len(heads)) if any(values[i] for _, values in rows[1:])]
    for name, values in rows:
        ends = "".join(f"{values[i]:>{widths[i]}}" for i in filled)
        yield f"{cut(name, wide):{wide}}{ends}"
    yield ""
    yield from _depths("chain", score.chain(), f"of {score.depth}")
    yield from _depths("tree", score.tree(), f"of at most {score.tree_nodes} nodes")
    yield "accepted over reached positions of all tasks together"
    yield "(what that is: outrider help reached position)"
    compared, differing = sum(t.compared for t in score.tasks), sum(t.differing for t in score.tasks)
    verdict = "identical" if not differing else f"{differing} answers DIFFER"
    yield f"{compared} tokens compared with plain decoding's: {verdict}"


def _columns(score: Score) -> tuple[str, ...]:
    """Means over the score's tasks."""
    return (
        rate(score.accept_rate),
        rate(score.first_accept_rate),
        rate(score.tokens_per_step),
        rate(score.effective_accept_rate),
        rate(score.mean(lambda one: one.tree.tokens_per_step)),
        times(score.expected_speedup),
        times(score.speedup),
    )


def _depths(name: str, counts: Acceptance, size: str) -> Iterator[str]:
    rates = " ".join(rate(one) or "-" for one in counts.by_depth) or "nothing drafted"
    yield f"{name} {size}, by depth: {rates}"


def short(count: int) -> str:
    """`134515008` -> `135M`."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return str(count)


def rate(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"
