"""The plot of drafts by content: every step is there, where its content is."""

from __future__ import annotations

from types import SimpleNamespace
from xml.etree import ElementTree

from bench.content import COLOURS, PHASES, Step, changes, phase_ends, plot

SVG = "{http://www.w3.org/2000/svg}"


def test_every_step_is_drawn_and_every_content_shaded() -> None:
    steps = (
        [Step("prose", 0, 0, "off")] * 3
        + [Step("copied", 4, 3, "depth 4: a < b")] * 2
        + [Step("code", 2, 0, "")]
    )
    assert changes(steps) == [(0, "prose"), (3, "copied"), (5, "code")]
    root = ElementTree.fromstring(plot(steps, "a <title>", "about & all"))
    fills = [one.get("fill") for one in root.iter(f"{SVG}rect")]
    assert [fill for fill in fills if fill in COLOURS.values()] == [
        COLOURS[c] for c in ("prose", "copied", "code")
    ]
    assert fills.count("#9aa5b1") == 3 and fills.count("#1f5fa8") == 2
    assert root.findtext(f"{SVG}title") == "a <title>" and root.findtext(f"{SVG}desc") == "about & all"


def test_phases_end_where_their_text_does() -> None:
    """A token a character."""
    llm = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids: "x" * len(ids)))
    text = "\n".join(text for _, text in PHASES)
    ends = phase_ends(llm, [0] * len(text))  # type: ignore[arg-type]
    assert ends[:2] == [len(PHASES[0][1]) + 1, len(PHASES[0][1]) + len(PHASES[1][1]) + 2]
    assert ends == sorted(ends) and ends[-1] >= len(text)
