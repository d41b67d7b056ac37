"""The order in which a runner's steps are prepared, and what the planner learns of it. Which they are is warm_up.py's
business.
"""

from __future__ import annotations

from collections.abc import Iterator

from outrider.control.planner import Planner
from outrider.draft.drafters import Drafters
from outrider.engine.runner import Runner


def prepare_steps(runner: Runner, planner: Planner, drafters: Drafters, sequences: int) -> Iterator[bool]:
    """Capture and measure the steps of up to so many sequences, piece by piece: whether there is all that it takes to
    answer without drafts.
    """
    # Whoever asks for another drafter by name gets that.
    names = dict.fromkeys((*planner.choices, *filter(drafters.resident, drafters.names)))
    answerable = False
    for rows, seconds in runner.measure_rows(sequences, planner.costs.curve):
        planner.costs.learn_pass(rows, seconds)
        yield True  # whoever asks can be answered meanwhile
    for _ in runner.prepare_prompts():
        yield answerable
    for drafter, size in runner.unprepared(sequences, tuple(names)):
        answerable = drafter != "none"
        costs = []
        for cost in runner.measure(size, drafter):
            costs.append(cost)
            yield answerable
        planner.learn(drafter, size, costs)
        for rows, seconds in runner.measure_prompts(size) if drafter == "none" else ():
            planner.learn_prompt_rows(size, rows, seconds)
            yield answerable
    for drafter in names:
        tokens, seconds = runner.warm_up(drafter)
        if tokens:
            planner.learn_reading(drafter, tokens, seconds)
            yield answerable
    for _ in runner.prepare_rest(sequences, tuple(names), planner.costs.plain):
        yield answerable
