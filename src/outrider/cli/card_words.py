"""A pair's card in words and tables, within 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider.bench.compare import cut
from outrider.load.cards import Acceptance, Score, TaskScore
from outrider.load.pairs import Pair

WIDTH = 80
HEADINGS = ("target", "draft", "params", "ratio", "tokens", "accept", "tree", "speed-up")


def in_columns(pairs: Sequence[Pair]) -> Iterator[str]:
    """For people: a line a pair, and under it where the speed-up was measured."""
    if not pairs:
        return
    names = [(pair.card.target.name, pair.name) for pair in pairs]
    target = min(15, max(len(one) for one, _ in (*names, HEADINGS[:2])))
    draft = min(20, max(len(one) for _, one in (*names, HEADINGS[:2])))

    def line(values: Sequence[str]) -> str:
        ends = "".join(f"{value:>{wide}}" for value, wide in zip(values[2:], (7, 7, 7, 7, 6, 9), strict=True))
        return f"{cut(values[0], target):{target}} {cut(values[1], draft):{draft}}{ends}"

    yield line(HEADINGS)
    for pair in pairs:
        yield line(_figures(pair))
        if pair.card.score is not None:
            yield cut(f"  measured {pair.card.score.date} on {pair.card.score.machine}", WIDTH)
    yield ""
    yield "tokens: trained on; accept and tree: accepted over reached positions of chains"
    yield "and of trees, mean of tasks; speed-up: wall clock, over plain, at batch 1"


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
        times(None if score is None else score.speedup),
    )


def described(pair: Pair) -> Iterator[tuple[str, str]]:
    """What `pairs show` says before the table of scores: labels and words."""
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


def score_table(score: Score) -> Iterator[str]:
    """By task and temperature: a line each, then the mean of the tasks and everything by depth."""
    wide = min(15, max(len("mean of tasks"), *(len(one.task) for one in score.tasks)))
    heads = ("T", "accept", "depth 1", "tok/step", "tree", "tok/step", "expected", "measured")
    widths = (5, 7, 8, 9, 7, 9, 9, 9)

    def line(name: str, values: Sequence[str]) -> str:
        ends = "".join(f"{value:>{w}}" for value, w in zip(values, widths, strict=True))
        return f"{cut(name, wide):{wide}}{ends}"

    yield line("task", heads)
    for one in score.tasks:
        yield line(one.task, (f"{one.temperature:g}", *_row(one)))
    temperatures = sorted({one.temperature for one in score.tasks})
    for temperature in temperatures:
        yield line("mean of tasks", (f"{temperature:g}", *_means(score, temperature)))
    yield ""
    yield from _depths("chain", score.chain(), f"of {score.depth}")
    yield from _depths("tree", score.tree(), f"of at most {score.tree_nodes} nodes")
    yield "accepted over reached positions of all tasks together (docs/pairs.md)"
    compared, differing = sum(t.compared for t in score.tasks), sum(t.differing for t in score.tasks)
    verdict = "identical" if not differing else f"{differing} answers DIFFER"
    yield f"{compared} tokens compared with plain decoding's: {verdict}"


def _row(one: TaskScore) -> tuple[str, ...]:
    return (
        rate(one.chain.rate),
        rate(_first(one.chain)),
        rate(one.chain.tokens_per_step),
        rate(one.tree.rate),
        rate(one.tree.tokens_per_step),
        times(one.expected_speedup),
        times(one.speedup),
    )


def _means(score: Score, temperature: float) -> tuple[str, ...]:
    return (
        rate(score.mean(lambda one: one.chain.rate, temperature)),
        rate(score.mean(lambda one: _first(one.chain), temperature)),
        rate(score.mean(lambda one: one.chain.tokens_per_step, temperature)),
        rate(score.mean(lambda one: one.tree.rate, temperature)),
        rate(score.mean(lambda one: one.tree.tokens_per_step, temperature)),
        times(score.mean(lambda one: one.expected_speedup, temperature)),
        times(score.mean(lambda one: one.speedup, temperature)),
    )


def _first(counts: Acceptance) -> float | None:
    return counts.by_depth[0] if counts.by_depth else None


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
