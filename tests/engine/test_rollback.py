"""Whatever is accepted, preempted or aborted, the caches of target and drafters stay whole and nothing
leaks.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.device.state import MAX_REFERENCES
from outrider.draft.eagle import EagleDrafter
from outrider.draft.eagle_head import load_eagle
from outrider.draft.early_exit import EarlyExitDrafter
from outrider.draft.lookup import LookupDrafter
from outrider.draft.merged import MergedDrafter
from outrider.types import NO_DRAFT_PLAN, Draft, DraftPlan
from tests.sweep import sweep
from tests.tiny import (
    VOCAB,
    Always,
    eagle_tensors,
    lm_drafter,
    noised_model,
    prompt_of,
    request,
    run_alone,
    tiny_engine,
    tiny_model,
    write_eagle,
)  # fmt: skip

KINDS = ("lookup", "lm", "early_exit", "eagle", "lookup+lm", "part")


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    model = tiny_model()
    head = write_eagle(tmp_path_factory.mktemp("head"), model.config, eagle_tensors(model.config, 60))
    return model, noised_model(), head


class Part:
    """Right for as long as a dice says, then wrong, with branches hung on anywhere: any accepted length may
    come.
    """

    def __init__(self, answers: dict[str, list[int]], dice) -> None:
        self.answers, self.dice = answers, dice

    def start(self, sequence) -> None: ...
    def accept(self, sequence, draft, verdict) -> None: ...
    def stop(self, sequence) -> None: ...

    def propose(self, sequences, draft_plans):
        return [self.guess(s, draft_plan.nodes) for s, draft_plan in zip(sequences, draft_plans, strict=True)]

    def guess(self, s, nodes: int) -> Draft:
        right = self.answers.get(s.request.id, [])[len(s.output) :][: self.dice.randrange(nodes + 1)]
        tokens, parents = list(right), list(range(-1, len(right) - 1))
        while len(tokens) < nodes:
            parents.append(self.dice.randrange(-1, len(tokens)))
            tokens.append(self.dice.randrange(VOCAB))
        return Draft(tuple(tokens), tuple(parents))


class Dice(Always):
    def __init__(self, dice, plain: float = 0.2, deepest: int = 5) -> None:
        super().__init__(NO_DRAFT_PLAN)
        self.dice, self.plain, self.deepest = dice, plain, deepest

    def one(self, sequence) -> DraftPlan:
        if self.dice.random() < self.plain:
            return NO_DRAFT_PLAN
        depth = self.dice.randint(1, self.deepest)
        mode = sequence.request.params.speculation.mode
        nodes = depth if mode == "rejection" else self.dice.choice((depth, 3 * depth))
        return DraftPlan(self.dice.choice(KINDS), nodes, depth)


def make_engine(parts, planner, answers, lag, room: int, sequences: int = 8, **settings):
    model, draft_model, head = parts

    def drafters(cache):
        lookup, lm = LookupDrafter(owners=3), lm_drafter(draft_model, cache)
        eagle = EagleDrafter(load_eagle(head, model, cache.context), cache.store, cache.table)
        return {
            "lookup": lookup, "lm": lm, "eagle": eagle,
            "lookup+lm": MergedDrafter({"lookup": lookup, "lm": lm}, cache.table),
            "early_exit": EarlyExitDrafter(model, cache.store, cache.table, 1), "part": Part(answers, planner.dice),
        }  # fmt: skip

    return tiny_engine(
        model, planner, drafters=drafters, lag=lag, max_sequences=sequences, step_rows=24,
        cache_bytes=room * model.config.kv_bytes_per_token, **settings,
    )  # fmt: skip


def whole(engine) -> None:
    """Every slot accounted for, as many behind a row's cached tokens as steps in flight need, and drafters that hold
    nothing of a sequence that ended, nor say that they have read more of one than there is.
    """
    engine.table.check()
    live = {s for choices in engine.live.values() for s in choices}
    for s in live:
        ahead = sum(
            one.known + one.drafted
            for step in engine.in_flight
            for one in step.work
            if one.sequence is s and one.alive
        )
        assert s.row < 0 or engine.table.lengths[s.row] == s.cached + ahead
        for name in ("lm", "eagle"):
            assert engine.drafters[name].progress.of(s) <= len(s.tokens)
    assert set(engine.drafters["lookup"].texts) <= live
    assert set(engine.drafters["lookup+lm"]._given) <= live


def empty(engine) -> None:
    engine.table.prefix.clear()
    assert engine.table.used == 0 and engine.table.rows_left == len(engine.table.lengths)
    assert not engine.drafters["lookup"].texts and not engine.drafters["lookup+lm"]._given
    assert not engine.writers and not engine.live and engine.scheduler.idle and not engine.drafters.faults


def ask(name: str, length: int, **more):
    return request(name, prompt_of(length, length), {1}, owner=name[0], **{"temperature": 0.8, **more})


@settings(
    max_examples=4, suppress_health_check=list(HealthCheck)
)  # an example is long, and the parts are shared
@given(data=st.data())
def test_any_course_of_events(parts, lag, data):
    dice = random.Random(data.draw(st.integers(0, 10**6)))
    requests = [
        ask(f"r{i}", data.draw(st.integers(2, 60)), max_tokens=data.draw(st.integers(1, 40)),
            n=data.draw(st.sampled_from([1, 1, 3])), temperature=data.draw(st.sampled_from([0, 0.8])),
            speculation={"mode": data.draw(st.sampled_from(["coupled", "coupled", "rejection", "lossy"]))})
        for i in range(6)
    ]  # fmt: skip
    answers = {r.id: run_alone(parts[0], r) for r in requests[:3]}
    engine = make_engine(parts, Dice(dice), answers, lag, data.draw(st.sampled_from([160, 300, 2000])))
    waiting, received = list(requests), {r.id: [] for r in requests}
    while waiting or not engine.idle:
        if waiting and (engine.idle or data.draw(st.booleans())):  # never wait for nothing
            engine.add(waiting.pop())
        for event in (event for result in engine.step() for event in result.events):
            if event.choice == 0:
                received[event.request_id] += event.token_ids
        whole(engine)
        if dice.random() < 0.05:
            gone = f"r{dice.randrange(3, 6)}"
            engine.abort(gone)
            waiting = [r for r in waiting if r.id != gone]
            whole(engine)
    for r in requests[:3]:
        if r.params.speculation.mode == "coupled" or (
            r.params.temperature == 0 and r.params.speculation.mode == "rejection"
        ):
            assert received[r.id] == answers[r.id]
    empty(engine)


@pytest.mark.parametrize("most", sweep([250, 10_000], quick=[250]))
def test_thousands_of_steps_leak_nothing(parts, lag, most):
    dice = random.Random(9)
    planner = Dice(dice, plain=0.75, deepest=2)
    engine = make_engine(parts, planner, {}, lag, room=110, sequences=3)
    engine.check_integrity = False  # checked below, not after every step
    steps = made = 0
    while steps < most:
        while len(engine.live) < 3:
            made += 1
            mode = dice.choice(("coupled", "coupled", "rejection"))
            engine.add(ask(f"{dice.choice('abcd')}{made}", dice.randrange(2, 30), max_tokens=dice.randrange(1, 60),
                           n=dice.choice((1, 1, 2)), speculation={"mode": mode}))  # fmt: skip
        engine.step()
        steps += 1
        if dice.random() < 0.01:
            engine.abort(dice.choice(list(engine.live)))
        if steps % 50 == 0:
            whole(engine)
    assert engine.scheduler.preemptions > most // 200
    for name in list(engine.live):
        engine.abort(name)
    while not engine.idle:
        engine.step()
    whole(engine)
    empty(engine)
    past = engine.drafters["lookup"].past
    assert len(past) <= 3 and all(one.size <= MAX_REFERENCES for one in past.values())
