"""Who moves this step, and how far: chunked prefill and decoding share every step.

Sequences that run come first, oldest first; then those that wait, while there is room. There is no prefill phase and no
decode phase: a sequence has known tokens that are not fed yet, and a step feeds it some of them. Beside decoding
sequences a step has only so many prompt rows as the planner says. Short prompts may overtake a long one that takes
several steps anyway; they get at most half of the prompt rows, so it is never held up for long. When the KV cache is
full the youngest is preempted: it gives its slots back and waits; it loses nothing, as its tokens are a function of the
request and are simply fed again. Since the oldest is never the one to go, everything ends.

Background requests pause while any other request runs or waits. They keep their slots until another request needs
them, and are preempted first. Where other requests come at all, steps of background requests alone have few prompt
rows, as the next one waits for the step in hand.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import islice

import numpy as np

from outrider.cache.pool import CacheFull
from outrider.cache.table import SlotTable
from outrider.types import Sequence, Work

# Maximum number of prompt rows in a step. Takes the number of decoding sequences, the seconds that the oldest prompt
# has waited, the number of waiting prompts, their tokens, and whether one of them is partly read.
PromptRows = Callable[[int, float, int, int, bool], int]
# The same where all sequences are of background requests. Takes the number of those that decode.
BackgroundRows = Callable[[int], int]
BACKGROUND_SECONDS = 0.05  # of a step without other requests: the next one waits for it (log/101)
LOOK_AHEAD = 16  # waiting prompts among which short ones are looked for
COUNTED = 256  # waiting prompts whose tokens are counted: more than a few steps read, as a rule


class Scheduler:
    def __init__(self, table: SlotTable, step_rows: int) -> None:
        self.table = table
        self.step_rows = step_rows
        self.waiting: deque[Sequence] = deque()
        self.waiting_background: deque[Sequence] = deque()
        self.background = 0  # live sequences of background requests
        self._answers_others = False  # a request that is no background request has come since the start
        self._queue = self.waiting  # what this step admits from
        self.running: list[Sequence] = []
        self.held: dict[str, list[Sequence]] = {}  # choices that wait for the first to read the prompt
        self.preemptions = 0

    def add(self, choices: list[Sequence]) -> None:
        """All choices of one request. The first reads the prompt; the others then branch from it."""
        self._queue_of(choices[0]).append(choices[0])
        self._answers_others |= not choices[0].request.background
        self.background += len(choices) if choices[0].request.background else 0
        if choices[1:]:
            self.held[choices[0].request.id] = choices[1:]

    def schedule(
        self, prompt_rows: PromptRows, background_rows: BackgroundRows, max_prompts: int
    ) -> list[Work]:
        """Sequences that can move, with slots for the known tokens that are fed. No sequence is admitted once
        `max_prompts` prompts reach their end in this step.
        """
        pause = self.background and (self.waiting or not all(s.request.background for s in self.running))
        self._queue = self.waiting if pause or not self.background else self.waiting_background
        # `pending` and `remaining` are written out here: this runs for every sequence in every step.
        ready = [
            s
            for s in self.running
            if len(s.tokens) > s.cached + s.launched and s.limit - len(s.tokens) > s.coming
        ]
        if pause:
            ready = [s for s in ready if not s.request.background]
        prompts = [s for s in ready if len(s.tokens) > s.cached + s.launched + 1]
        decoding = [s for s in ready if len(s.tokens) == s.cached + s.launched + 1] if prompts else ready
        work = self._decode(decoding)
        budget = self._prompt_budget(prompts, len(decoding), prompt_rows)
        if self.background and not pause and self._answers_others:
            budget = min(budget, max(background_rows(len(decoding)), len(prompts[:1]), not decoding))
        if work is None or prompts:
            work = self._chunks(work or [], ready if work is None else prompts, budget)
            budget -= sum(one.known for one in work if one.known > 1)
        reading = not all(one.emits for one in work)
        left = max_prompts - sum(one.emits and one.known > 1 for one in work)
        budget *= left > 0
        while budget > 0 and (sequence := self._next(budget if reading else None)) and self._admit(sequence):
            self._queue.remove(sequence)
            self.running.append(sequence)
            known = min(sequence.pending, budget - self._overtaking(sequence, budget))
            self.table.extend(sequence.row, known)
            work.append(Work(sequence, known))
            left -= work[-1].emits
            budget = budget - known if left > 0 else 0
            reading = reading or not work[-1].emits
        return work

    def _queue_of(self, sequence: Sequence) -> deque[Sequence]:
        return self.waiting_background if sequence.request.background else self.waiting

    def _prompt_budget(self, prompts: list[Sequence], decoding: int, prompt_rows: PromptRows) -> int:
        """Prompt rows of this step: as many as fit if no sequence decodes."""
        most = self.step_rows - decoding
        waiting = [*prompts, *islice(self._queue, 1)]
        if not decoding or not waiting:
            return most
        waited = time.perf_counter() - min(s.arrived for s in waiting)
        count = len(prompts) + len(self._queue)
        pending = sum(s.pending for s in (*prompts, *islice(self._queue, COUNTED)))
        return min(most, max(prompt_rows(decoding, waited, count, pending, bool(prompts)), len(prompts[:1])))

    def _overtaking(self, sequence: Sequence, budget: int) -> int:
        """Rows of waiting prompts that fit whole into half of the budget, if this one takes more than all of it."""
        half = room = budget // 2
        if sequence.pending <= budget:
            return 0
        for other in islice(self._queue, LOOK_AHEAD):
            room -= len(other.tokens) if len(other.tokens) <= room else 0
        return half - room

    def _next(self, room: int | None) -> Sequence | None:
        """The next sequence to admit: the oldest. While a prompt is only partly read, one that fits into `room`."""
        some = islice(self._queue, LOOK_AHEAD if room else 1)
        return next((s for s in some if room is None or len(s.tokens) <= room), None)

    def _decode(self, ready: list[Sequence]) -> list[Work] | None:
        """One token each, all at once, if there is room for that."""
        if not self.table.make_room(len(ready)):
            return None
        if len(ready) == 1:
            self.table.extend(ready[0].row, 1)
        elif ready:
            self.table.extend_all(np.array([s.row for s in ready]), 1)
        return [Work(sequence, 1) for sequence in ready]

    def _chunks(self, work: list[Work], ready: list[Sequence], budget: int) -> list[Work]:
        """Chunked prefill, added to `work`: a chunk for sequences that still read their prompt, one token for others.
        If slots run out, the youngest are preempted.
        """
        for sequence in ready:
            if sequence.row < 0:  # preempted while room was made for an older one
                continue
            known = sequence.pending
            if known > 1:
                known = min(known, budget - self._overtaking(sequence, budget))
                budget -= known
            if known and self._extend(sequence, known):
                work.append(Work(sequence, known))
        return [one for one in work if one.sequence.row >= 0]

    def prompt_read(self, sequence: Sequence) -> None:
        """The prompt's keys and values are there: others may start from them."""
        request = sequence.request
        self.table.remember(sequence.row, request.prompt_ids, request.owner)
        for twin in self.held.pop(request.id, []):
            if self.table.rows_left:
                self._branch(sequence, twin)
            else:
                self._queue_of(twin).appendleft(twin)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free what it holds."""
        if sequence.row >= 0:
            self._release(sequence)
            self.running.remove(sequence)
        elif sequence in (queue := self._queue_of(sequence)):
            queue.remove(sequence)
        self.background -= sequence.request.background
        # Choices that waited for this one to read the prompt must not wait for ever.
        self._queue_of(sequence).extendleft(reversed(self.held.pop(sequence.request.id, [])))

    @property
    def idle(self) -> bool:
        return not (self.running or self.waiting or self.waiting_background)

    def _extend(self, sequence: Sequence, n: int) -> bool:
        while True:
            try:
                self.table.extend(sequence.row, n)
                return True
            except CacheFull:
                youngest = self._youngest_background() or self.running[-1]
                self._preempt(youngest)
                if youngest is sequence:
                    return False

    def _youngest_background(self) -> Sequence | None:
        return next((s for s in reversed(self.running) if s.request.background), None)

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        self.running.remove(sequence)
        sequence.cached = sequence.launched = sequence.coming = 0
        self._queue_of(sequence).appendleft(sequence)
        self.preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self.table.commit(sequence.row, sequence.cached)  # slots of steps whose outcome no request waits for
        self.table.release(sequence.row, sequence.tokens[: sequence.cached], sequence.request.owner)
        sequence.row = -1
        sequence.released += 1

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence a row, if its whole text so far fits. Only background sequences are preempted for
        it, and only for one that is none.
        """
        while not self._open(sequence):
            paused = None if sequence.request.background else self._youngest_background()
            if paused is None:
                return False
            self._preempt(paused)
        return True

    def _open(self, sequence: Sequence) -> bool:
        if not self.table.rows_left:
            return False
        # A request for the prompt's own log-probabilities needs it read.
        reuse = sequence.request.params.prompt_logprobs is None
        row, reused = self.table.open(sequence.tokens, sequence.request.owner, reuse)
        if not self.table.make_room(len(sequence.tokens) - reused + 1):
            self.table.release(row)
            return False
        sequence.row, sequence.cached = row, reused
        sequence.started = sequence.started or time.perf_counter()
        if len(sequence.tokens) == sequence.prompt_len:
            sequence.reused = reused
        return True

    def _branch(self, leader: Sequence, twin: Sequence) -> None:
        twin.row = self.table.branch(leader.row)
        twin.cached = twin.reused = leader.prompt_len - 1  # its last token is fed again, for its logits
        twin.started = time.perf_counter()
        self.table.commit(twin.row, twin.cached)
        self.running.append(twin)
