"""The first stage: the target answers prompts, at serving's temperatures, and what it wrote is kept as shards.

A conversation is a generator: it yields what to ask next and is sent what the target said. Many run side by side, as
many as the engine takes and a few more, and each goes on when its own answer is there. Which conversation has which
number, prompt, temperature and seed is a function of the recipe (prompts.py), and answers do not depend on what else
runs. A run that is killed and started again therefore ends with the same bytes.
"""

from __future__ import annotations

import contextlib
import queue
import time
from array import array
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import numpy as np

from outrider.distill.open_shards import OpenShard, Rows, drop_open, open_shards, read_open, write_open
from outrider.distill.prompts import Prompt, Schedule, drawn, is_prompt
from outrider.distill.recipe import Recipe
from outrider.distill.report import Report
from outrider.engine.llm import LLM
from outrider.errors import InvalidRequest, OutriderError, stopped
from outrider.load.literal import ChatEncoder
from outrider.load.token_shards import Conversation, read_shard, shard_path, shard_paths, write_shard
from outrider.types import Event, Request, SamplingParams
from outrider.types import Sequence as Running

FIRST_SHARD, SHARDS_A_SIZE, DOUBLINGS = 16, 16, 5  # shards of 16 conversations, then of 32, at last of 512
WAITING = 1 / 8  # requests handed in beyond those that run, so that the engine never looks for one
# On a GPU a step without prompts is several times as quick as one with them, and two prompts in it cost what a
# hundred do. So what comes to its end there is replaced together, once it is this share of what may run.
WAVE = {"cpu": 0.0, "cuda": 0.25}
TURN_TOKENS = 384  # of a user's turn that the target makes up
LEAST_ROOM = 16  # tokens of the context left for an answer; below it is not asked
IN_VAIN = 2000  # conversations without one answer, until it is given up
LOOK_SECONDS = 0.5  # between two looks at what others brought, and at how many tokens are written
KEEP_SECONDS = 5.0  # until the conversations of an incomplete shard are written again
PRIOR = 8  # talks that what is expected counts for


@dataclass(frozen=True, slots=True)
class Ask:
    ids: Sequence[int]
    temperature: float
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Said:
    tokens: list[int]
    complete: bool  # it ended by itself


Talk = Generator[Ask, Said, list[Conversation]]


# ---------------------------------------------------------------------------------------------- conversations


@dataclass(slots=True)
class Transcript:
    """The tokens of a conversation as they come. Where a later prompt does not begin with what was said before (the
    template dropped some of it, or other tokens spell the same text), another row begins.
    """

    prompt: Prompt
    temperature: float
    ids: list[int] = field(default_factory=list)
    answered: bytearray = field(default_factory=bytearray)
    rows: list[Conversation] = field(default_factory=list)

    def add(self, prompt_ids: Sequence[int], answer: Sequence[int]) -> None:
        known = len(self.ids)
        if list(prompt_ids[:known]) != self.ids:
            self._end_row()
            known = 0
        self.ids += [*prompt_ids[known:], *answer]
        self.answered += bytes(len(prompt_ids) - known) + b"\1" * len(answer)

    def _end_row(self) -> None:
        ids, answered = np.array(self.ids, np.int32), np.frombuffer(bytes(self.answered), np.bool_)
        self.rows.append(Conversation(ids, answered, self.prompt.task, self.temperature, self.prompt.id))
        self.ids, self.answered = [], bytearray()

    def end(self) -> list[Conversation]:
        if self.ids:
            self._end_row()
        return self.rows


class Conversations:
    """Conversations with a target by their numbers."""

    def __init__(self, llm: LLM, recipe: Recipe, schedule: Schedule | None = None) -> None:
        self.llm, self.recipe, self.schedule = llm, recipe, schedule
        self.context = min(recipe.context, llm.engine.context)
        self.chats = ChatEncoder.of(llm.template, llm.tokenizer, llm.settings.special_tokens_in_text)
        self._first: dict[str, array[int]] = {}  # prompts are asked many times over

    def answer(self, number: int) -> Talk:
        """One prompt, all its turns, and perhaps one more that the target makes up."""
        assert self.schedule is not None
        prompt, temperature = self.schedule.prompt(number)
        said = Transcript(prompt, temperature)
        if prompt.row.prompt is not None:
            ids = self.llm.tokenizer.encode(prompt.row.prompt)
            yield from self._ask(said, ids, number, 0)
            return said.end()
        messages = [dict(message) for message in prompt.row.messages]
        while messages and messages[-1].get("role") == "assistant":
            messages.pop()  # that is for the target to say
        turns = prompt.row.turns or ("",)
        more = drawn(self.recipe.seed, number, "follow up") / 2**53 < self.recipe.follow_ups
        for turn in range(len(turns) + more):
            words = turns[turn] if turn < len(turns) else (yield from self._follow_up(messages, number))
            if words:
                messages.append({"role": "user", "content": words})
            elif turn:
                break
            answer = yield from self._ask(said, self._chat_ids(prompt, messages, turn), number, turn)
            if answer is None:
                break
            if turn + 1 < len(turns) + more:
                messages.append({"role": "assistant", "content": self._text(answer)})
        return said.end()

    def make_up(self, number: int) -> Talk:
        """A user's turn by the target itself: it goes on where the template begins one."""
        assert self.chats is not None
        ids = self.chats.open_turn()
        seed = drawn(self.recipe.seed, number, "made up")
        said = yield Ask(ids, 1.0, min(TURN_TOKENS, self.context - len(ids)), seed)
        if not is_prompt(self._text(said), said.complete):
            return []
        answered = np.ones(len(said.tokens), np.bool_)
        return [Conversation(np.array(said.tokens, np.int32), answered, "made-up", 1.0, str(number))]

    def _ask(
        self, said: Transcript, ids: Sequence[int], number: int, turn: int
    ) -> Generator[Ask, Said, Said | None]:
        """What the target says; None where there is no room for it."""
        room = self.context - len(ids)
        if room < min(LEAST_ROOM, self.recipe.max_tokens):
            return None
        seed = drawn(self.recipe.seed, number, f"turn {turn}")
        answer = yield Ask(ids, said.temperature, min(room, self.recipe.max_tokens), seed)
        said.add(ids, answer.tokens)
        return answer

    def _follow_up(self, messages: list[dict[str, str]], number: int) -> Generator[Ask, Said, str]:
        """The user's next turn as the target makes it up; nothing if that is no good."""
        assert self.chats is not None
        ids = self.chats.open_turn(messages)
        room = min(TURN_TOKENS, self.context - len(ids))
        if room < LEAST_ROOM:
            return ""
        answer = yield Ask(ids, 1.0, room, drawn(self.recipe.seed, number, "next turn"))
        text = self._text(answer)
        return text.strip() if is_prompt(text, answer.complete) else ""

    def _text(self, answer: Said) -> str:
        return self.llm.tokenizer.decode(answer.tokens)

    def _chat_ids(self, prompt: Prompt, messages: list[dict[str, str]], turn: int) -> Sequence[int]:
        assert self.chats is not None
        if turn:
            return self.chats.encode(messages)
        if prompt.id not in self._first:
            try:
                self._first[prompt.id] = array("i", self.chats.encode(messages))
            except InvalidRequest as problem:
                raise InvalidRequest(f"the prompt {prompt.id!r}: {problem}", "prompts") from None
        return self._first[prompt.id]


# ---------------------------------------------------------------------------------------------------- shards


def shard_bounds(shard: int) -> tuple[int, int]:
    """Numbers of the conversations in a shard. The first shards are small, so that a killed run loses
    little; later ones are larger, so that many conversations do not make very many files.
    """
    begin, doublings = 0, 0
    while doublings < DOUBLINGS and shard >= SHARDS_A_SIZE:
        begin += SHARDS_A_SIZE * (FIRST_SHARD << doublings)
        shard, doublings = shard - SHARDS_A_SIZE, doublings + 1
    size = FIRST_SHARD << doublings
    return begin + shard * size, begin + (shard + 1) * size


@dataclass(frozen=True, slots=True)
class Part:
    """Which shards a process fills, if several fill one folder: every `of`-th from `index` on."""

    index: int = 0
    of: int = 1


ALONE = Part()


class Filling:
    """Fills a folder with shards of talks until those from the first on without a gap are worth `goal`. Others may fill
    it, too: each has its part, and all of them look now and then at what is there.
    """

    def __init__(
        self,
        llm: LLM,
        folder: Path,
        talk: Callable[[int], Talk],
        worth: Callable[[Conversation], int],
        goal: int,
        expected: float,
        most: int | None = None,
        part: Part = ALONE,
    ) -> None:
        self.part, self._looked = part, 0.0
        self.llm, self.folder, self.talk, self.worth, self.goal = llm, folder, talk, worth, goal
        self.expected = expected  # what a talk is worth, before any has come to its end
        self.most = most  # conversations, whatever they are worth
        self.done: dict[int, int] = {}  # what each finished shard is worth
        self.count = 0  # conversations that came to their end now
        self.total_now = 0  # what those are worth
        self.total = 0  # and with the shards before them
        self._open: dict[int, OpenShard] = {}
        self._kept: dict[int, Rows] = {}  # conversations of shards that an earlier run left open
        self._kept_at = time.monotonic()
        self._written = (
            0  # tokens of all answers, those that are not complete included; by the engine's thread
        )
        self._following = 0  # shards before it are done or open
        self._waiting: deque[tuple[int, int]] = deque()  # shard and number of what is to be asked next
        self._prefix = (0, 0)  # shards without a gap, and what they are worth
        self._talks: dict[str, tuple[int, int, Talk]] = {}  # shard, number and talk by request
        self._sequences: dict[str, Running] = {}  # of the engine's thread
        self._received: queue.SimpleQueue[Running | BaseException] = queue.SimpleQueue()
        self._ready: list[Request] = []  # to be handed in with the next wave
        together = llm.settings.max_sequences
        self._wave = max(1, int(together * WAVE[llm.model.device.type]))
        self._room = int(together * (1 + WAITING)) + 1 if self._wave == 1 else together
        self._bases: dict[tuple[float, int], Request] = {}
        self._names = count()
        self._closed = False

    def run(self, report: Report, stage: str, unit: str) -> int:
        """Returns the number of shards needed. Deletes the others, unless another process may still write them."""
        self._look()
        self._take_kept()
        report.begin(stage, max(self.goal, self.total), unit, self.total)
        try:
            while not self._enough():
                self._start(self._room - len(self._talks))
                if not self._talks and not self._await_others():
                    break  # there are no more
                if self._talks:
                    if len(self._ready) >= min(self._wave, len(self._talks)):
                        self._submit()  # a wave of them, or all there are left
                    self._hear()
                self._keep()
                self._report(report, in_tokens=unit == "tokens")
        finally:
            self._stop()
            report.end()
        if self.part.of == 1:
            cut_shards(self.folder, self._prefix[0])
        return self._prefix[0]

    def _look(self) -> None:
        """Count the shards that are there and not yet counted."""
        self._looked = time.monotonic()
        for number, path in shard_paths(self.folder).items():
            if number not in self.done:
                self.done[number] = sum(map(self.worth, read_shard(path)))
                self.total += self.done[number]

    def _take_kept(self) -> None:
        """Count the conversations that an earlier run left in shards of this process's part."""
        for shard, path in open_shards(self.folder).items():
            if shard not in self.done and shard % self.part.of == self.part.index:
                self._kept[shard] = read_open(path)
                self.total += sum(self.worth(row) for rows in self._kept[shard].values() for row in rows)

    def _keep(self, now: bool = False) -> None:
        """Write the conversations of open shards, now and then: one file each is synced to the disk."""
        if not now and time.monotonic() - self._kept_at < KEEP_SECONDS:
            return
        self._kept_at = time.monotonic()
        for shard, still in self._open.items():
            if len(still.rows) > still.kept:
                write_open(self.folder, shard, still.rows)
                still.kept = len(still.rows)

    def _report(self, report: Report, in_tokens: bool) -> None:
        """Tokens are counted as they are written. Shards are filled, so that more may be written than the goal."""
        mean = (self.total_now + PRIOR * self.expected) / (self.count + PRIOR)
        partial = max(0, self._written - self.total_now) if in_tokens else 0
        left = (len(self._talks) + len(self._waiting)) * mean
        coming = max(left, partial + left / 4)  # long answers end last: some of them is always left
        whole = max(self.goal, self.total + coming)
        report.update(self.total + partial, f"{self.count} conversations finished", whole)

    def _await_others(self) -> bool:
        """Whether another process may still bring what is missing."""
        if self.part.of == 1 or (self.most is not None and shard_bounds(self._prefix[0])[0] >= self.most):
            return False
        time.sleep(LOOK_SECONDS)
        return True

    def _enough(self) -> bool:
        if self.part.of > 1 and time.monotonic() - self._looked > LOOK_SECONDS:
            self._look()
        self._prefix = whole_shards(self.done, self.goal, self._prefix)
        return self._prefix[1] >= self.goal

    def _start(self, room: int) -> None:
        started = 0
        while started < room and (self._waiting or self._open_shard(started)):
            if not self._waiting:
                continue  # all conversations of that shard were there
            shard, number = self._waiting.popleft()
            started += self._go_on(shard, number, self.talk(number), None)

    def _open_shard(self, starting: int) -> bool:
        """Take the next shard in hand, unless those that are will do, as talks went so far."""
        if not self.total and self.count > IN_VAIN:
            raise InvalidRequest(
                f"{self.count} conversations came to nothing: the prompts leave no room for an answer "
                "(--context), or the target says nothing",
                "context",
            )
        shard, others = self._following, self.part.of - 1
        while shard in self.done or shard % self.part.of != self.part.index:
            shard += 1
        mean = (self.total_now + PRIOR * self.expected) / (self.count + PRIOR)
        coming = (len(self._talks) + starting) * mean
        # Answers of open shards; others have as much in hand as this one.
        begun = self.total - sum(self.done.values())
        will_do = self.total + coming + others * (begun + coming) >= self.goal
        begun_before = max((*self.done, *self._kept), default=-1)
        if will_do and shard > begun_before:  # one that is missing before others is always needed
            return False
        begin, end = shard_bounds(shard)
        if self.most is not None and begin >= self.most:
            return False
        rows = self._kept.pop(shard, {})
        self._open[shard] = OpenShard(end - begin - len(rows), rows, len(rows))
        self._following = shard + 1
        self._waiting.extend((shard, number) for number in range(begin, end) if number not in rows)
        self._complete(shard)
        return True

    def _go_on(self, shard: int, number: int, talk: Talk, said: Said | None) -> bool:
        """Make the next request of a talk ready; whether there is one."""
        try:
            ask = next(talk) if said is None else talk.send(said)
        except StopIteration as ended:
            self._end(shard, number, ended.value)
            return False
        request = self._request(ask)
        self._talks[request.id] = shard, number, talk
        self._ready.append(request)
        return True

    def _request(self, ask: Ask) -> Request:
        """What such requests have in common is settled once: a GPU answers a thousand a second."""
        key = ask.temperature, ask.max_tokens
        if key not in self._bases:
            params = SamplingParams(temperature=ask.temperature, max_tokens=ask.max_tokens, seed=0)
            self._bases[key] = self.llm.request([0], params)
        name = f"distill{next(self._names)}"
        return replace(self._bases[key], id=name, prompt_ids=tuple(ask.ids), seed=ask.seed)

    def _end(self, shard: int, number: int, rows: list[Conversation]) -> None:
        still = self._open[shard]
        still.rows[number] = rows
        still.left -= 1
        self.count += 1
        worth = sum(map(self.worth, rows))
        self.total_now, self.total = self.total_now + worth, self.total + worth
        self._complete(shard)

    def _complete(self, shard: int) -> None:
        """Write a shard that waits for nothing any more."""
        if self._open[shard].left:
            return
        rows = self._open.pop(shard).rows
        ordered = [row for number in sorted(rows) for row in rows[number]]
        write_shard(self.folder, shard, ordered)
        drop_open(self.folder, shard)
        self.done[shard] = sum(map(self.worth, ordered))

    def _submit(self) -> None:
        requests, self._ready = self._ready, []

        def start() -> None:
            try:
                started = self.llm.driver.add(requests, self._listen)
                self._sequences.update((r.id, own[0]) for r, own in zip(requests, started, strict=True))
            except BaseException as refused:
                self._received.put(refused)

        self.llm.driver.post(start)

    def _listen(self, event: Event | BaseException) -> None:
        """On the engine's thread, for every token of every answer."""
        if isinstance(event, BaseException):
            self._received.put(event)
            return
        self._written += len(event.token_ids)
        if event.finish_reason is not None and not self._closed:
            self._received.put(self._sequences.pop(event.request_id))

    def _hear(self) -> None:
        """Wait a moment for an answer, and go on with all whose answers are there."""
        try:
            received: Running | BaseException = self._received.get(timeout=LOOK_SECONDS)
        except queue.Empty:
            return
        while True:
            if isinstance(received, BaseException):
                raise received if isinstance(received, InvalidRequest) else stopped(received) from received
            if received.finish_reason not in ("stop", "length"):
                raise OutriderError(f"an answer ended with {received.finish_reason}: {received.problem}")
            shard, number, talk = self._talks.pop(received.request.id)
            self._go_on(shard, number, talk, Said(received.output, received.finish_reason == "stop"))
            try:
                received = self._received.get_nowait()
            except queue.Empty:
                break

    def _stop(self) -> None:
        self._closed = True
        for name in self._talks:
            with contextlib.suppress(OutriderError):  # the engine is gone, and they with it
                self.llm.driver.abort(name)
        with contextlib.suppress(OutriderError):  # a full disk has been reported by then
            self._keep(now=True)


def whole_shards(done: Mapping[int, int], goal: int, begin: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """How many shards from the first on without a gap are worth `goal`, or how many there are, and what they are worth;
    `begin` is as much of it as is known.
    """
    shards, worth = begin
    while worth < goal and shards in done:
        worth += done[shards]
        shards += 1
    return shards, worth


def cut_shards(folder: Path, count: int) -> None:
    """Take away what came after the last shard that was needed."""
    for number in shard_paths(folder):
        if number >= count:
            shard_path(folder, number).unlink()
    for number in open_shards(folder):
        drop_open(folder, number)


def answered_tokens(row: Conversation) -> int:
    return int(row.answered.sum())


def one_each(row: Conversation) -> int:
    return 1
