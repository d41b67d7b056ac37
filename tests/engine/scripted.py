"""An engine whose target writes what it is given, at costs that are given: for tests of what the planner does."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from outrider.control.costs import CostModel
from outrider.control.guards import Guards
from outrider.control.planner import BASELINE, Planner
from outrider.device.capture import Timer
from outrider.draft.drafter import ResidentDrafter
from outrider.draft.lookup import LookupDrafter
from outrider.engine.engine import Engine
from outrider.engine.rows import Result
from outrider.engine.runner import InFlightStep
from outrider.model.decoder import Decoder
from outrider.types import NO_TREE, Draft, StepRecord, StepResult, TreeShape
from tests.sweep import sweep
from tests.tiny import VOCAB, random_tensors, request, tiny_config, tiny_engine, tiny_model

PROMPT, PHASE = 80, 180  # tokens
DEPTH = 8
# Eagerly, and with resident sequences. The planner is the same with the host behind and without, but for when it
# learns what came of a step.
LAGS = pytest.mark.parametrize("lag", sweep([None, 0, 1], quick=[None, 1]))


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

    def _logits(self, x, rows):
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

    def propose(self, sequences, draft_plans):
        scripts = [self.model.scripts[s.request.id] for s in sequences]
        each = zip(scripts, sequences, draft_plans, strict=True)
        return [
            Draft.chain(self.chain(script, len(s.tokens), draft_plan.depth)) for script, s, draft_plan in each
        ]

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
    lag: int | None,
    right: float,
    row: float = 0.02,
    level: float = 0.1,
    deepest: int = 15,
    names: tuple[str, ...] = ("head", "lookup"),
    guards: Guards | None = None,
    **settings,
) -> tuple[Engine, Head]:
    """A row costs so much of a plain step, and so does a level of the head's drafts. Deeper ones never pay. Requests
    get one of the drafters of these names, by default the first.
    """
    planner = Planner(names[0], choices=names, guards=guards or Guards(max_depth=deepest))
    costs = planner.costs
    costs.observe = partial(pretend, costs)
    costs.eager.by_rows = {n: 1 + row * (n - 1) for n in range(1, 200)}
    costs.eager.per_level = {"head": level, "lookup": 0.0}
    for size in (1, 2, 4):
        for name, each in (("head", row + level), ("lookup", row)):
            known = (
                (name, TreeShape(depth, depth), 1 + each * depth if depth <= deepest else 99.0)
                for depth in (1, 2, 4, 8, 15)
            )
            costs.captured.learn(name, size, [("none", NO_TREE, 1.0), *known])
    model = Scripted()
    head = Head(model, right)
    drafters = {"head": head, "lookup": LookupDrafter()}
    model.engine = engine = tiny_engine(model, planner, drafters=lambda _: drafters, lag=lag, **settings)
    if lag is not None:
        engine.runner.runs.observe = lambda *_: None  # plain passes go by the clock otherwise
        engine.runner.finish = partial(waited_for, engine.runner.finish)
        engine.runner.launch = partial(unfinished, engine.runner.launch)
    return engine, head


def pretend(costs: CostModel, record: StepRecord) -> None:
    """The step took what steps like it are given to cost, and nothing is learned from it."""
    if record.captured is not None:
        record.total_s = (costs.captured.seconds(record.captured) or 1.0) * record.passes
    else:
        deepest = {o.draft_plan.drafter: o.deepest for o in record.outcomes if o.drafted}
        record.total_s = costs.eager.step(record.rows) + costs.eager.drafting(deepest)
    if record.decodes_only:
        own = costs.eager if record.captured is None else costs.captured
        group = record.sequences if record.captured is None else record.captured.size
        plain = not record.drafted if record.captured is None else record.captured.tree == NO_TREE
        own.baselines.since[group] = 0 if plain else own.baselines.since.get(group, 0) + 1


class Unfinished(Timer):
    done = False


def unfinished(launch, *given) -> InFlightStep:
    """The device is not done with the step when the host wants to settle it."""
    step = launch(*given)
    step.launched.timer.__class__ = Unfinished
    return step


def waited_for(finish, step: InFlightStep) -> list[Result]:
    """The host has waited for the device, so that it has time to score and to plan."""
    results = finish(step)
    step.record.waited_s = 1e3
    return results


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
    """Step by step, how much of a request was written before, and who drafted; without plain steps that are measured to
    compare with.
    """
    found, written = [], 0
    for result in results:
        for event in result.events:
            if event.request_id == name:
                draft_plans = [o.draft_plan for o in result.record.outcomes if o.sequence.request.id == name]
                if not any(reason is BASELINE for reason in result.record.reasons):
                    found.append((written, draft_plans[0].drafter if draft_plans else "none"))
                written += len(event.token_ids)
    return found
