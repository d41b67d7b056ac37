"""One set of words for speculation: in Python, on the command line and in requests."""

from __future__ import annotations

import msgspec
import pytest
import typer

from outrider.cli.options import SAMPLING
from outrider.errors import InvalidRequest
from outrider.serve.wire import Sampling, speculation_of
from outrider.types import SamplingParams, Speculation

OFF, OPEN = Speculation(drafter="none"), Speculation()
WORDS = [
    (None, OPEN), (True, OPEN), ("auto", OPEN), ("on", OPEN), (" AUTO ", OPEN), ("true", OPEN),
    (False, OFF), ("off", OFF), ("Off", OFF), ("none", OFF), ("false", OFF),
    (4, Speculation(depth=4)), ("4", Speculation(depth=4)), (0, Speculation(depth=0)), ("0", Speculation(depth=0)),
    ("depth=4,mode=coupled", Speculation(depth=4)),
    ({"depth": 4, "mode": "coupled"}, Speculation(depth=4)),
    ("drafter=lookup, nodes=8, tree=3x2x1", Speculation(drafter="lookup", nodes=8, tree=(3, 2, 1))),
    ({"drafter": "lookup", "nodes": 8, "tree": "3x2x1"}, Speculation(drafter="lookup", nodes=8, tree=(3, 2, 1))),
    ("tree=3", Speculation(tree=(3,))),
    ("mode=lossy,threshold=0.2,block=false", Speculation(mode="lossy", threshold=0.2, block=False)),
]  # fmt: skip


@pytest.mark.parametrize(("word", "meant"), WORDS)
def test_the_same_everywhere(word: object, meant: Speculation) -> None:
    assert Speculation.of(word) == meant
    assert SamplingParams(speculation=word).speculation == meant  # type: ignore[arg-type]
    body = msgspec.json.decode(msgspec.json.encode({"speculative_decoding": word}), type=Sampling)
    assert (speculation_of(body.speculative_decoding) or OPEN) == meant
    if isinstance(word, str):
        typed = {p.name: p.default for p in SAMPLING.parameters()} | {"speculation": word}
        built = SAMPLING.build(typed)
        assert isinstance(built, SamplingParams) and built.speculation == meant


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("yes", "speculation is auto, off"),
        ("", "speculation is auto, off"),
        ("depth", "speculation is auto, off"),
        ("depth=1,depth=2", "speculation is auto, off"),
        ("a=" + "[" * 1_000_000, "speculation is auto, off"),
        ("tree=3xx", "tree must be a list"),
        ("dept=4", "did you mean 'depth'"),
        (64, "depth must be between 0 and 63"),
        (-1, "depth must be between 0 and 63"),
        (1.5, "not float"),
        ([4], "not list"),
    ],
)
def test_what_is_no_word_is_refused_in_the_same_words(word: object, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        Speculation.of(word)
    with pytest.raises(InvalidRequest, match=says):
        SamplingParams(speculation=word)  # type: ignore[arg-type]
    if isinstance(word, (str, int)):
        with pytest.raises(InvalidRequest, match=says) as refused:
            speculation_of(word)
        assert str(refused.value.param).startswith("speculative_decoding")


def test_reasons_come_with_stats_with_steps_and_alone() -> None:
    reports = [({name: True}, True) for name in ("stats", "steps", "explain")]
    for asked, explained in (*reports, ({"depth": 2}, False)):
        body = msgspec.json.decode(msgspec.json.encode({"speculative_decoding": asked}), type=Sampling)
        meant = speculation_of(body.speculative_decoding)
        assert meant is not None and meant.explain is explained


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ([1] * 64, "more than 63 levels"), ([2] * 3000, "more than 63 levels"), ("x".join("1" * 3000), "63 levels"),
        ([9] * 40, "more than 63 nodes"), ([10**4000], "more than 63 nodes"), ("8x8", "more than 63 nodes"),
        ("1x" * 20 + "a", "must be a list"), ("1" * 3000, "must be a list"), ([1, 2.5], "must be a list"),
    ],
)  # fmt: skip
def test_a_tree_that_fits_no_step_is_refused_in_few_words(tree: object, says: str) -> None:
    """Neither the list nor the number of its nodes is made or printed: both may have megabytes."""
    for build in (lambda: Speculation.of({"tree": tree}), lambda: SamplingParams(speculation={"tree": tree})):  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match=says) as refused:
            build()
        assert refused.value.param == "tree" and len(str(refused.value)) < 100
    if isinstance(tree, str) and "a" not in tree:
        typed = {p.name: p.default for p in SAMPLING.parameters()} | {"tree": tree}
        with pytest.raises((InvalidRequest, typer.BadParameter)) as typed_wrong:
            SAMPLING.build(typed)
        assert len(str(typed_wrong.value)) < 200
    assert Speculation.of({"tree": [1] * 63}).tree == (1,) * 63
