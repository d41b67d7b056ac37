"""Draws docs/pictures/*.svg: `python docs/site/pictures.py`. Each picture has a background of its own and is readable
on light and dark pages. Figures stand with the log entry that has their command.
"""

from __future__ import annotations

from math import log2
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "pictures"
STYLE = """
:root{--paper:#fff;--ink:#1f2933;--line:#66727f;--box:#eef2f7;--green:#17704a;--red:#b3261e;--blue:#1d5fbf;--amber:#8a5300}
@media(prefers-color-scheme:dark){:root{--paper:#161b22;--ink:#e6edf3;--line:#9aa7b4;--box:#242c37;--green:#5ed39a;
--red:#ff8f87;--blue:#86b7ff;--amber:#f0b45b}}
text{font:15px system-ui,sans-serif;fill:var(--ink)}.small{font-size:13px}.bold{font-weight:600}
.paper{fill:var(--paper)}.box{fill:var(--box);stroke:var(--line)}.line{fill:none;stroke:var(--line);stroke-width:1.5}
"""
HEAD = (
    '<marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
    '<path d="M0 0L8 4L0 8z" fill="var(--line)"/></marker>'
)
COLOURS = ("green", "blue", "amber", "red")


def text(x: float, y: float, words: str, colour: str = "ink", kind: str = "", anchor: str = "middle") -> str:
    place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}"'
    return f'<text {place} class="{kind}" style="fill:var(--{colour})">{words}</text>'


def box(x: float, y: float, width: float, words: str, colour: str = "line", struck: bool = False) -> str:
    edge = f'style="stroke:var(--{colour});stroke-width:{1 if colour == "line" else 2}"'
    across = f'<path d="M{x + 6:g} {y + 16:g}H{x + width - 6:g}" stroke="var(--{colour})"/>' if struck else ""
    label = text(x + width / 2, y + 21, words, "ink" if colour == "line" else colour, "bold")
    return (
        f'<rect class="box" x="{x:g}" y="{y:g}" width="{width:g}" height="32" rx="6" {edge}/>{label}{across}'
    )


def arrow(path: str) -> str:
    return f'<path class="line" d="{path}" marker-end="url(#head)"/>'


def picture(name: str, title: str, width: int, height: int, *parts: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n<title>{title}</title>\n'
        f"<style>{STYLE}</style>\n<defs>{HEAD}</defs>\n"
        f'<rect class="paper" width="{width}" height="{height}" rx="10"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def step() -> None:
    stages = [
        ("scheduler", "which sequences"), ("planner", "how much to draft"), ("drafter", "proposes tokens"),
        ("target", "one pass over all"), ("verify", "accepts or rejects"), ("KV cache", "keeps what holds"),
    ]  # fmt: skip
    parts = []
    for i, (name, what) in enumerate(stages):
        x = 20 + 145 * i
        parts += [
            box(x, 60, 115, name, "blue" if name == "target" else "line"),
            text(x + 57, 112, what, kind="small"),
        ]
        parts += [arrow(f"M{x + 115} 76H{x + 143}")] if i < 5 else []
    parts += [
        arrow("M77 20V58"),
        text(90, 30, "prompts", anchor="start"),
        arrow("M657 60V22"),
        text(670, 34, "tokens", anchor="start"),
    ]
    parts += [arrow("M802 122V150H77V122"), text(440, 170, "next step", kind="small")]
    picture("step", "One step: schedule, plan, draft, run the target once, verify, keep", 900, 185, *parts)


def verification() -> None:
    draft = [("Paris", "green"), (".", "red"), ("It", "red"), ("is", "red")]
    target = [("Paris", "green"), (",", "amber")]
    lines = ("text so far", "the drafter proposes", "the target chooses", "emitted")
    parts = [text(20, 41 + 55 * i, words, anchor="start") for i, words in enumerate(lines)]
    parts += [
        box(190 + 80 * i, 20, 74, word) for i, word in enumerate(("The", "capital", "of", "France", "is"))
    ]
    for height, row in ((75, draft), (130, target), (185, target)):
        parts += [
            box(590 + 72 * i, height, 64, word, colour, colour == "red")
            for i, (word, colour) in enumerate(row)
        ]
    parts += [text(622, 236, "accepted", "green", "small"), text(696, 236, "recovered", "amber", "small")]
    parts += [text(740, 151, "differs: the others are discarded", kind="small", anchor="start")]
    picture("verification", "A draft of four tokens, of which the target accepts one", 960, 250, *parts)


def tree() -> None:
    nodes = {
        "is": (60, 105, "line"), "Paris": (200, 70, "green"), "the": (200, 150, "red"),
        ",": (340, 40, "green"), ".": (340, 100, "red"), "which": (480, 20, "red"),
        "a": (480, 70, "green"), "city": (620, 70, "amber"),
    }  # fmt: skip
    edges = [
        ("is", "Paris"),
        ("is", "the"),
        ("Paris", ","),
        ("Paris", "."),
        (",", "which"),
        (",", "a"),
        ("a", "city"),
    ]
    parts = [
        arrow(f"M{nodes[a][0] + 80} {nodes[a][1] + 16}L{nodes[b][0] - 2} {nodes[b][1] + 16}")
        for a, b in edges
    ]
    parts += [box(x, y, 80, word, colour, colour == "red") for word, (x, y, colour) in nodes.items()]
    parts += [
        text(40, 212, words, colour, anchor="start")
        for words, colour in (("green: accepted draft", "green"),)
    ]
    parts += [
        text(240, 212, "red: rejected", "red", anchor="start"),
        text(390, 212, "amber: bonus, the target's own token after the draft", "amber", anchor="start"),
    ]
    picture(
        "tree", "A draft tree of six nodes: the target accepts one path and adds a token", 800, 230, *parts
    )


def rows() -> None:
    """Logs 066 (H200, the cost of an 8B model), 005 (float32) and 087 (Q8_0, Q4_0)."""
    curves = {
        "CPU, 4-bit weights": {1: 1, 2: 1.44, 4: 2.50, 8: 5.2, 16: 8.7},
        "CPU, 8-bit weights": {1: 1, 2: 1.10, 4: 1.78, 8: 3.37, 16: 6.2},
        "CPU, float32": {1: 1, 2: 19.3 / 18.6, 4: 24.7 / 18.6, 8: 46.1 / 18.6},
        "H200, 8B in bfloat16": {1: 1, 16: 4.38 / 3.912, 64: 5.22 / 3.912},
    }
    parts = [
        text(20, 26, "time of a pass, against a pass over one row", anchor="start", kind="bold"),
        text(420, 330, "rows in the pass"),
    ]
    parts += [
        f'<path class="line" stroke-dasharray="3 5" d="M70 {y(v):g}H770"/>'
        + text(60, y(v) + 5, f"{v}x", anchor="end", kind="small")
        for v in (1, 3, 5, 7, 9)
    ]
    parts += [text(x(n), 308, str(n), kind="small") for n in (1, 2, 4, 8, 16, 32, 64)]
    for (name, curve), colour in zip(curves.items(), ("red", "amber", "green", "blue"), strict=True):
        points = " ".join(f"{x(n):g},{y(v):g}" for n, v in curve.items())
        parts.append(f'<polyline points="{points}" fill="none" stroke="var(--{colour})" stroke-width="3"/>')
        parts += [
            f'<circle cx="{x(n):g}" cy="{y(v):g}" r="4" fill="var(--{colour})"/>' for n, v in curve.items()
        ]
        n, v = list(curve.items())[-1]
        parts.append(
            text(
                x(n) + (10 if n < 64 else 0),
                y(v) + (5 if n < 64 else -12),
                name,
                colour,
                "bold",
                "start" if n < 64 else "end",
            )
        )
    picture("rows", "What a pass over several rows costs", 800, 345, *parts)


def x(rows: int) -> float:
    return 80 + 110 * log2(rows)


def y(times: float) -> float:
    return 285 - 29 * (times - 1)


def load() -> None:
    """SmolLM2 as if 8B with the shipped head on an H200, prompts that nothing was tuned with."""
    tasks = {"code": (2.32, 1.40, 1.03), "chat": (1.57, 1.55, 0.99), "summarization": (1.46, 1.09, 0.99)}
    parts = [text(20, 26, "speed-up against plain decoding", anchor="start", kind="bold")]
    for i, (task, ratios) in enumerate(tasks.items()):
        parts.append(text(170 + 220 * i, 282, task))
        for j, ratio in enumerate(ratios):
            left, top = 85 + 220 * i + 58 * j, 240 - 80 * ratio
            parts.append(
                f'<rect x="{left}" y="{top:g}" width="48" height="{80 * ratio:g}" rx="3" fill="var(--{COLOURS[j]})"/>'
            )
            parts.append(
                text(left + 24, top - 7, f"{ratio:.2f}x", kind="small")
                + text(left + 24, 258, str((1, 16, 64)[j]), kind="small")
            )
    parts += [
        '<path class="line" stroke-dasharray="5 4" d="M60 160H740"/>',
        text(55, 165, "1x", anchor="end"),
        text(400, 306, "1, 16 and 64 sequences at once", kind="small"),
    ]
    picture("load", "Speed-up with 1, 16 and 64 sequences", 760, 320, *parts)


PICTURES = (step, verification, tree, rows, load)

if __name__ == "__main__":
    for draw in PICTURES:
        draw()
