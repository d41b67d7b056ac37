"""How the planner's choice follows what an answer is about: prose, copied text and code within one answer, as a plot.

    python -m bench.content --svg docs/content.svg [--model smollm2-135m]

What the answer says is fixed by a grammar that allows one text, so that it is known where its content changes. All else
is as it always is: the model reads and verifies, lookup drafts, the planner decides by the clock.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from html import escape
from itertools import accumulate, pairwise
from pathlib import Path

from bench.serving import birth_certificate

from outrider import LLM, SamplingParams
from outrider.bench.answering import answer

NOTICE = (
    "The harbour office opens at seven. Boats longer than twelve metres need a permit, which costs forty euros a week. "
    "Boats that stay longer than a month pay half. Dogs must be kept on a lead on the quay, and fires are forbidden at "
    "all times. Whoever leaves after ten at night must tell the guard at the gate."
)
TALE = (
    "Old Marta had mended nets since she was six, and her hands knew the knots better than her eyes ever did. One "
    "grey morning a stranger rowed in from the fog with nothing but a violin case and a loaf of bread. She gave him "
    "soup, he played until the gulls fell silent, and by noon half the village stood between the barrels to listen."
)
CODE = """
class Boat:
    def __init__(self, length, weeks, dogs):
        self.length = length
        self.weeks = weeks
        self.dogs = dogs

    def get_length(self):
        return self.length

    def get_weeks(self):
        return self.weeks

    def get_dogs(self):
        return self.dogs

    def needs_permit(self):
        return self.length > 12
"""
END = (
    "Nobody asked where he had learned such music, or why his coat was dry although it had rained all night. When the "
    "tide turned he bowed, closed the lid and pushed off, and only a line of crumbs showed that he had been there."
)
PHASES = (("prose", TALE), ("copied", NOTICE), ("code", CODE), ("prose", END), ("copied", NOTICE))
COLOURS = {"prose": "#f3e3c3", "copied": "#cfe3f7", "code": "#d5ecd3"}
WIDE, HIGH, LEFT, TOP, BELOW = 960, 250, 40, 34, 46


@dataclass(frozen=True, slots=True)
class Step:
    content: str  # of its first token
    drafted: int
    accepted: int
    why: str


def phase_ends(llm: LLM, tokens: list[int]) -> list[int]:
    """Tokens up to the end of each phase, by how many characters they are."""
    written = list(accumulate(len(llm.tokenizer.decode([token])) for token in tokens))
    wanted = accumulate(len(text) + 1 for _, text in PHASES)
    return [sum(done < end for done in written) + 1 for end in wanted]


def followed(model: str) -> tuple[list[Step], float]:
    """The steps of the answer, and its speed-up over the same answer without drafts."""
    llm = LLM(model)
    try:
        llm.prepare(1)
        asked = f"{NOTICE}\n\nTell me a story, repeat the notice, write a class, end the story, repeat the notice."
        ids = llm.chat_ids([{"role": "user", "content": asked}])
        text = "\n".join(text for _, text in PHASES)
        params = SamplingParams(temperature=0, max_tokens=1024, grammar={"choice": [text]}, seed=0)
        plain = answer(llm, [ids], SamplingParams(**{**_fields(params), "speculation": False}))
        run = answer(llm, [ids], params)
        (tokens,), (others,) = run.run.answers, plain.run.answers
        assert tokens == others, "speculation changed the answer"
        ends, written, steps = phase_ends(llm, tokens), 0, []
        for record in run.records:
            if not record.emitted:
                continue
            phase = next((i for i, end in enumerate(ends) if written < end), len(PHASES) - 1)
            deepest = max((o.deepest for o in record.outcomes), default=0)
            steps.append(Step(PHASES[phase][0], deepest, record.accepted, str(record.reasons[0])))
            written += record.emitted
        return steps, run.rate / plain.rate
    finally:
        llm.driver.close()


def _fields(params: SamplingParams) -> dict:
    return {name: getattr(params, name) for name in ("temperature", "max_tokens", "grammar", "seed")}


def changes(steps: list[Step]) -> list[tuple[int, str]]:
    """Where another content begins, and which."""
    return [
        (i, step.content) for i, step in enumerate(steps) if i == 0 or steps[i - 1].content != step.content
    ]


def plot(steps: list[Step], title: str, about: str) -> str:
    """Bars: how deep each step's draft was, and as much of it as was accepted. Ground: what the text was."""
    room, deepest = (WIDE - LEFT) / len(steps), max(4, *(step.drafted for step in steps))
    floor = HIGH - BELOW

    def high(depth: int) -> float:
        return floor - (floor - TOP) * depth / deepest

    marks = [*changes(steps), (len(steps), "")]
    drawn = [
        f'<rect x="{LEFT + room * a:.1f}" y="{TOP}" width="{room * (b - a):.1f}" height="{floor - TOP}" '
        f'fill="{COLOURS[name]}"/><text x="{LEFT + room * (a + b) / 2:.1f}" y="{floor + 16}" '
        f'text-anchor="middle">{name}</text>'
        for (a, name), (b, _) in pairwise(marks)
    ]
    drawn += [
        f'<text x="{LEFT - 6}" y="{high(depth) + 4:.1f}" text-anchor="end">{depth}</text>'
        for depth in range(0, deepest + 1, max(1, deepest // 4))
    ]
    for i, step in enumerate(steps):
        said = f"<title>step {i + 1}: {escape(step.why)}</title>"
        for depth, fill in ((step.drafted, "#9aa5b1"), (step.accepted, "#1f5fa8")):
            box = f'x="{LEFT + room * i:.2f}" y="{high(depth):.1f}" width="{0.9 * room:.2f}"'
            tall = f'height="{floor - high(depth):.1f}"'
            drawn += [f'<rect {box} {tall} fill="{fill}">{said}</rect>'] if depth else []
    key = "grey: draft tokens of a step; blue: those accepted; left to right: steps of one answer"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {HIGH}" role="img" font-family="sans-serif" '
        f'font-size="12"><title>{escape(title)}</title><desc>{escape(about)}</desc>'
        f'<rect width="{WIDE}" height="{HIGH}" fill="#ffffff"/>'
        f'<text x="{LEFT}" y="18" font-size="14" font-weight="bold">{escape(title)}</text>{"".join(drawn)}'
        f'<text x="{LEFT}" y="{HIGH - 8}" fill="#5b6570">{key}</text></svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--svg", type=Path, required=True)
    given = parser.parse_args()
    steps, speedup = followed(given.model)
    title = f"{given.model}: drafts by step as the content changes, {speedup:.2f}x plain decoding"
    about = "; ".join(f"{name}: {value}" for name, value in birth_certificate("bench.content").items())
    given.svg.write_text(plot(steps, title, about))
    for (a, name), (b, _) in zip(changes(steps), [*changes(steps)[1:], (len(steps), "")], strict=True):
        here = steps[a:b]
        drafting = sum(step.drafted > 0 for step in here)
        first = next((i for i, step in enumerate(here) if step.accepted > 1), None)
        tokens = sum(step.accepted + 1 for step in here)
        print(
            f"{name}: {tokens} tokens in {len(here)} steps, {drafting} with drafts; two accepted from step {first}"
        )


if __name__ == "__main__":
    main()
