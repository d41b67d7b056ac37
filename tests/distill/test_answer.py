"""Answers are the engine's own, several turns are one text, and whoever starts again ends with the same bytes."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from outrider import LLM, SamplingParams
from outrider.distill import answer as answering
from outrider.distill.answer import Ask, Conversations, Filling, Said, Talk, shard_bounds
from outrider.distill.folder import Folder
from outrider.distill.open_shards import open_shards, read_open, write_open
from outrider.distill.prompts import Prompt, Schedule, drawn
from outrider.distill.recipe import Recipe
from outrider.distill.report import Silent
from outrider.errors import InvalidRequest, OutriderError
from outrider.load import token_shards
from outrider.load.prompts import Row
from outrider.load.token_shards import Conversation, read_shard, read_shards, shard_paths

RECIPE = Recipe(prompts=("p",), max_tokens=6, context=96, seed=5, batch_tokens=128)
PROMPTS = [
    Prompt(f"p{i}", "chat", Row(str(i), turns=("hello " * (i % 5 + 1), "and then"))) for i in range(1, 30)
]


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "FIRST_SHARD", 3)


def worth(row: Conversation) -> int:
    return int(row.answered.sum())


def filling(llm: LLM, folder: Path, goal: int = 120, recipe: Recipe = RECIPE, prompts=PROMPTS) -> Filling:
    talks = Conversations(llm, recipe, Schedule(prompts, recipe))
    return Filling(llm, folder, talks.answer, worth, goal, expected=6)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def whole(target: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answering, "FIRST_SHARD", 3)
        filling(target, folder).run(Silent(), "answer", "tokens")
    return folder


def test_an_answer_is_what_generate_gives(target: LLM, whole: Path) -> None:
    schedule = Schedule(PROMPTS, RECIPE)
    [first, *_] = read_shards(whole)
    prompt, temperature = schedule.prompt(0)
    assert (first.prompt, first.temperature, first.task) == (prompt.id, temperature, "chat")
    messages: list[dict[str, str]] = []
    for turn, words in enumerate(prompt.row.turns):
        messages.append({"role": "user", "content": words})
        ids = target.chat_ids(messages)
        seed = drawn(RECIPE.seed, 0, f"turn {turn}")
        params = SamplingParams(temperature=temperature, max_tokens=6, seed=seed)
        [out] = target.generate([ids], params)
        if turn == 0:
            text = [*ids, *out.token_ids]
            assert first.ids[: len(text)].tolist() == text
            assert first.answered[: len(text)].tolist() == [False] * len(ids) + [True] * len(out.token_ids)
        messages.append({"role": "assistant", "content": out.text})


def test_the_budget_is_kept_by_whole_shards(whole: Path) -> None:
    sums = [sum(map(worth, read_shard(path))) for path in shard_paths(whole).values()]
    assert sum(sums) >= 120 > sum(sums[:-1])
    assert list(shard_paths(whole)) == list(range(len(sums)))
    assert max(len(row) for row in read_shards(whole)) <= RECIPE.context


def test_who_starts_again_ends_with_the_same_bytes(target: LLM, whole: Path, tmp_path: Path) -> None:
    """Killed after a shard or two, one of them out of order; then one is lost, and half a file is left behind."""
    for number in (0, 2):
        path = shard_paths(whole)[number]
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / ".shard-00001.safetensors.part").write_bytes(b"half")
    filling(target, tmp_path).run(Silent(), "answer", "tokens")
    assert contents(tmp_path) == contents(whole)


@pytest.mark.parametrize("ended", [1, 2, 4])
def test_single_conversations_are_kept(
    target: LLM, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: int
) -> None:
    """Ctrl-C after some have ended, none or one of three to a shard: the next run asks for the others alone."""
    first, again = filling(target, tmp_path), filling(target, tmp_path)
    were: set[int] = set()

    def end(shard: int, number: int, rows: list[Conversation], inner=first._end) -> None:
        inner(shard, number, rows)
        were.add(number)
        if first.count == ended:
            raise KeyboardInterrupt

    monkeypatch.setattr(first, "_end", end)
    with pytest.raises(KeyboardInterrupt):
        first.run(Silent(), "answer", "tokens")
    there = sum(map(worth, read_shards(tmp_path)))
    kept = [
        row for path in open_shards(tmp_path).values() for rows in read_open(path).values() for row in rows
    ]
    assert there + sum(map(worth, kept)) == first.total
    asked, shown = [], []
    monkeypatch.setattr(again, "talk", lambda number, inner=again.talk: asked.append(number) or inner(number))
    report = Silent()
    monkeypatch.setattr(report, "begin", lambda stage, total, unit, done: shown.append(done))
    again.run(report, "answer", "tokens")
    assert shown == [first.total] and contents(tmp_path) == contents(whole)
    assert len(were) == ended and asked and not were & set(asked)


def test_another_recipe_is_refused_where_single_conversations_are_kept(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    write_open(folder.answers, 0, {3: [Conversation.of([1, 2], [False, True], "chat", 0.0, "a prompt")]})
    [row] = read_open(open_shards(folder.answers)[0])[3]
    assert (row.prompt, row.ids.tolist(), row.answered.tolist()) == ("a prompt", [1, 2], [False, True])
    assert folder.begun() == {"answer"} and folder.kept() == "1 conversations with 1 tokens of answers"


def test_more_at_once_changes_nothing(target: LLM, whole: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(answering, "WAITING", -0.8)  # one or two at a time
    filling(target, tmp_path).run(Silent(), "answer", "tokens")
    assert contents(tmp_path) == contents(whole)


def test_waves_change_nothing_but_when_requests_come(
    target: LLM, whole: Path, tmp_path: Path, monkeypatch
) -> None:
    """As on a GPU: what has come to its end is replaced together, several turns and the last few included."""
    monkeypatch.setitem(answering.WAVE, "cpu", 0.5)
    made = filling(target, tmp_path)
    together, sizes, submit = target.settings.max_sequences, [], Filling._submit

    def submitted(self: Filling) -> None:
        sizes.append((len(self._ready), len(self._talks)))
        submit(self)

    monkeypatch.setattr(Filling, "_submit", submitted)
    made.run(Silent(), "answer", "tokens")
    assert contents(tmp_path) == contents(whole)
    assert len(sizes) > 2 and max(talks for _, talks in sizes) <= together
    assert all(ready >= together // 2 or ready == talks for ready, talks in sizes)


def test_a_larger_budget_goes_on(target: LLM, whole: Path, tmp_path: Path) -> None:
    for name, data in contents(whole).items():
        (tmp_path / name).write_bytes(data)
    shards = filling(target, tmp_path, goal=150).run(Silent(), "answer", "tokens")
    assert shards > len(shard_paths(whole))
    assert contents(whole).items() <= contents(tmp_path).items()


def test_a_corrupt_shard_is_named_and_answered_again_once_deleted(
    target: LLM, whole: Path, tmp_path: Path
) -> None:
    for name, data in contents(whole).items():
        (tmp_path / name).write_bytes(data)
    broken = tmp_path / "shard-00001.safetensors"
    broken.write_bytes(broken.read_bytes()[:-9])
    with pytest.raises(OutriderError, match=r"shard-00001.*delete it; a distillation answers it again"):
        filling(target, tmp_path).run(Silent(), "answer", "tokens")
    broken.unlink()
    filling(target, tmp_path).run(Silent(), "answer", "tokens")
    assert contents(tmp_path) == contents(whole)


def test_a_missing_first_shard_and_more_than_enough_after_it(
    target: LLM, whole: Path, tmp_path: Path
) -> None:
    """What others are worth does not make up for it; and what is not needed goes."""
    filling(target, tmp_path, goal=200).run(Silent(), "answer", "tokens")
    assert len(contents(tmp_path)) > len(contents(whole)) + 1
    (tmp_path / "shard-00000.safetensors").unlink()
    filling(target, tmp_path).run(Silent(), "answer", "tokens")
    assert contents(tmp_path) == contents(whole)


def test_a_full_disk_loses_nothing_that_was_finished(
    target: LLM, whole: Path, tmp_path: Path, monkeypatch
) -> None:
    written: list[int] = []
    sync = token_shards.os.fsync

    def full(descriptor: int) -> None:
        written.append(descriptor)
        if len(written) > 3:  # a file and its folder each
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(token_shards.os, "fsync", full)
        with pytest.raises(OutriderError, match=r"No space left on device \(make room"):
            filling(target, tmp_path).run(Silent(), "answer", "tokens")
    kept = contents(tmp_path)
    assert kept and kept.items() < contents(whole).items()
    filling(target, tmp_path).run(Silent(), "answer", "tokens")
    assert contents(tmp_path) == contents(whole)


def test_a_slow_answer_holds_nobody_up(target: LLM, tmp_path: Path) -> None:
    """Conversation 0 is the longest by far; those after it are through before it is."""
    talks = Conversations(target, RECIPE, Schedule(PROMPTS, RECIPE))
    ended: list[int] = []

    def talk(number: int) -> Talk:
        ask = Ask(target.chat_ids([{"role": "user", "content": "x"}]), 1.0, 50 if number == 0 else 2, 1)
        said = yield ask
        ended.append(number)
        row = np.array(said.tokens, np.int32)
        return [Conversation(row, np.ones(len(row), np.bool_))]

    assert talks.context == 96
    Filling(target, tmp_path, talk, worth, 90, expected=2).run(Silent(), "answer", "tokens")
    assert ended.index(0) > 12


def test_prompts_without_room_are_given_up_in_the_end(target: LLM, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(answering, "IN_VAIN", 20)
    long = [Prompt("long", "chat", Row("1", turns=("word " * 200,)))]
    with pytest.raises(InvalidRequest, match=r"conversations came to nothing.*--context"):
        filling(target, tmp_path, prompts=long).run(Silent(), "answer", "tokens")


def test_a_failing_engine_is_an_error(target: LLM, tmp_path: Path) -> None:
    def talk(number: int) -> Talk:
        yield Ask([0] * 10_000, 0.0, 4, 1)
        return []

    with pytest.raises(InvalidRequest, match="10000"):
        Filling(target, tmp_path, talk, worth, 10, expected=2).run(Silent(), "answer", "tokens")
    assert target.generate(["x"], SamplingParams(max_tokens=1))  # and the engine goes on


# ------------------------------------------------------------------------------------- talks, without an engine


class FakeLLM:
    """Just enough of an LLM for talks that nobody answers."""

    def __init__(self, llm: LLM) -> None:
        self.tokenizer, self.template, self.settings = llm.tokenizer, llm.template, llm.settings
        self.engine = llm.engine

    def answer(self, text: str, complete: bool = True) -> Said:
        return Said([*self.tokenizer.encode(text), *([0] if complete else [])], complete)


def drive(talk: Talk, answers: Iterator[Said]) -> tuple[list[Ask], list[Conversation]]:
    asks = []
    try:
        asks.append(next(talk))
        while True:
            asks.append(talk.send(next(answers)))
    except StopIteration as ended:
        return asks, ended.value


def test_turns_are_one_text(target: LLM) -> None:
    fake = FakeLLM(target)
    talks = Conversations(fake, RECIPE, Schedule(PROMPTS[:1], RECIPE))
    asks, [row] = drive(talks.answer(0), iter([fake.answer("hello"), fake.answer(" 12 hello", False)]))
    assert len(asks) == 2
    shown = fake.tokenizer.decode(row.ids.tolist(), skip_special=False)
    assert (
        shown
        == "<|start|>uhello hello<|end|><|start|>ahello<|end|><|start|>uand then<|end|><|start|>a 12 hello"
    )
    wrote = [fake.tokenizer.decode([token], skip_special=False) for token in row.ids[row.answered].tolist()]
    assert "".join(wrote) == "hello<|end|> 12 hello"


def test_other_tokens_for_the_same_text_begin_another_row(target: LLM) -> None:
    fake = FakeLLM(target)
    talks = Conversations(fake, RECIPE, Schedule(PROMPTS[:1], RECIPE))
    letters = [fake.tokenizer.encode(letter)[0] for letter in "hello"]  # the tokenizer would merge them
    asks, rows = drive(talks.answer(0), iter([Said([*letters, 0], True), fake.answer("x")]))
    assert [int(row.answered.sum()) for row in rows] == [6, 2]
    assert rows[0].ids.tolist() == [*asks[0].ids, *letters, 0]
    assert rows[1].ids.tolist() == [*asks[1].ids, *fake.answer("x").tokens]


def test_a_follow_up_is_made_up_where_it_is_due(target: LLM) -> None:
    fake = FakeLLM(target)
    single = [Prompt("one", "chat", Row("1", turns=("hello",)))]
    recipe = replace(RECIPE, follow_ups=1.0)
    talks = Conversations(fake, recipe, Schedule(single, recipe))
    said = [fake.answer("12"), fake.answer("and why so?"), fake.answer("hello")]
    asks, [row] = drive(talks.answer(0), iter(said))
    assert fake.tokenizer.decode(list(asks[1].ids), skip_special=False).endswith(
        "<|start|>a12<|end|><|start|>u"
    )
    assert asks[1].temperature == 1.0
    shown = fake.tokenizer.decode(row.ids.tolist(), skip_special=False)
    assert (
        shown == "<|start|>uhello<|end|><|start|>a12<|end|><|start|>uand why so?<|end|><|start|>ahello<|end|>"
    )
    assert int(row.answered.sum()) == len(said[0].tokens) + len(said[2].tokens)
    asks, [row] = drive(
        talks.answer(0), iter([fake.answer("12"), fake.answer("\x07")])
    )  # no good: it ends there
    assert len(asks) == 2


def test_made_up_prompts_begin_where_the_template_begins_a_users_words(target: LLM) -> None:
    fake = FakeLLM(target)
    talks = Conversations(fake, RECIPE)
    [ask], [row] = drive(talks.make_up(3), iter([fake.answer("why is it so?")]))
    assert fake.tokenizer.decode(list(ask.ids), skip_special=False) == "<|start|>u"
    assert fake.tokenizer.decode(row.ids.tolist()) == "why is it so?"
    assert drive(talks.make_up(3), iter([fake.answer("why is it", complete=False)]))[1] == []
    assert next(talks.make_up(3)).seed == ask.seed != next(talks.make_up(4)).seed


def test_a_conversation_as_it_is_keeps_its_words_but_the_last_answer(target: LLM) -> None:
    fake = FakeLLM(target)
    messages = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "theirs"})
    talks = Conversations(fake, RECIPE, Schedule([Prompt("m", "chat", Row("1", messages=messages))], RECIPE))
    [ask], _ = drive(talks.answer(0), iter([fake.answer("ours")]))
    assert fake.tokenizer.decode(list(ask.ids), skip_special=False) == "<|start|>uhi<|end|><|start|>a"
    raw = Conversations(fake, RECIPE, Schedule([Prompt("r", "x", Row("1", prompt="Once"))], RECIPE))
    [ask], _ = drive(raw.answer(0), iter([fake.answer("ours")]))
    assert fake.tokenizer.decode(list(ask.ids)) == "Once"


def test_shards_cover_all_numbers_once() -> None:
    at = 0
    for shard in range(400):
        begin, end = shard_bounds(shard)
        assert begin == at and end > begin
        at = end
    assert end - begin == 3 << answering.DOUBLINGS


def test_what_a_conversation_costs_beside_the_answer(target: LLM) -> None:
    """A GPU answers a thousand a second; generous here, as the machine may be busy."""
    fake, said = FakeLLM(target), FakeLLM(target).answer("hello " * 20)
    talks = Conversations(fake, RECIPE, Schedule(PROMPTS[:1], RECIPE))
    drive(talks.answer(0), iter([said, said]))
    begun = time.thread_time()
    for number in range(100):
        drive(talks.answer(number), iter([said, said]))
    assert (time.thread_time() - begun) / 100 < 0.01
