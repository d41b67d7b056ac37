"""The drafter follows the content, for each request, eagerly and with resident sequences. What the target writes is
fixed beforehand, and costs are given, so that nothing depends on the clock.
"""

from __future__ import annotations

import random

import pytest
import torch

from outrider.control.guards import Guards
from outrider.control.planner import Planner
from outrider.draft.drafter import ResidentDrafter
from outrider.draft.lookup import LookupDrafter
from outrider.engine.engine import Engine
from outrider.model.decoder import Decoder
from outrider.types import Draft, StepResult
from tests.tiny import VOCAB, random_tensors, request, tiny_config, tiny_engine, tiny_model

PROMPT, PHASE = 80, 180  # tokens
FOLLOWS = 16  # steps, at most, until the choice is another
DEPTH = 8
LAGS = pytest.mark.parametrize("lag", [None, 0, 1])


class Scripted(Decoder):
    """A target that writes what is given, by table row, whatever it reads."""

    def __init__(self) -> None:
        config = tiny_config(context=2048)
        super().__init__(config, random_tensors(config), tiny_model(context=2048).kernels)
        self.scripts: dict[str, list[int]] = {}
        self.engine: Engine

    def _run(self, batch, store, layers):
        self.batch = batch
        return torch.zeros(batch.rows, self.config.hidden)

    def logits(self, x, rows):
        said = torch.zeros(len(rows), VOCAB)
        scripts = {s.row: self.scripts[s.request.id] for s in running(self.engine)}
        owners, positions = self.batch.table_rows[rows].tolist(), self.batch.positions[rows].tolist()
        for i, (row, position) in enumerate(zip(owners, positions, strict=True)):
            script = scripts.get(row, [])
            if position + 1 < len(script):
                said[i, script[position + 1]] = 50.0
        return said


class Head(ResidentDrafter):
    """Takes a pass a token, and is right as often as given, whatever the text."""

    max_depth, trees = DEPTH, False

    def __init__(self, model: Scripted, right: float) -> None:
        self.model, self.right, self.dice, self.asked = model, right, random.Random(0), 0

    def chain(self, script: list[int], known: int, depth: int) -> list[int]:
        self.asked += 1
        tokens = [*script[known : known + depth], *[0] * depth][:depth]
        return [t if self.dice.random() < self.right else (t + 1) % VOCAB for t in tokens]

    def propose(self, sequences, bets):
        scripts = [self.model.scripts[s.request.id] for s in sequences]
        each = zip(scripts, sequences, bets, strict=True)
        return [Draft.chain(self.chain(script, len(s.tokens), bet.depth)) for script, s, bet in each]

    def propose_resident(self, ops, rows, lengths, tree, context):
        scripts = {s.row: self.model.scripts[s.request.id] for s in running(self.model.engine)}
        each = zip(rows.tolist(), lengths.tolist(), strict=True)
        chains = [
            self.chain(scripts[row], n + 1, len(tree)) if row in scripts else [0] * len(tree)
            for row, n in each
        ]
        return torch.tensor(chains), None


def running(engine: Engine) -> list:
    return [s for some in engine.live.values() for s in some]


def novel(n: int, seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(VOCAB) for _ in range(n)]


def copied(text: list[int], n: int) -> list[int]:
    return (text * (n // len(text) + 1))[:n]


def make_engine(
    lag: int | None, right: float, row: float = 0.02, level: float = 0.1, deepest: int = 15
) -> tuple[Engine, Head]:
    """A row costs so much of a plain step, and so does a level of the head's drafts. Deeper ones never pay."""
    planner = Planner("head", choices=("head", "lookup"), guards=Guards(max_depth=deepest))
    costs = planner.costs
    costs.observe = lambda record: None
    costs.by_rows = {n: 1 + row * (n - 1) for n in range(1, 200)}
    costs.per_level = {"head": level, "lookup": 0.0}
    for size in (1, 2, 4):
        for name, each in (("head", row + level), ("lookup", row)):
            known = (
                (name, (depth, depth), 1 + each * depth if depth <= deepest else 99.0)
                for depth in (1, 2, 4, 8, 15)
            )
            planner.learn(name, size, [("none", (0, 0), 1.0), *known])
    model = Scripted()
    head = Head(model, right)
    drafters = {"head": head, "lookup": LookupDrafter()}
    model.engine = engine = tiny_engine(model, planner, drafters=lambda _: drafters, lag=lag)
    return engine, head


def run(engine: Engine, scripts: dict[str, list[int]], **options) -> list[StepResult]:
    """What came of every step; each answer is what the target writes by itself."""
    engine.model.scripts.update(scripts)
    sequences = [
        engine.add(request(name, script[:PROMPT], max_tokens=len(script) - PROMPT, **options))[0]
        for name, script in scripts.items()
    ]
    results: list[StepResult] = []
    while not engine.idle:
        results += engine.step()
    assert {s.request.id: s.tokens for s in sequences} == scripts
    return results


def choices(results: list[StepResult], name: str) -> list[tuple[int, str]]:
    """Step by step, how much of a request was written before, and who drafted."""
    found, written = [], 0
    for result in results:
        for event in result.events:
            if event.request_id == name:
                bets = [o.bet for o in result.record.outcomes if o.sequence.request.id == name]
                found.append((written, bets[0].drafter if bets else "none"))
                written += len(event.token_ids)
    return found


def script_of(seed: int) -> list[int]:
    """Copied, novel, copied again, and novel again."""
    prompt = novel(PROMPT, seed)
    first, second = novel(PHASE, seed + 1), novel(PHASE, seed + 2)
    return [*prompt, *copied(prompt, PHASE), *first, *copied(prompt, PHASE), *second]


@LAGS
def test_the_choice_follows_the_content(lag) -> None:
    engine, _ = make_engine(lag, right=0.8)
    chosen = choices(run(engine, {"a": script_of(1)}), "a")
    for phase, name in enumerate(("lookup", "head", "lookup", "head")):
        here = [who for written, who in chosen if written // PHASE == phase]
        followed = next(i for i in range(len(here)) if here[i:].count(name) >= 0.9 * len(here[i:]))
        assert followed <= FOLLOWS and here[-5:].count(name) >= 4, (phase, here)


@LAGS
def test_two_requests_of_a_step_have_a_drafter_each(lag) -> None:
    engine, _ = make_engine(lag, right=0.8, level=0.02, deepest=4)
    prompt = novel(PROMPT, 9)
    copies, new = [*prompt, *copied(prompt, PHASE)], [*novel(PROMPT, 10), *novel(PHASE, 11)]
    outcomes = [result.record.outcomes for result in run(engine, {"copies": copies, "new": new})]
    pairs = [{o.sequence.request.id: o for o in some} for some in outcomes if len(some) == 2]
    names = [(pair["copies"].bet.drafter, pair["new"].bet.drafter) for pair in pairs]
    assert names[FOLLOWS:].count(("lookup", "head")) >= 0.8 * len(names[FOLLOWS:]) > 10
    accepted = {name: sum(pair[name].accepted for pair in pairs[FOLLOWS:]) for name in ("copies", "new")}
    assert accepted["copies"] > 1.2 * accepted["new"] > 0  # each with its own


@LAGS
def test_a_drafter_that_is_never_right_is_dropped(lag) -> None:
    engine, head = make_engine(lag, right=0.0)
    run(engine, {"a": [*novel(PROMPT, 3), *novel(2 * PHASE, 4)]})
    assert 0 < head.asked <= 24  # until it was known, and probes
    before = head.asked
    results = run(engine, {name: [*novel(PROMPT, n), *novel(PHASE, n + 50)] for n, name in enumerate("bcd")})
    assert head.asked - before <= 0.02 * sum(result.record.emitted for result in results)


@LAGS
def test_scores_bring_lookup_back_without_a_draft_of_its_own(lag) -> None:
    """Nothing pays, then the text copies itself."""
    engine, _ = make_engine(lag, right=0.0)
    prompt = novel(PROMPT, 5)
    chosen = choices(run(engine, {"a": [*prompt, *novel(PHASE, 6), *copied(prompt, PHASE)]}), "a")
    plain = [who for written, who in chosen if PHASE // 2 < written < PHASE]
    assert plain.count("none") > 0.6 * len(plain)  # one step may be eight plain passes
    after = [who for written, who in chosen if written >= PHASE]
    assert "lookup" in after[:FOLLOWS] and after[-4:] == ["lookup"] * 4


@LAGS
def test_who_names_a_drafter_or_none_gets_that(lag) -> None:
    script = script_of(7)[: PROMPT + PHASE + 40]
    for asked, names in (
        ({"drafter": "lookup"}, {"lookup"}),
        ({"drafter": "head"}, {"head"}),
        (False, set()),
    ):
        engine, _ = make_engine(lag, right=0.8)
        records = [result.record for result in run(engine, {"a": script}, speculation=asked)]
        assert {o.bet.drafter for r in records for o in r.outcomes if o.drafted} == names
        assert all(o.bet.drafter in names for r in records for o in r.scored)


def test_reasons_say_when_there_is_nothing_to_propose() -> None:
    engine, _ = make_engine(None, right=0.0)
    engine.planner.choices = ("lookup",)
    engine.planner.default = "lookup"
    prompt = novel(PROMPT, 5)
    results = run(engine, {"a": [*prompt, *novel(PHASE, 6), *copied(prompt, PHASE)]})
    records = [result.record for result in results]
    for record in records[1:]:
        (reason,), (outcome,) = [one.kind for one in record.reasons], record.outcomes
        assert (reason == "pays") == (outcome.drafted > 0) == (outcome.bet.drafter == "lookup")
        assert reason in ("pays", "nothing found", "below break-even")
    assert {"pays", "nothing found"} <= {record.reasons[0].kind for record in records}
