"""The drafters of an engine, by name. One that fails costs its drafts, never an answer, and is not asked for ever."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

from outrider.draft.drafter import Drafter, ResidentDrafter
from outrider.draft.merged import MergedDrafter
from outrider.draft.reading import NetworkDrafter
from outrider.types import NO_DRAFT, Draft, DraftPlan, Outcome, Sequence, Verdict

if TYPE_CHECKING:
    from torch import Tensor

    from outrider.device.ops import StepOps

log = logging.getLogger(__name__)

MAX_FAULTS = 3  # of a drafter, before it is left alone
SCORED_DEPTH = 4  # tokens of a proposal that is scored: for more, it stays open longer whether any was right
AVAILABLE = 15  # tokens that are looked for: the longest chain


class DrafterFailed(Exception):
    """Something went wrong in a drafter's code, and which drafter's it was."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(name)
        self.name, self.error = name, error


class Drafters:
    def __init__(self, drafters: Mapping[str, Drafter], vocab: int) -> None:
        """`vocab` is the target's."""
        self._drafters: dict[str, Drafter] = {}
        self._resident: dict[str, ResidentDrafter] = {}
        self.vocab = vocab
        self.faults: dict[str, int] = {}
        self.add(drafters)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._drafters)

    def members(self, name: str) -> tuple[str, ...]:
        """The drafters that draft under this name: several if they are merged."""
        drafter = self._drafters[name]
        return drafter.names if isinstance(drafter, MergedDrafter) else (name,)

    def __contains__(self, name: object) -> bool:
        return name in self._drafters

    def add(self, drafters: Mapping[str, Drafter]) -> None:
        """Further ones, known to requests that come from now on."""
        self._drafters.update(drafters)
        for name, drafter in drafters.items():
            if isinstance(drafter, ResidentDrafter) and drafter.max_depth > 0:
                self._resident[name] = drafter

    def remove(self, names: Iterable[str]) -> None:
        """While no request is running."""
        for name in names:
            del self._drafters[name]
            self._resident.pop(name, None)

    def __getitem__(self, name: str) -> Drafter:
        return self._drafters[name]

    def start(self, sequence: Sequence) -> None:
        for name, drafter in self._drafters.items():
            self._call(name, drafter.start, sequence)

    def propose(self, name: str, sequences: Seq[Sequence], draft_plans: Seq[DraftPlan]) -> list[Draft]:
        nothing = [NO_DRAFT] * len(sequences)
        if self.left_alone(name):
            return nothing
        try:
            drafts = self._drafters[name].propose(sequences, draft_plans)
            if len(drafts) != len(draft_plans) or any(
                not 0 <= t < self.vocab for d in drafts for t in d.tokens
            ):
                raise ValueError("it gave a wrong number of drafts, or a token outside the vocabulary")
            if any(_wrong_probabilities(draft, self.vocab) for draft in drafts):
                raise ValueError("it gave draft probabilities that are none")
            return list(drafts)
        except Exception as error:  # a drafter may be the user's own code
            self.note_fault(DrafterFailed(name, error))
            return nothing

    def accept(self, name: str, sequence: Sequence, draft: Draft, verdict: Verdict) -> None:
        self._call(name, self._drafters[name].accept, sequence, draft, verdict)

    def stop(self, sequence: Sequence) -> None:
        for name, drafter in self._drafters.items():
            self._call(name, drafter.stop, sequence)

    def resident(self, name: str) -> ResidentDrafter | None:
        """The drafter, if it can take part in resident steps."""
        return None if self.left_alone(name) else self._resident.get(name)

    @property
    def model_free(self) -> tuple[str, ...]:
        """Those that take no pass."""
        return tuple(n for n, one in self._resident.items() if one.model_free and not self.left_alone(n))

    def instead_of(self, name: str) -> str:
        """The drafter, or a model-free one if it was removed."""
        return name if name in self._drafters else next(iter(self.model_free), "none")

    def available(self, name: str, sequence: Sequence) -> int:
        """Draft tokens that a model-free drafter has for a sequence."""
        return len(self.shadow_propose(name, sequence, len(sequence.tokens), AVAILABLE))

    def shadow_propose(self, name: str, sequence: Sequence, end: int, n: int) -> Seq[int]:
        try:
            return self._resident[name].shadow_propose(sequence, end, n)
        except Exception as error:
            self.note_fault(DrafterFailed(name, error))
            return ()

    def propose_resident(self, name: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
        """The drafter's `propose_resident`. An error in it is raised as the drafter's, not the target's."""
        drafter = self._resident[name]

        def propose(*given: Any) -> tuple[Tensor, Tensor | None]:
            try:
                return drafter.propose_resident(*given)
            except Exception as error:
                raise DrafterFailed(name, error) from error

        return propose

    def catch_up(self, name: str, ops: StepOps, sequences: list[Sequence]) -> None:
        self._call(name, self._resident[name].catch_up, ops, sequences)

    def replace_weights(self, name: str, weights: Mapping[str, Tensor]) -> None:
        """Replaces a drafter's weights and forgets the faults it had with the old ones, alone or merged."""
        drafter = self._drafters[name]
        assert isinstance(drafter, NetworkDrafter)
        drafter.replace_weights(weights)
        for known in self.including(name):
            self.faults.pop(known, None)

    def including(self, name: str) -> list[str]:
        """This drafter and the merged ones that it is part of."""
        return [one for one in self._drafters if name in self.members(one)]

    def _call(self, name: str, verb: Callable[..., None], *given: object) -> None:
        try:
            verb(*given)
        except Exception as error:
            self.note_fault(DrafterFailed(name, error))

    def left_alone(self, name: str) -> bool:
        """Whether it failed so often that it is not asked any more."""
        return self.faults.get(name, 0) >= MAX_FAULTS

    def note_fault(self, failed: DrafterFailed) -> None:
        name, error = failed.name, failed.error
        self.faults[name] = self.faults.get(name, 0) + 1
        rest = "; it will not be asked again" if self.faults[name] >= MAX_FAULTS else ""
        if self.faults[name] <= MAX_FAULTS:
            log.warning("the drafter %s failed: %r%s", name, error, rest)


def _wrong_probabilities(draft: Draft, vocab: int) -> bool:
    """Whether the distributions its tokens are said to be drawn from cannot be any."""
    log_q = draft.log_q
    return log_q is not None and (log_q.shape != (len(draft), vocab) or bool(log_q.isnan().any()))


class Scores:
    """What model-free drafters would have got, had they been asked: they are scored on what was verified.

    The text is gone through as drafts would have: each proposal begins behind the one before it, as far as that was
    right, and behind the token that the target adds. A proposal that may still turn out right waits for more tokens.
    """

    def __init__(self, drafters: Drafters) -> None:
        self.drafters = drafters
        self.due: dict[Sequence, dict[str, int]] = {}  # by drafter: tokens before its next proposal
        self.wrong: dict[Sequence, Counter[str]] = {}  # by drafter: proposals in a row

    def score(self, name: str, sequence: Sequence, patience: int = 0) -> Outcome | None:
        """The outcome of the drafter's next proposal; None while it is open. After a pause, that is a proposal whose
        tokens are all known. The more proposals in a row were wrong, the more tokens are passed over, up to `patience`.
        """
        tokens, known, due = sequence.tokens, len(sequence.tokens), self.due.setdefault(sequence, {})
        at = max(due.get(name, 0), known - SCORED_DEPTH, sequence.prompt_len)
        if at >= known:
            return None
        proposed, right = self.drafters.shadow_propose(name, sequence, at, SCORED_DEPTH), 0
        while right < min(len(proposed), known - at) and proposed[right] == tokens[at + right]:
            right += 1
        if right < len(proposed) and at + right == known:
            due[name] = at
            return None
        wrong = self.wrong.setdefault(sequence, Counter())
        wrong[name] = 0 if right else wrong[name] + 1
        due[name] = at + right + 1 + min(wrong[name], patience)
        return Outcome(sequence, DraftPlan(name), len(proposed), len(proposed), right, right)

    def stop(self, sequence: Sequence) -> None:
        self.due.pop(sequence, None)
        self.wrong.pop(sequence, None)
