"""Whether new prompts wait for one step, so that they are read together with those that arrive meanwhile.

At many sequences the host takes longer for a step with prompt rows than the device does. Where prompts arrive all the
time, every step would have some, and every token would wait for the host.
"""

from __future__ import annotations

from typing import NamedTuple

from outrider.control.guards import KEEP
from outrider.types import StepRecord


class _Seconds(NamedTuple):
    """Of captured steps: the whole step, and by token of a sequence the time of the step and of the device."""

    step: float
    token: float
    device: float


class PromptPause:
    def __init__(self) -> None:
        self.known: dict[bool, _Seconds] = {}  # by whether the steps had prompt rows

    def observe(self, record: StepRecord) -> None:
        tokens = record.emitted / max(record.decoding, 1)
        if record.captured is None or tokens <= 0:
            return
        taken = _Seconds(record.total_s, record.total_s / tokens, record.target_s / tokens)
        before = self.known.get(record.prompt_rows > 0, taken)
        mixed = (KEEP * old + (1 - KEEP) * new for old, new in zip(before, taken, strict=True))
        self.known[record.prompt_rows > 0] = _Seconds(*mixed)

    def pays(self, decoding: int, waiting: float) -> bool:
        """After a step with prompt rows: whether `waiting` prompts, beside `decoding` sequences, wait for one without.

        Decoding sequences gain the difference between the two, less what twice the prompt rows take the device
        beyond the host's time. Each waiting prompt loses a step.
        """
        if len(self.known) < 2:
            return False
        prompts, plain = self.known[True], self.known[False]
        longer = max(2 * prompts.device - plain.device - prompts.step, 0.0)
        return (prompts.step - plain.token - longer) * decoding > waiting * plain.step
