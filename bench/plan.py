"""What the planner makes of a device's costs, without one: the real planner, a clock that is only counted.

    python -m bench.plan --batches 1,4,16,32,64 --groups 5

Answers are drawn at random: how long they are, which draft tokens are accepted, whether a lookup finds anything. Costs
are those of an H200 with an 8B target and a 1B draft, as LOG.md has them. It says whether speculation would ever cost
more than it brings, and why; what it does bring, a device must say.
"""

from __future__ import annotations

import argparse
import random
import statistics
from dataclasses import dataclass

from outrider.control.planner import Planner
from outrider.control.trees import CHAINS, NO_TREE, TreeShape, choice_rate, node_ranks, tree_nodes
from outrider.device.buckets import SizeChoice, sizes_up_to
from outrider.draft.drafter import MAX_PASSES
from outrider.draft.drafters import Drafters
from outrider.draft.lm import LmDrafter
from outrider.draft.lookup import LookupDrafter
from outrider.draft.scores import DEPTH as SCORED
from outrider.engine.engine import MAX_SCORED
from outrider.engine.shared_drafts import SharedDrafts
from outrider.types import NO_BET, Bet, Options, Outcome, Request, SamplingParams, Sequence, StepRecord, Work

PLAIN = {1: 3.86, 2: 3.9, 4: 4.0, 8: 4.1, 16: 4.18, 32: 4.55, 64: 5.03}  # ms of a round
# Milliseconds more, by rows.
LOOKED_UP = {16: 0.25, 32: 0.3, 48: 0.45, 64: 0.5, 80: 0.85, 96: 1.0, 128: 1.15, 192: 3.6, 256: 4.0}
DRAFT = {4: 0.95, 8: 1.15, 16: 1.3, 32: 1.75, 64: 2.2}  # ms of a level, up to so many sequences
READING = 0.009  # ms a prompt's token
MOST_TOKENS = 128
DRAFTERS = ("lm", "lookup")
# All that is asked of drafters here is which draft trees they have in captured steps: no model, no device.
LM = LmDrafter.__new__(LmDrafter)
LM.max_depth = MAX_PASSES
SHARED = SharedDrafts(Drafters({"lm": LM, "lookup": LookupDrafter()}, vocab=0), captures=False)


@dataclass(frozen=True, slots=True)
class Task:
    prompt: int  # tokens
    whole: float  # the share of answers that go on to the end
    # How often the first token of a lookup holds: on average, and how answers differ.
    copies: tuple[float, float]
    further: float  # and each one after another that did


TASKS = {"chat": Task(45, 0.9, (0.23, 0.12), 0.6), "rewrite": Task(400, 0.3, (0.64, 0.25), 0.9)}


def milliseconds(drafter: str, form: TreeShape, size: int) -> float:
    if form == NO_TREE:
        return PLAIN[size]
    rows = size * (form[1] + 1)
    spent = PLAIN[size] + next((ms for most, ms in LOOKED_UP.items() if rows <= most), 0.015 * rows)
    if drafter == "lookup":
        return spent
    return spent + form[0] * next(ms for most, ms in DRAFT.items() if size <= most or most == 64)


@dataclass(slots=True)
class Answer:
    sequence: Sequence
    left: int
    chance: float  # that a draft's first choice holds
    copied: float  # that the first token of a lookup does
    unread: int  # by the draft

    def accepted(self, drafter: str, form: TreeShape, task: Task, rnd: random.Random) -> tuple[int, int]:
        """How many guesses hold, and how many of them were first choices."""
        if drafter == "lookup":
            chances = (self.copied, *[task.further] * (form[0] - 1))
            held = next((k for k, likely in enumerate(chances) if rnd.random() >= likely), form[0])
            return held, held
        shape, ranks = tree_nodes(form), node_ranks(form)
        node, held, straight = -1, 0, True
        firsts = 0
        while children := [i for i, parent in enumerate(shape.parents) if parent == node]:
            rank, left = 0, rnd.random()
            while rank < len(children) and (left := left - choice_rate(rank, self.chance)) >= 0:
                rank += 1
            if rank == len(children):
                break
            node, held = children[rank], held + 1
            straight = straight and ranks[node] == 0
            firsts += straight
        return held, firsts


def answers(batch: int, task: Task, rnd: random.Random) -> list[Answer]:
    made = []
    for i in range(batch):
        params = SamplingParams(temperature=0.7, max_tokens=MOST_TOKENS)
        length = MOST_TOKENS if rnd.random() < task.whole else rnd.randint(10, MOST_TOKENS)
        one = Sequence(Request(f"r{i}", (1, 2, 3), params, i), 0, i, [1, 2, 3], cached=2)
        made.append(Answer(one, length - 1, _near(rnd, 0.735, 0.08), _near(rnd, *task.copies), task.prompt))
    return made


def _near(rnd: random.Random, mean: float, spread: float) -> float:
    return min(0.95, max(0.02, rnd.gauss(mean, spread)))


def run(
    planner: Planner | None, live: list[Answer], task: Task, sizes: SizeChoice, rnd: random.Random
) -> float:
    """Tokens a second; without a planner, plain."""
    spent, tokens, dice = 0.0, sum(one.left for one in live), random.Random(0)
    while live:
        size = sizes.choose(len(live))
        bets = [NO_BET] * len(live) if planner is None else _planned(planner, live, size)
        drafter = min((bet.drafter for bet in bets if bet.nodes), default="none")
        form = max((bet.depth, bet.nodes) for bet in bets)
        reading = [one for one, bet in zip(live, bets, strict=True) if bet.drafter == "lm"]
        if planner is not None and (unread := sum(one.unread for one in reading)):
            took = max(1.2, unread * READING)
            planner.learn_reading("lm", unread, took / 1e3)
            spent += took
        took = milliseconds(drafter, form, size)
        spent += took
        outcomes, scored, emitted = [], [], 0
        for one, bet in zip(live, bets, strict=True):
            held, firsts = one.accepted(bet.drafter, form, task, rnd) if bet.nodes else (0, 0)
            if bet.drafter != "lookup" and planner is not None and len(live) <= MAX_SCORED:
                right, _ = one.accepted("lookup", (SCORED, SCORED), task, dice)
                scored.append(Outcome(one.sequence, Bet("lookup"), SCORED, SCORED, right, right))
            count = min(held + 1, one.left)
            one.sequence.tokens.extend([1] * count)
            one.sequence.cached += count
            one.left, emitted = one.left - count, emitted + count
            one.unread = 0 if bet.drafter == "lm" else one.unread + count if one.unread or count > 3 else 0
            if form != NO_TREE:
                outcomes.append(Outcome(one.sequence, bet, form[1], form[0], held, firsts))
        if planner is not None:
            n, seconds = len(live), took / 1e3
            captured = drafter, form, size
            record = StepRecord(
                n, n, n, 0, 0, emitted, 0, 0, seconds, 0, seconds, outcomes, captured=captured
            )
            record.scored = scored
            planner.observe(record)
            for one in live:
                if one.left <= 0:
                    planner.forget(one.sequence)
        live = [one for one in live if one.left > 0]
    return tokens / spent * 1e3


def _planned(planner: Planner, live: list[Answer], size: int) -> list[Bet]:
    work = [Work(one.sequence, 1) for one in live]
    trees = {name: SHARED.trees(name, size) for name in DRAFTERS}
    unread = {one.sequence: one.unread for one in live}
    behind = lambda name, sequence: unread[sequence] if name == "lm" else 0  # noqa: E731
    options = Options(size, (True,) * len(live), trees, behind, CHAINS[-1][0], SHARED.drafters.riding)
    while (drafter := planner.unmeasured(work, options)) != "none":
        costs = [("none", NO_TREE, PLAIN[size] / 1e3)]
        costs += [(drafter, form, milliseconds(drafter, form, size) / 1e3) for form in trees[drafter]]
        planner.learn(drafter, size, costs)
    return SHARED.fitted(planner.plan(work, options).bets)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", default="1,4,16,32,64")
    parser.add_argument("--groups", type=int, default=5)
    given = parser.parse_args()
    for name, task in TASKS.items():
        planner = Planner("lm", choices=DRAFTERS)
        for batch in map(int, given.batches.split(",")):
            sizes = SizeChoice()
            sizes.made.update(sizes_up_to(batch))
            ratios = []
            for group in range(given.groups):
                told = []
                for who in (planner, planner, None):  # the first time it learns
                    rnd = random.Random(1000 * batch + group)
                    told.append(run(who, answers(batch, task, rnd), task, sizes, rnd))
                ratios.append(told[1] / told[2])
            median, worst = statistics.median(ratios), min(ratios)
            print(f"{name:8} batch {batch:3} auto {median:5.2f}x plain (worst of {given.groups} {worst:.3f})")


if __name__ == "__main__":
    main()
