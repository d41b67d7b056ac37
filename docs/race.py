"""Makes docs/race.svg, the moving picture of README, of a real race: python docs/race.py [FILE]

Runs the first scene of `outrider demo` with the built-in model and draws each token when it came. The times of the
answer that is drawn are scaled to the median of its side's turns, and shown SLOWER times more slowly. A busy machine
has no race to draw: the script then says so and writes nothing.
"""

from __future__ import annotations

import itertools
import sys
import textwrap
import time
from html import escape
from pathlib import Path

from outrider import LLM
from outrider.cli.demo import SCENES
from outrider.cli.race import Race, Side, prompt_ids

MODEL = "smollm2-135m"
SLOWER = 4
PAUSE = 3.0  # seconds before it begins again
COLUMNS, LINE, LETTER = 50, 17, 7.25  # of a pane: letters a line, pixels a line and a letter
PANE, TOP = 400, 84
STYLE = """
text { font: 12px ui-monospace, Menlo, Consolas, monospace; fill: #1b1f24; } .h { font-size: 14px; font-weight: 600; }
.soft { fill: #5b6570; } .acc { fill: #1a7f37; font-weight: 600; } .box { fill: #f5f7f9; stroke: #d8dde3; }
.run { fill: #3b78c3; } .page { fill: #fff; }
@media (prefers-color-scheme: dark) { text { fill: #e4e8ec; } .soft { fill: #9aa5b1; } .acc { fill: #4cc26b; }
  .box { fill: #1c2228; stroke: #333b44; } .run { fill: #5b9be6; } .page { fill: #14181c; } }
"""

Letter = tuple[str, float, bool]  # with the second it came at, and whether a draft token brought it


def run() -> tuple[Race, dict[str, list[Letter]]]:
    race, letters = Race(SCENES[0]), dict[str, list[Letter]]()

    def show(side: Side) -> None:
        if not side.turns and side.answer is not None and side.begun is not None:
            now = time.perf_counter() - side.begun
            for text, origin in side.answer.fresh:
                letters.setdefault(side.title, []).extend((one, now, origin == "accepted") for one in text)

    with LLM(MODEL) as llm:
        llm.prepare(1)
        for how in (False, True):
            ids = prompt_ids(llm, "Write the numbers from 1 to 20.")
            llm.generate([ids], temperature=0, max_tokens=24, speculation=how)
        race.run(llm, show)
    if race.busy or not race.identical:
        sys.exit(f"there is nothing to draw: {race.verdict()}")
    for side in (race.plain, race.speculative):
        scale = SLOWER * side.seconds / letters[side.title][-1][1]
        letters[side.title] = [(one, at * scale, held) for one, at, held in letters[side.title]]
    return race, letters


def appears(at: float, whole: float) -> str:
    """Hidden until `at` of every `whole` seconds. What cannot animate shows everything."""
    share = min(0.999, at / whole)
    return (
        f'<animate attributeName="opacity" values="0;1;1" keyTimes="0;{share:.4f};1" calcMode="discrete" '
        f'dur="{whole:.2f}s" repeatCount="indefinite"/>'
    )


def pane(side: Side, letters: list[Letter], left: int, high: int, whole: float) -> str:
    text = "".join(one for one, *_ in letters)
    end = letters[-1][1]
    parts = [
        f'<rect class="box" x="{left}" y="46" width="{PANE}" height="{high}" rx="6"/>',
        f'<text class="h" x="{left + 12}" y="68">{escape(side.title)}</text>',
        f'<text class="h" x="{left + PANE - 12}" y="68" text-anchor="end">{escape(f"{side.seconds:.2f} s")}'
        f"{appears(end, whole)}</text>",
    ]
    at = 0
    for row, line in enumerate(textwrap.wrap(text, COLUMNS)):
        at = text.index(line, at)
        places = range(at, at + len(line))
        for (second, held), some in itertools.groupby(places, key=lambda i: letters[i][1:]):
            own = list(some)
            x = left + 12 + LETTER * (own[0] - at)
            words = escape(text[own[0] : own[-1] + 1]).replace(" ", "\u00a0")
            kind = ' class="acc"' if held else ""
            y = TOP + 8 + LINE * row
            parts.append(f'<text{kind} x="{x:.1f}" y="{y}">{words}{appears(second, whole)}</text>')
        at += len(line)
    bar = f'<rect class="run" x="{left}" y="{46 + high - 4}" height="4" width="{PANE}">'
    grow = f'values="0;{PANE};{PANE}" keyTimes="0;{end / whole:.4f};1" dur="{whole:.2f}s"'
    return "".join(parts) + f'{bar}<animate attributeName="width" {grow} repeatCount="indefinite"/></rect>'


def draw(race: Race, letters: dict[str, list[Letter]]) -> str:
    whole = max(one[-1][1] for one in letters.values()) + PAUSE
    rows = max(len(textwrap.wrap("".join(c for c, *_ in one), COLUMNS)) for one in letters.values())
    high = TOP - 46 + LINE * rows + 14
    wide, tall = 2 * PANE + 40, 46 + high + 56
    said = textwrap.wrap(race.verdict(), 108)
    panes = [
        pane(side, letters[side.title], 14 + place * (PANE + 12), high, whole)
        for place, side in enumerate((race.plain, race.speculative))
    ]
    foot = [
        f'<text class="soft" x="14" y="{66 + high + 17 * i}">{escape(line)}</text>'
        for i, line in enumerate(said)
    ]
    title = (
        f"{MODEL} repeats a text, temperature 0, shown {SLOWER} times slower; green: accepted draft tokens"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {tall}" role="img" '
        f'aria-label="{escape(race.verdict())}"><style>{STYLE}</style>'
        f'<rect class="page" width="{wide}" height="{tall}"/><text class="soft" x="14" y="28">{escape(title)}</text>'
        f"{''.join(panes)}{''.join(foot)}</svg>\n"
    )


if __name__ == "__main__":
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("race.svg")
    file.write_text(draw(*run()), encoding="utf-8")
    print(f"written to {file}")
