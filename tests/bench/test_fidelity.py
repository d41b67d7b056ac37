"""Modes of verification are compared by speed and by what they keep of plain decoding."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider import SamplingParams
from outrider.bench.as_if import AsIf
from outrider.bench.fidelity import ALL, fidelity_charts, fidelity_table, measure_fidelity, modes_of
from outrider.bench.show import verdicts
from outrider.bench.speculation import Comparison, compare
from outrider.errors import InvalidRequest
from outrider.types import Speculation
from tests.bench.conftest import prompts

LOOKUP = Speculation(drafter="lookup", depth=3, nodes=3)  # often wrong for a random model
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True, seed=3, temperature=0.0)


def test_modes_by_name() -> None:
    found = modes_of(LOOKUP, ["coupled", "lossy", "lossy:0.25"])
    assert list(found) == ["plain", "coupled", "lossy", "lossy:0.25"]
    assert (
        found["plain"].off and found["coupled"] == LOOKUP and found["lossy"] == replace(LOOKUP, mode="lossy")
    )
    assert found["lossy:0.25"] == replace(LOOKUP, mode="lossy", rule="threshold", threshold=0.25)
    assert list(modes_of(LOOKUP, ["all"])) == ["plain", *ALL]
    for name, said in (
        ("lossi", "did you mean 'lossy'"),
        ("coupled:0.3", "unknown mode 'coupled:0.3'"),
        ("lossy:much", "not lossy:NUMBER"),
        ("lossy:2", "threshold"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            modes_of(LOOKUP, [name])


def test_lossy_gives_up_more_the_lower_its_threshold(wide: AsIf) -> None:
    """A random model finds nothing likely: at threshold 1 no draft token is accepted that it did not choose, at 0
    every one is.
    """
    methods = modes_of(LOOKUP, ["coupled", "rejection", "lossy:1", "lossy:0"])
    asked = {name: replace(PARAMS, speculation=one) for name, one in methods.items()}
    found = measure_fidelity(wide, [prompts(3)], asked)
    for name in ("plain", "coupled", "rejection", "lossy:1"):  # at temperature 0 all of these are exact
        assert found[name]["equal"] == 1.0 and found[name]["likelihood"] == pytest.approx(1.0), name
    assert found["lossy:0"]["equal"] < 0.5
    assert found["lossy:0"]["logprob"] < found["plain"]["logprob"] < 0 and found["lossy:0"]["likelihood"] < 1
    assert found["plain"]["logprob_error"] > 0
    sampled = {name: replace(one, temperature=1.0) for name, one in asked.items()}
    other = measure_fidelity(wide, [prompts(3)], sampled)
    assert other["coupled"]["equal"] == 1.0 and other["rejection"]["equal"] < 1.0


def test_the_curve_is_in_the_report(wide: AsIf) -> None:
    methods = modes_of(LOOKUP, ["coupled", "lossy:0.3", "lossy:0"])
    tasks = {"chat": prompts(2), "rewrite": prompts(2)}
    report = compare(wide, Comparison(tasks, PARAMS, methods, {"chat": [0.8]}, fidelity=True))
    for one in report.values():
        found = one["batches"]["1"]["methods"]
        assert [method["exact"] for method in found.values()] == [True, True, False, False]
        assert all(set(m["fidelity"]) >= {"equal", "logprob", "likelihood"} for m in found.values())
    lines = list(fidelity_table(report))
    assert max(map(len, lines)) < 80 and len(lines) == 1 + 2 * 4 + 2
    said = list(verdicts(report))
    assert said[0].endswith("identical") and said[1].endswith("other tokens: lossy:0.3, lossy:0")
    drawn = list(fidelity_charts(report))
    assert ["% of plain" in one for one in drawn] == [True, False] and all(
        "lossy:0.3" in one for one in drawn
    )
