"""The order in which a runner's steps are prepared, and what the planner learns of it. Which they are is warm_up.py's
business.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import chain

from outrider.control.planner import Planner
from outrider.draft.drafters import Drafters
from outrider.engine.runner import Runner


def prepare_steps(runner: Runner, planner: Planner, drafters: Drafters, sequences: int) -> Iterator[bool]:
    """Capture and measure the steps of up to so many sequences, piece by piece: whether there is all that it takes to
    answer without drafts. Kernels are compiled ahead of that, those of steps without drafts first.
    """
    # Whoever asks for another drafter by name gets that.
    names = tuple(dict.fromkeys((*planner.choices, *filter(drafters.resident, drafters.names))))
    for rows, seconds in runner.measure_rows(sequences, planner.costs.curve):
        planner.costs.learn_pass(rows, seconds)
        yield True  # whoever asks can be answered meanwhile
    unprepared = runner.unprepared(sequences, names)
    plain = [one for one in unprepared if one[0] == "none"]
    for _ in chain(runner.compile(sequences), runner.prepare_prompts(), _measured(runner, planner, plain)):
        yield False
    for _ in chain(
        runner.compile(sequences, names),
        _measured(runner, planner, [one for one in unprepared if one[0] != "none"]),
        _read(runner, planner, names),
        runner.prepare_rest(sequences, names, planner.costs.plain),
    ):
        yield True


def _measured(runner: Runner, planner: Planner, sizes: Seq[tuple[str, int]]) -> Iterator[None]:
    """Of steps, by drafter and size."""
    for drafter, size in sizes:
        costs = []
        for cost in runner.measure(size, drafter):
            costs.append(cost)
            yield
        planner.learn(drafter, size, costs)
        for rows, seconds in runner.measure_prompts(size) if drafter == "none" else ():
            planner.learn_prompt_rows(size, rows, seconds)
            yield


def _read(runner: Runner, planner: Planner, drafters: Seq[str]) -> Iterator[None]:
    """How fast drafters catch up."""
    for drafter in drafters:
        tokens, seconds = runner.warm_up(drafter)
        if tokens:
            planner.learn_reading(drafter, tokens, seconds)
            yield
