"""A grammar that crashes the compiler costs its own request, and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from outrider.serve import grammars as grammars_module
from outrider.serve.backend import Backend
from outrider.serve.errors import ApiError
from outrider.serve.grammars import Grammars
from outrider.serve.link import Start
from outrider.serve.metrics import Metrics
from outrider.serve.settings import ServeSettings
from outrider.serve.stream import Job, Stream
from outrider.types import SamplingParams
from tests.load.tiny import byte_level_backend, vocabulary
from tests.serve.conftest import UNENCRYPTED, Served
from tests.verify.test_grammar import BREAKING, WIDE
from tests.verify.test_grammar_depth import chain, rules

GOOD = {"json_schema": {"type": "boolean"}}


def run(work: Callable[[Grammars], Awaitable[None]], seconds: float = 60.0, **limits: Any) -> None:
    async def main() -> None:
        ready: Any = SimpleNamespace(
            tokenizer=byte_level_backend().to_str(), vocab=len(vocabulary()), eos_ids=[0]
        )
        grammars = Grammars(ready, seconds, Metrics(), **limits)
        try:
            await work(grammars)
        finally:
            await grammars.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "grammar", [{"json_schema": chain(9_000)}, {"lark": rules(9_000)}], ids=["refs", "rules"]
)
def test_a_crash_costs_one_request(grammar: dict[str, Any]) -> None:
    """The limit on depth is off here, so that the compiler really dies; of the same it dies once."""

    async def work(grammars: Grammars) -> None:
        await grammars.check(GOOD, "me")
        for _ in range(2):
            with pytest.raises(ApiError, match="too deep") as refused:
                await grammars.check(grammar, "me")
            assert (refused.value.status, refused.value.param) == (400, "grammar")
            assert refused.value.headers()["x-should-retry"] == "false"
        assert grammars.crashes == 1
        await grammars.check({"regex": "a+"}, "me")

    run(work, deepest=10**9)


def exploding(size: int) -> dict[str, Any]:
    """Definitions that all refer to each other."""
    each = {f"x{j}": {"$ref": f"#/$defs/r{j}"} for j in range(size)}
    return {"$defs": {f"r{i}": {"properties": each} for i in range(size)}, "$ref": "#/$defs/r0"}


def test_memory_is_bounded() -> None:
    async def work(grammars: Grammars) -> None:
        with pytest.raises(ApiError, match="memory"):
            await grammars.check({"json_schema": exploding(90)}, "me")
        await grammars.check(GOOD, "me")

    run(work, memory=48 << 20)


def test_time_is_bounded() -> None:
    async def work(grammars: Grammars) -> None:
        await grammars.warm()
        with pytest.raises(ApiError, match=r"longer than 0\.01 s"):
            await grammars.check({"json_schema": exploding(90)}, "me")

    run(work, seconds=0.01)


def test_a_process_that_somebody_else_ended_is_no_verdict_on_the_grammar() -> None:
    async def work(grammars: Grammars) -> None:
        await grammars.warm()
        [trier] = grammars._idle
        trier.process.send_signal(signal.SIGKILL)
        await trier.process.wait()
        with pytest.raises(ApiError):
            await grammars.check(GOOD, "me")
        await grammars.check(GOOD, "me")

    run(work)


def test_who_hangs_up_loses_no_process() -> None:
    async def work(grammars: Grammars) -> None:
        await grammars.warm()
        [trier] = grammars._idle
        task = asyncio.create_task(grammars.check({"json_schema": exploding(40)}, "me"))
        while grammars._idle:
            await asyncio.sleep(0)
        task.cancel()
        await grammars.check(GOOD, "another")
        while len(grammars._idle) < 2:
            await asyncio.sleep(0.01)
        assert trier in grammars._idle

    run(work)


def test_a_grammar_that_no_answer_can_follow_is_refused() -> None:
    async def work(grammars: Grammars) -> None:
        with pytest.raises(ApiError, match=r"no answer in its form can be written: .*items") as refused:
            await grammars.check(BREAKING["many properties below another"], "me")
        assert (refused.value.status, refused.value.param) == (400, "grammar")

    run(work)


def test_a_grammar_that_breaks_late_ends_its_own_answer_only(served: Served) -> None:
    """Beyond what a trial writes."""
    plain = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "seed": 1, "temperature": 0}
    alone = served.post("/v1/completions", plain).json()["choices"][0]["text"]
    late = f'start: /[0-9]{{200}}/ "b" x\nx: {WIDE}'
    fragile = {**plain, "max_tokens": 300, "stream": True, "structured_outputs": {"grammar": late}}
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(served.post, "/v1/completions", plain)
        reply = served.post("/v1/completions", fragile)
        assert beside.result().json()["choices"][0]["text"] == alone
    assert reply.status_code == 200, reply.text
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    assert "the grammar failed" in events[-1]["error"]["message"]
    assert "".join(e["choices"][0]["text"] for e in events[:-1] if e["choices"]).isdigit()


# ------------------------------------------------------------------------------------------------- who waits for whom


def costly(number: int) -> dict[str, Any]:
    """Takes a second or so, and each is another."""
    return {"json_schema": {"properties": {f"p{number}_{i}": {"type": "string"} for i in range(900)}}}


def test_costly_grammars_of_one_client_hold_up_no_other() -> None:
    """A small one is tried while few of them end, another client's or the same client's."""

    async def work(grammars: Grammars) -> None:
        await asyncio.gather(*(grammars.check({"regex": client}, client) for client in ("me", "another")))
        many = [asyncio.create_task(grammars.check(costly(i), "me")) for i in range(12)]
        await asyncio.sleep(0)
        await grammars.check({"regex": "a+"}, "another")
        assert sum(task.done() for task in many) <= 3
        ended = sum(task.done() for task in many)
        await grammars.check({"regex": "b+"}, "me")
        assert sum(task.done() for task in many) - ended <= 3
        for task in many:
            task.cancel()

    run(work)


def test_the_queue_of_one_client_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "MOST_WAITING", 3)

    async def work(grammars: Grammars) -> None:
        many = [asyncio.create_task(grammars.check(costly(0), "me"))]
        while not any(trial.begun for trial in grammars._trials.values()):
            await asyncio.sleep(0)
        many += [asyncio.create_task(grammars.check({"regex": f"a{{{i}}}"}, "me")) for i in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="3 new grammars of yours wait") as refused:
            await grammars.check({"regex": "b" * 99}, "me")
        assert (refused.value.status, refused.value.headers()["retry-after"]) == (503, "60")
        larger = asyncio.create_task(grammars.check({"regex": "a{2}"}, "me"))  # waits already
        await grammars.check({"regex": "b" * 99}, "another")
        await asyncio.gather(*many, larger)
        await grammars.check({"regex": "b" * 99}, "me")

    run(work)


def test_a_small_grammar_takes_the_place_of_a_large_one_where_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammars_module, "MOST_WAITING", 2)

    async def work(grammars: Grammars) -> None:
        many = [asyncio.create_task(grammars.check(costly(i), "me")) for i in range(2)]
        await asyncio.sleep(0)
        await grammars.check(GOOD, "me")
        refused = [task.exception() for task in many if task.done() and task.exception()]
        assert [error.status for error in refused if isinstance(error, ApiError)] == [503]
        await asyncio.wait(many)

    run(work)


def test_the_same_grammar_of_one_client_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "MOST_WAITING", 1)

    async def work(grammars: Grammars) -> None:
        asked = [asyncio.create_task(grammars.check(GOOD, "me")) for _ in range(40)]
        asked[0].cancel()
        await asyncio.gather(*asked[1:])
        assert not grammars._trials

    run(work)


def test_who_hangs_up_while_waiting_leaves_the_queue() -> None:
    async def work(grammars: Grammars) -> None:
        first, second = (asyncio.create_task(grammars.check(costly(i), "me")) for i in range(2))
        while "me" not in grammars._turns._waiting:
            await asyncio.sleep(0)
        second.cancel()
        await asyncio.wait([second])
        await asyncio.sleep(0)
        assert not grammars._turns._waiting and len(grammars._trials) == 1
        await first

    run(work)


def test_chains_of_references_end_no_engine(serve_tiny: Callable[..., Served]) -> None:
    """With room for large schemas, so that their depth is what counts, and beside a stream."""
    server = serve_tiny("--max-schema-bytes", "64M", "--max-body-bytes", "64M", "--no-stream-padding")
    engine = server.engine().pid
    body = {"prompt": "a", "max_tokens": 400, "stream": True, "ignore_eos": True, "seed": 1, "temperature": 0}
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body, timeout=60, verify=UNENCRYPTED
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        for links in (1_000, 10_000, 100_000):
            for name, value in (("json_schema", chain(links)), ("grammar", rules(links))):
                form = {"name": "a", "schema": value}
                extra = (
                    {"response_format": {"type": "json_schema", "json_schema": form}}
                    if name == "json_schema"
                    else {"structured_outputs": {"grammar": value}}
                )
                reply = server.post("/v1/completions", {"prompt": "a", "max_tokens": 3, **extra})
                assert reply.status_code == 400, reply.text
                too_many = name == "json_schema" and links == 100_000  # fields, for any body
                assert reply.json()["error"]["param"] == (None if too_many else next(iter(extra)))
                assert reply.headers["x-should-retry"] == "false"
        events = [line for line in lines if line.startswith("data: {")]
    assert json.loads(events[-1][6:])["choices"][0]["finish_reason"] == "length"
    assert server.engine().pid == engine and os.path.exists(f"/proc/{engine}")
    assert server.metric("engine_restarts_total") == 0


# ---------------------------------------------------------------------- who is told to try again, and who is not


def lost(*deaths: list[tuple[str, SamplingParams, bool]]) -> list[list[int]]:
    """The statuses of requests (prompt, parameters, compiled) that were there as engines died one by one."""

    async def main() -> list[list[int]]:
        backend = Backend(Start("tiny", "none", {}, ("text", "info")), ServeSettings(), Metrics())
        told = []
        for number, present in enumerate(deaths):
            jobs = []
            for index, (prompt, params, compiled) in enumerate(present):
                job = Job(Stream(backend.drop), 0, f"{number}-{index}", [ord(c) for c in prompt], params)
                job.sent = True
                if compiled:
                    job.compiled.set()
                backend.jobs[job.id] = job
                backend.queued += 1
                jobs.append(job)
            backend._lost()
            told.append([job.accepted.exception().status for job in jobs])  # type: ignore[union-attr]
        return told

    return asyncio.run(main())


PLAIN, FORMED = SamplingParams(), SamplingParams(grammar={"regex": "a"})


def test_the_request_that_an_engine_died_of_is_not_told_to_try_again() -> None:
    assert lost([("alone", PLAIN, True)]) == [[500]]
    assert lost([("a", PLAIN, True), ("b", PLAIN, True)]) == [[503, 503]]
    assert lost([("a", PLAIN, True), ("b", FORMED, False)]) == [[503, 500]]
    assert lost([("a", PLAIN, True), ("bad", PLAIN, True)], [("c", PLAIN, True), ("bad", PLAIN, True)]) == [
        [503, 503],
        [503, 500],
    ]
