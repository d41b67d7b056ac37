"""The audit under traffic: every kind of request comes, at moments of its own, and a wrong token is found."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec

import pytest

from outrider import SamplingParams
from outrider.bench import arrivals as module
from outrider.bench.arrivals import GRAMMARS, KINDS, USUAL, _cases, _kinds, _nearly, _traffic, audit_arrivals
from outrider.bench.as_if import AsIf
from outrider.bench.audit import Extent
from outrider.errors import InvalidRequest, OutriderError
from tests.bench.conftest import prompts

PARAMS = SamplingParams(max_tokens=16, seed=3)


@pytest.fixture(autouse=True)
def few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RUNS", 2)
    monkeypatch.setattr(module, "RUNS_ONCE", 2)


def test_requests_of_every_kind_come_among_others_and_agree(wide: AsIf) -> None:
    before = wide.engine.drafters.names, wide.engine.planner
    found = audit_arrivals(wide, prompts(7), True, [0.0, 0.8], PARAMS)
    assert (wide.engine.drafters.names, wide.engine.planner) == before
    assert found.differing == found.differing_logprobs == 0 and not found.divergences
    there = {USUAL, *KINDS} - set(found.left_out)
    assert set(found.left_out) == (set() if find_spec("llguidance") else set(GRAMMARS))
    assert set(found.requests) == {kind for kind, _ in found.tokens} == there
    assert found.requests.total() == 2 * len(_kinds(wide, found))
    assert {temperature for _, temperature in found.tokens} == {0.0, 0.8}
    assert 0 < found.aborted < found.requests.total() / 2
    assert found.together > 4
    assert found.logprobs > 0 < found.drafted.total() > found.accepted.total() > 0
    assert "auto" in found.methods and len(found.methods) > 5
    assert set(found.methods) & {"random", "wrong", "oracle", "ends", "duplicates"}
    assert found.as_json()["compared"] == found.compared == sum(found.tokens.values())


def test_a_wrong_token_is_reported_with_its_place(wide: AsIf, monkeypatch: pytest.MonkeyPatch) -> None:
    spoilt: list[tuple[int, int, int]] = []
    add = wide.driver.add

    def tampered(requests, listener):
        """The third token of one request, on its way to whoever asked."""
        received: list[int] = []

        def listen(event):
            begin = len(received)
            received.extend(event.token_ids)
            if begin <= 2 < len(received) and not spoilt and event.finish_reason is None:
                tokens = list(event.token_ids)
                right = tokens[2 - begin]
                tokens[2 - begin] = (right + 1) % 90
                spoilt.append((prompts(5).index(list(requests[0].prompt_ids)), right, tokens[2 - begin]))
                event = event._replace(token_ids=tuple(tokens))
            listener(event)

        return add(requests, listen)

    def alone_then_tampered(*given):
        made = list(_cases(*given))
        monkeypatch.setattr(wide.driver, "add", tampered)  # what is answered alone goes there, too
        return made

    monkeypatch.setattr(module, "_cases", alone_then_tampered)
    found = audit_arrivals(wide, prompts(5), False, [0.0], PARAMS)
    assert found.differing > 0
    [(prompt, right, wrong)] = spoilt
    [one] = found.divergences
    assert (one.prompt, one.position, one.plain, one.speculative) == (prompt, 2, right, wrong)
    assert found.as_json()["differing"] == found.differing


def test_wrong_logprobs_are_reported(wide: AsIf, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(*given):
        made = list(_cases(*given))
        for case in made:
            for entry in (case.alone.logprobs or [])[:1]:
                entry.logprob += 0.01
        return made

    monkeypatch.setattr(module, "_cases", shifted)
    found = audit_arrivals(wide, prompts(3), False, [0.0], PARAMS)
    assert found.differing == 0 < found.differing_logprobs <= 2 * found.requests["logprobs"]


def test_a_model_that_feels_its_company_is_found_out(leaky: AsIf) -> None:
    found = audit_arrivals(leaky, prompts(3), False, [0.0], PARAMS)
    assert found.differing > 0 and found.divergences


def test_it_goes_on_until_enough_was_compared(wide: AsIf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SET", 10)
    shares: list[float] = []
    found = audit_arrivals(
        wide,
        prompts(2),
        False,
        [0.7],
        PARAMS,
        Extent(tokens=500),
        lambda _, share, what: shares.append(share),
    )
    assert found.compared >= 500 and found.differing == 0
    assert shares == sorted(shares) and shares[-1] == 1.0 and len(shares) > 2


def test_each_answer_counts_when_it_ends(wide: AsIf) -> None:
    """One is enough here, so that the others are aborted and nothing of them is left."""
    received: list[tuple[int, str]] = []

    def tell(found: module.Traffic, share: float, what: str) -> None:
        received.append((found.requests.total(), what))

    found = audit_arrivals(wide, prompts(3), False, [0.0], PARAMS, Extent(tokens=1), tell)
    alone = [what for _, what in received if what]
    assert alone[0].startswith("1 of ") and len(alone) == len(received) - received[-1][0] > 1
    assert received[-1][0] == found.requests.total() <= 2 and found.compared > 0
    assert wide.driver.run(lambda: wide.engine.idle)


def test_it_ends_in_time(wide: AsIf) -> None:
    found = audit_arrivals(wide, prompts(3), False, [0.0], PARAMS, Extent(seconds=1e-9))
    assert found.compared == 0 < found.seconds


def test_a_short_audit_of_a_slow_model_compares_what_was_answered_in_time(
    wide: AsIf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not spend its time on plain answers alone."""
    real = wide.generate

    def slowly(*given, **options):
        time.sleep(0.3)
        return real(*given, **options)

    monkeypatch.setattr(wide, "generate", slowly)
    before = list[str]()  # what went on before anything was compared

    def tell(found, share, what) -> None:
        before.extend([] if found.compared else [what])

    extent, params = Extent(seconds=4), replace(PARAMS, max_tokens=4)
    found = audit_arrivals(wide, prompts(3), False, [0.0], params, extent, tell)
    assert 0 < len(before) < 10 and found.compared > 0 and not found.differing


def test_kinds_that_cannot_be_had_are_left_out_and_named(wide: AsIf, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_):
        raise OutriderError("structured output needs llguidance")

    monkeypatch.delitem(wide.__dict__, "compiler", raising=False)
    monkeypatch.setattr("outrider.engine.llm.GrammarCompiler", missing)
    found = module.Traffic()
    kinds = _kinds(wide, found)
    assert found.left_out == dict.fromkeys(GRAMMARS, "structured output needs llguidance")
    assert set(kinds) == {USUAL, *KINDS} - set(GRAMMARS)


def test_a_seed_gives_the_same_traffic(wide: AsIf) -> None:
    def traffic(seed: int) -> list[tuple]:
        rnd = random.Random(seed)
        cases = list(_cases(wide, wide, prompts(4), range(16), [USUAL, "penalties"], [0.0], PARAMS, rnd))
        made = _traffic(wide, cases, ["auto", "lm"], 4, rnd)
        return [(a.case.prompt, a.case.kind, a.case.params.seed, a.method, a.at, a.until) for a in made]

    first = traffic(1)
    assert first == traffic(1) != traffic(2)
    moments = [at for *_, at, _ in first]
    assert moments == sorted(moments) and len(set(moments)) > 5  # among decodes, not all at first
    assert max(Counter(moments).values()) > 1  # and some together


def test_what_the_engine_refuses_is_raised(wide: AsIf) -> None:
    with pytest.raises(InvalidRequest, match="max_tokens"):
        audit_arrivals(wide, prompts(1), False, [0.0], SamplingParams(max_tokens=1000))


def test_predictions_hold_in_part() -> None:
    text = "one two three four five six seven"
    nearly = _nearly(text)
    assert nearly[:10] == text[:10] and nearly[-10:] == text[-10:] and nearly != text
    assert _nearly("")
