"""Whether new prompts wait for a step, to be read with those that arrive meanwhile."""

from __future__ import annotations

from outrider.control.costs import PromptPause
from outrider.types import NO_TREE
from tests.control.build import record


def observed(with_prompts: tuple[float, float], without: tuple[float, float], passes: int = 1) -> PromptPause:
    """Seconds of the step and of the device, of each kind of step of 100 sequences."""
    pause = PromptPause()
    for _ in range(30):
        for rows, (step, device) in ((64, with_prompts), (0, without)):
            taken = record(
                sequences=100, known=100 + rows, rows=100 + rows, prompt_rows=rows, tree=NO_TREE, size=128
            )
            taken.total_s, taken.target_s = step, device
            taken.emitted, taken.passes = 100 * (1 if rows else passes), passes
            pause.observe(taken)
    return pause


def test_prompts_do_not_wait_before_both_kinds_of_steps_were_seen() -> None:
    assert not PromptPause().pays(100, 1)


def test_prompts_wait_where_the_host_holds_up_steps_with_prompt_rows() -> None:
    host_bound = observed((6.2, 3.5), (9.6, 9.6), passes=4)
    assert host_bound.pays(113, 3)
    assert not host_bound.pays(4, 60)  # many would wait for few


def test_prompts_do_not_wait_where_the_device_is_busy_with_them() -> None:
    """Twice the prompt rows would take it as much longer as the step without them takes."""
    assert not observed((9.0, 9.0), (5.4, 5.4)).pays(64, 1)


def test_steps_that_are_not_captured_say_nothing() -> None:
    pause, eager = PromptPause(), record(sequences=2, known=18, rows=18, prompt_rows=16, seconds=9.0)
    eager.emitted = 2
    pause.observe(eager)
    assert not pause.known
