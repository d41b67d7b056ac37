"""An LLM in untidy programs: forks, cancelled streams, an exit while busy, arguments of the wrong kind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider import LLM, Event, OutriderError, SamplingParams, Settings
from outrider.errors import InvalidRequest
from outrider.types import Speculation
from tests.serve.conftest import write_tiny

SHORT = SamplingParams(max_tokens=3, seed=1)
ENDLESS: dict[str, Any] = dict(max_tokens=1500, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny(made)
    return made


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Iterator[LLM]:
    with LLM(folder, draft="none", cache_bytes=1 << 22, threads=1) as made:
        yield made


# ----------------------------------------------------------------------------------------------------- forks


def in_child(work: Any, seconds: int = 20) -> str:
    """What some work in a forked child ended in."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            said = repr(work())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writes, said.encode())
        os._exit(0)
    os.close(writes)
    timer = threading.Timer(seconds, os.kill, (child, 9))
    timer.start()
    with os.fdopen(reads) as pipe:
        said = pipe.read()
    assert os.waitpid(child, 0)[1] == 0, "it hung"
    timer.cancel()
    return said


@pytest.mark.filterwarnings("ignore:This process")  # is multi-threaded: so it is
def test_a_forked_child_is_told_to_make_its_own(tiny: LLM) -> None:
    async def stream() -> None:
        async for _ in tiny.stream("a", SHORT):
            pass

    for work in (
        lambda: tiny.generate("a", SHORT),
        lambda: tiny.chat([{"role": "user", "content": "a"}], SHORT),
        lambda: asyncio.run(stream()),
        lambda: tiny.abort("r0"),
    ):
        assert in_child(work).startswith("OutriderError: this LLM belongs to process")
    assert in_child(tiny.close) == "None"
    assert tiny.generate("a", SHORT)[0].token_ids  # the parent goes on


# ---------------------------------------------------------------------------------------------------- streams


def test_a_stream_cancelled_before_it_began_leaves_nothing_behind(tiny: LLM) -> None:
    async def main() -> None:
        going = threading.Event()
        tiny.driver.post(lambda: going.wait(20) and None)  # the engine is busy with something else

        async def read() -> None:
            async for _ in tiny.stream("a", **ENDLESS):
                raise AssertionError("it never began")

        task = asyncio.create_task(read())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        going.set()

    asyncio.run(main())
    tiny.driver.run(lambda: None)
    assert not tiny.driver.run(lambda: dict(tiny.engine.live))


def test_a_stream_that_is_refused_says_why(tiny: LLM) -> None:
    async def main() -> None:
        async for _ in tiny.stream([1] * 5000, SHORT):
            pass

    with pytest.raises(InvalidRequest, match="context"):
        asyncio.run(main())


def test_a_stream_that_is_left_is_aborted(tiny: LLM) -> None:
    async def main() -> None:
        stream = tiny.stream("a", **ENDLESS)
        async for _ in stream:
            break
        await stream.aclose()

    asyncio.run(main())
    assert not tiny.driver.run(lambda: dict(tiny.engine.live))


def test_a_stream_is_read_by_for_as_by_async_for(tiny: LLM) -> None:
    """In a thread, in the main one, and in a program whose event loop runs, such as a notebook."""
    expected = tiny.generate("a", SHORT)[0]

    async def read() -> list[Event]:
        return [event async for event in tiny.stream("a", SHORT)]

    async def in_a_notebook() -> list[Event]:
        return list(tiny.stream("a", SHORT))

    with ThreadPoolExecutor(1) as threads:
        in_thread = threads.submit(lambda: list(tiny.stream("a", SHORT))).result()
    for events in (
        list(tiny.stream("a", SHORT)),
        in_thread,
        asyncio.run(read()),
        asyncio.run(in_a_notebook()),
    ):
        assert [token for event in events for token in event.token_ids] == expected.token_ids
        assert "".join(event.text for event in events) == expected.text
        assert events[-1].finish_reason == expected.finish_reason
    ended = tiny.stream("a", SHORT)
    assert list(ended) and list(ended) == []


def test_breaking_out_of_a_for_loop_aborts(tiny: LLM) -> None:
    for _ in tiny.stream("a", **ENDLESS):
        break
    assert not tiny.driver.run(lambda: dict(tiny.engine.live))

    async def main() -> None:
        async for _ in tiny.stream("a", **ENDLESS):
            break

    asyncio.run(main())
    assert not tiny.driver.run(lambda: dict(tiny.engine.live))
    kept = tiny.stream("a", **ENDLESS)
    next(kept)
    kept.close()
    assert list(kept) == [] and not tiny.driver.run(lambda: dict(tiny.engine.live))


def test_a_stream_that_is_never_read_starts_nothing(tiny: LLM) -> None:
    stream = tiny.stream("a", **ENDLESS)
    assert not tiny.driver.run(lambda: dict(tiny.engine.live))
    assert stream.request_id


# -------------------------------------------------------------------------------------------- what it looks like


def test_repr_says_what_it_is(tiny: LLM, folder: Path) -> None:
    assert repr(tiny) == f"LLM({str(folder)!r}, device='cpu', dtype='float32', draft='none')"


def test_a_text_is_one_message_of_a_user(tiny: LLM) -> None:
    said = tiny.chat([{"role": "user", "content": "hi"}], SHORT)[0]
    assert tiny.chat("hi", SHORT)[0].token_ids == said.token_ids
    assert tiny.chat("hi", SHORT)[0].prompt_ids == said.prompt_ids


def test_the_other_engines_outputs_name_the_text(tiny: LLM) -> None:
    said = tiny.generate("a", SHORT)[0]
    with pytest.raises(AttributeError, match=r"\.text is the first choice's, \.choices has all"):
        said.outputs[0].text  # noqa: B018
    assert not hasattr(said, "outputs")


# --------------------------------------------------------------------------------------------------- the end


def test_after_close(folder: Path) -> None:
    made = LLM(folder, draft="none", cache_bytes=1 << 22, threads=1)
    made.close()
    made.close()
    with pytest.raises(OutriderError, match="closed; make another"):
        made.generate("a")


LEAVING = """
import asyncio, sys, threading, time
from outrider import LLM
llm = LLM({folder!r}, draft="none", cache_bytes=1 << 22)
def talk():
    async def read():
        async for _ in llm.stream("a", max_tokens=1500, ignore_eos=True):
            begun.set()
    asyncio.run(read())
begun = threading.Event()
threading.Thread(target=talk, daemon=True).start()
def answer():
    llm.generate(["a", "b"], max_tokens=1500, ignore_eos=True)
threading.Thread(target=answer, daemon=True).start()
begun.wait()
sys.exit(7)
"""


def test_leaving_while_the_engine_is_busy(folder: Path) -> None:
    """With a stream and an answer in threads, and never closed: the script's own status."""
    code = LEAVING.format(folder=str(folder))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, "Fatal" in done.stderr) == (7, False), done.stderr


# --------------------------------------------------------------------------------------- wrong kinds of things


@pytest.mark.parametrize(
    "prompts", [b"x", bytearray(b"x"), None, 1, 1.5, {"a": 1}, memoryview(b"x"), object()]
)
def test_prompts_of_the_wrong_kind(tiny: LLM, prompts: Any) -> None:
    with pytest.raises(InvalidRequest, match="prompts must be a text, a list of token ids") as refused:
        tiny.generate(prompts, SHORT)
    assert refused.value.param == "prompts" and type(prompts).__name__ in str(refused.value)


@pytest.mark.parametrize("prompts", [[b"x"], ["a", None], [["a"]], [[1.5]], [[True, 2]], np.array([1.5])])
def test_prompts_of_the_wrong_kind_in_a_list(tiny: LLM, prompts: Any) -> None:
    with pytest.raises(InvalidRequest, match="a prompt is a text or a list of token ids"):
        tiny.generate(prompts, SHORT)


def test_arrays_and_tensors_of_ids(tiny: LLM) -> None:
    expected = tiny.generate([5, 6, 7], SHORT)[0].token_ids
    for ids in (
        (5, 6, 7),
        range(5, 8),
        np.array([5, 6, 7]),
        torch.tensor([5, 6, 7]),
        list(np.array([5, 6, 7])),
    ):
        assert tiny.generate(ids, SHORT)[0].token_ids == expected  # type: ignore[arg-type]
    both = tiny.generate(torch.tensor([[5, 6, 7], [5, 6, 7]]), SHORT)  # type: ignore[arg-type]
    assert [one.token_ids for one in both] == [expected, expected]


@pytest.mark.parametrize("messages", [None, 1, {"role": "user", "content": "a"}, b"x"])
def test_messages_of_the_wrong_kind(tiny: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequest, match="messages must be a list") as refused:
        tiny.chat(messages, SHORT)
    assert refused.value.param == "messages"


@pytest.mark.parametrize("params", [1, "greedy", {"temperature": 1}, [1], object()])
def test_params_of_the_wrong_kind(tiny: LLM, params: Any) -> None:
    with pytest.raises(InvalidRequest, match="params must be SamplingParams") as refused:
        tiny.generate("a", params)
    assert refused.value.param == "params"


@pytest.mark.parametrize(
    ("make", "meant"),
    [
        (lambda: SamplingParams(temprature=1), "temperature"),  # type: ignore[call-arg]
        (lambda: Settings(treads=1), "threads"),  # type: ignore[call-arg]
        (lambda: Speculation(dept=1), "depth"),  # type: ignore[call-arg]
        (lambda: LLM("nowhere", treads=1), "threads"),
    ],
)
def test_a_name_that_is_nearly_right(make: Any, meant: str) -> None:
    with pytest.raises(InvalidRequest, match=f"did you mean '{meant}'"):
        make()
