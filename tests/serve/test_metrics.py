"""What /metrics counts is what happened: every step once, every token a client got, under aborts and preemptions."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.control.planner import Planner
from outrider.draft.lookup import LookupDrafter
from outrider.engine.driver import Driver
from outrider.engine.engine import Engine
from outrider.model.decoder import Decoder
from outrider.serve.backend import Backend
from outrider.serve.engine_process import EngineProcess
from outrider.serve.link import Compiled, Drafted, End, Gauges, Start, Step, receive_event
from outrider.serve.metrics import SECONDS, UNPAID, Metrics
from outrider.serve.settings import ServeSettings
from outrider.serve.stream import Pieces, Stream
from outrider.types import Event, Request, SamplingParams, Speculation, StepRecord
from tests.serve.conftest import Served
from tests.tiny import prompt_of, tiny_engine, tiny_model

SLOTS = 160  # of the cache: about six of the requests below
SPECULATIVE = Speculation(drafter="test", depth=3, nodes=3)
PLAIN = Speculation(drafter="none")


@dataclass(frozen=True)
class Runner:
    """A way to run steps: how its engine is built, and how many passes it has launched and not settled."""

    build: Callable[[Decoder], Engine]
    unsettled: Callable[[Engine], int] = lambda engine: 0


def eager(model: Decoder) -> Engine:
    cache = SLOTS * model.config.kv_bytes_per_token
    return tiny_engine(model, Planner("test"), LookupDrafter(), cache_bytes=cache, max_sequences=8)


RUNNERS = {"eager": Runner(eager)}


@pytest.fixture(params=RUNNERS.values(), ids=RUNNERS)
def runner(request: pytest.FixtureRequest) -> Runner:
    return request.param


class Serving:
    """Both sides of the socket around an engine: what a server has, without HTTP and processes."""

    def __init__(self, runner: Runner) -> None:
        model = tiny_model()
        self.runner, self.passes = runner, 0
        inner = model.forward

        def counted(*given: Any) -> Any:
            self.passes += 1
            return inner(*given)

        model.forward = counted  # type: ignore[method-assign]
        self.driver = Driver(lambda: runner.build(model))
        self.ours, theirs = socket.socketpair()
        llm: Any = SimpleNamespace(
            driver=self.driver, engine=self.driver.engine, request=_request, compiler=None
        )
        self.process = EngineProcess(theirs, llm)
        self.process._ready = lambda: Compiled("")  # type: ignore[method-assign, assignment, return-value]
        self.thread = threading.Thread(target=self.process.run, daemon=True)
        self.metrics = Metrics()

    async def answer(self, *asked: tuple[list[int], SamplingParams]) -> list[tuple[list[int], list[End]]]:
        """All of them, sent together by clients of their own: their tokens, and what each choice cost."""
        backend = Backend(Start("tiny", "none", {}, ("text", "info")), ServeSettings(), self.metrics)
        backend.state = "ready"
        reader, backend._writer = await asyncio.open_connection(sock=self.ours)

        async def listen() -> None:
            while (message := await receive_event(reader)) is not None:
                await backend._handle(message)

        async def client(one: tuple[list[int], SamplingParams]) -> tuple[list[int], list[End]]:
            deadline = asyncio.get_running_loop().time() + 60
            return await _received(await backend.open([one], "", "", deadline), deadline)

        self.thread.start()
        listening = asyncio.create_task(listen())
        try:
            return await asyncio.gather(*map(client, asked))
        finally:
            backend._writer.close()
            await listening

    def metric(self, name: str) -> float:
        text = self.metrics.text("tiny")
        return sum(map(float, re.findall(rf"^outrider:{name}\{{.*\}} (.*)$", text, re.MULTILINE)))

    def abort(self, ends: dict[tuple[int, int], int]) -> None:
        """End requests at a certain moment: `{(who, tokens): whom}`, by the order in which they were sent."""
        inner, received, pending = self.process._on_event, Counter[int](), dict(ends)

        def listening(event: Event | BaseException) -> None:
            inner(event)
            assert isinstance(event, Event)
            salt, _, number = event.request_id.rpartition("-")
            received[int(number)] += len(event.token_ids)
            for who, tokens in list(pending):
                if received[who] >= tokens:
                    self.process._abort(f"{salt}-{pending.pop((who, tokens))}")

        self.process._on_event = listening  # type: ignore[method-assign]

    def close(self) -> None:
        """The clients are gone already, so the engine's side is on its way out."""
        self.thread.join(20)
        self.driver.close()
        self.process.sock.close()


def _request(prompt: list[int], params: SamplingParams, owner: str, name: str, background: bool) -> Request:
    return Request(name, tuple(prompt), params, params.seed or 0, owner, background=background)


async def _received(stream: Stream, deadline: float) -> tuple[list[int], list[End]]:
    tokens, ends = [], []

    def receive(pieces: Pieces) -> None:
        for _, piece in pieces:
            tokens.extend(piece.token_ids)
            ends.extend([piece.end] if piece.end is not None else [])

    await stream.follow(receive, deadline)
    return tokens, ends


@pytest.fixture
def serving(runner: Runner) -> Iterator[Serving]:
    made = Serving(runner)
    yield made
    made.close()


def test_latency_buckets_resolve_fifteen_percent() -> None:
    fine = [bound for bound in SECONDS if 0.001 <= bound <= 1]
    assert fine[0] == 0.001 and fine[-1] == 1.0 and list(SECONDS) == sorted(set(SECONDS))
    assert all(1.1 < b / a < 1.2 for a, b in pairwise(fine))


def step(**changes: Any) -> Step:
    usual: dict[str, Any] = dict(
        rows=5, sequences=1, known=1, answering=1, drafts=1, drafted=8, positions=4, accepted=2, accepted_at=[1, 1],
        lossy=0, emitted=3, plan_s=0.0, draft_s=0.1, target_s=1.4, verify_s=0.0, total_s=1.5, passes=1, plain_s=3.0,
        reasons={},
    )  # fmt: skip
    return Step(**{**usual, **changes})


def test_speed_is_that_of_a_requests_tokens() -> None:
    """A step counts for everyone in it, also beside prompts: few that draft badly at the end are few."""
    metrics = Metrics()
    metrics.step(step(sequences=8, known=8, answering=8, emitted=24, total_s=1.0, plain_s=3.0))
    assert metrics.gauges["plain_tokens_per_second"] == pytest.approx(8.0)
    metrics.step(step(sequences=8, known=100, answering=6, emitted=7, total_s=2.0, plain_s=2.0))
    metrics.step(step(total_s=1.0, plain_s=0.5, emitted=1))
    assert metrics.gauges["spec_decode_speedup"] == pytest.approx((8 * 3 + 6 * 2 + 0.5) / (8 + 6 * 2 + 1))
    assert metrics.gauges["plain_tokens_per_second"] < 8.0  # of the steps that only decoded
    seconds = metrics.counters["decode_seconds"][()]
    metrics.step(step(known=100, answering=0, total_s=1.0, plain_s=0.0))
    assert metrics.counters["decode_seconds"][()] == seconds


def test_speed_beside_plain_decoding() -> None:
    metrics = Metrics()
    for _ in range(20):
        metrics.step(step())
    plain = step(
        drafts=0, drafted=0, positions=0, accepted=0, accepted_at=[], emitted=1, total_s=1.0, plain_s=1.0
    )
    metrics.step(plain)
    gauges = metrics.gauges
    assert gauges["plain_tokens_per_second"] == pytest.approx(1.0)
    assert gauges["tokens_per_second"] == pytest.approx(2.0, rel=0.05)
    assert gauges["spec_decode_recent_speedup"] == pytest.approx(gauges["spec_decode_speedup"], rel=0.02)
    assert gauges["spec_decode_tokens_per_step"] == pytest.approx(3.0)
    assert gauges["spec_decode_break_even_tokens"] == pytest.approx(1.5)
    assert gauges["spec_decode_effective_acceptance"] == pytest.approx(0.5)
    assert gauges["spec_decode_node_acceptance"] == pytest.approx(0.25)


def test_acceptance_by_drafter_and_depth() -> None:
    metrics = Metrics()
    metrics.step(step(drafters={"lm": Drafted(3, 2, reached=[3, 2, 1], accepted=[2, 1])}))
    text = metrics.text("tiny")
    for line in (
        'spec_decode_drafts_by_position_total{model_name="tiny",drafter="lm",position="2"} 1',
        'spec_decode_accepted_by_position_total{model_name="tiny",drafter="lm",position="0"} 2',
    ):
        assert f"outrider:{line}\n" in text


def test_what_a_million_tokens_cost() -> None:
    free, priced = Metrics(), Metrics(price_per_hour=7.2)
    for metrics in (free, priced):
        metrics.step(step())
    assert "cost_per_million" not in free.text("tiny")
    assert priced.gauges["cost_per_million_tokens"] == pytest.approx(7.2 / 3600 * 1.5 / 3 * 1e6)
    assert "outrider:price_per_hour" in priced.text("tiny")


def test_a_draft_that_does_not_pay_is_shown_until_it_does() -> None:
    metrics = Metrics()
    for unpaid, shown in (({"lm": 1234}, True), ({}, False)):
        metrics.fill(Gauges(0, 0.0, 0, 0, 0, unpaid))
        assert (f'{UNPAID}{{model_name="tiny",drafter="lm"}} 1234' in metrics.text("tiny")) == shown


def requests(number: int, tokens: int = 30, choices: int = 1) -> list[tuple[list[int], SamplingParams]]:
    """Half of them guess, whatever it costs; prompts have something to look up."""
    return [
        (
            (prompt_of(8, i) * 4)[: 12 + 2 * i],
            SamplingParams(
                temperature=0.5 * (i % 2), max_tokens=tokens + i, seed=i, n=choices,
                logprobs=1 if i % 5 == 0 else None, speculation=SPECULATIVE if i % 4 < 2 else PLAIN,
            ),
        )
        for i in range(number)
    ]  # fmt: skip


def check(serving: Serving, answers: list[tuple[list[int], list[End]]]) -> None:
    settled = serving.passes - serving.runner.unsettled(serving.driver.engine)
    assert serving.metric("steps_total") == settled
    assert serving.metric("step_duration_seconds_count") == settled
    assert serving.metric("generation_tokens_total") == sum(len(tokens) for tokens, _ in answers)
    drafted = sum(end.drafted for _, ends in answers for end in ends)
    assert serving.metric("spec_decode_num_draft_tokens_total") == drafted > 0
    assert serving.metric("num_preemptions_total") == serving.driver.engine.scheduler.preemptions


def test_every_step_and_token_is_counted_once(serving: Serving) -> None:
    asked = requests(3)
    answers = asyncio.run(serving.answer(*asked))
    check(serving, answers)
    assert [len(tokens) for tokens, _ in answers] == [params.max_tokens for _, params in asked]


def test_they_are_under_preemptions(serving: Serving) -> None:
    asked = requests(12)
    answers = asyncio.run(serving.answer(*asked))
    check(serving, answers)
    assert serving.metric("num_preemptions_total") > 0
    assert [len(tokens) for tokens, _ in answers] == [params.max_tokens for _, params in asked]


def test_they_are_with_several_choices_a_request(serving: Serving) -> None:
    answers = asyncio.run(serving.answer(*requests(4, tokens=12, choices=3)))
    check(serving, answers)
    assert [len(ends) for _, ends in answers] == [3] * 4


def test_they_are_under_aborts(serving: Serving) -> None:
    """Of one that has just begun, of some midway, of those that come last and may still wait or have lost their place;
    and of all that are there at once.
    """
    asked = requests(12)
    serving.abort({(0, 1): 0, (3, 7): 3, (4, 20): 4, (1, 4): 11, (1, 8): 9, (2, 12): 7, (2, 18): 10})
    answers = asyncio.run(serving.answer(*asked))
    check(serving, answers)
    short = [i for i, (tokens, _) in enumerate(answers) if len(tokens) < asked[i][1].max_tokens]
    assert {0, 3, 4} <= set(short)
    assert len(answers[0][0]) < 8  # it went with its first tokens


def test_they_are_when_everybody_leaves_at_once(serving: Serving) -> None:
    serving.abort({(0, 6 + i): i for i in range(6)} | {(5, 2): 6})
    answers = asyncio.run(serving.answer(*requests(7)))
    check(serving, answers)


@pytest.mark.parametrize("times", [0, 2])
def test_a_step_counted_twice_or_not_at_all_is_noticed(serving: Serving, times: int) -> None:
    """The checks above themselves."""
    inner, steps = serving.process._after_step, count(1)

    def wrong(record: StepRecord) -> None:
        for _ in range(times if next(steps) == 5 else 1):
            inner(record)

    serving.process._after_step = wrong  # type: ignore[method-assign]
    answers = asyncio.run(serving.answer(*requests(2)))
    with pytest.raises(AssertionError):
        check(serving, answers)


def test_over_http_tokens_are_those_that_clients_got(served: Served) -> None:
    names = ("prompt_tokens_total", "generation_tokens_total")
    before = [served.metric(name) for name in names]

    def ask(number: int) -> tuple[int, int]:
        text = "hello 12 " * (3 + number)
        body = {"prompt": text, "max_tokens": 20 + number, "n": 1 + number % 2, "seed": number}
        usage = served.post("/v1/completions", body).json()["usage"]
        return usage["prompt_tokens"], usage["completion_tokens"]

    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(ask, range(8)))
    served.wait_idle()
    moved = [served.metric(name) - old for name, old in zip(names, before, strict=True)]
    assert moved == [sum(column) for column in zip(*answers, strict=True)]


def test_recent_figures_of_a_draft_begin_anew_with_another() -> None:
    metrics = Metrics()
    metrics.draft_in_use("eagle", 0.8, 0.6)
    for _ in range(50):
        metrics.drafter("lookup+eagle", Drafted(100, 30, 4, 2.0))
    recent = metrics.by_drafter["spec_decode_recent_acceptance"]
    assert recent["lookup+eagle"] == pytest.approx(0.3)
    for _ in range(200):  # far more than is remembered
        metrics.drafter("lookup+eagle", Drafted(100, 90, 4, 3.0))
    assert recent["lookup+eagle"] == pytest.approx(0.9, abs=0.01)
    assert metrics.by_drafter["spec_decode_recent_target_probability"]["lookup+eagle"] == pytest.approx(
        0.75, abs=0.05
    )
    metrics.drafter("lookup", Drafted(10, 1))
    metrics.draft_in_use("eagle", None, None)  # no card
    assert list(recent) == ["lookup"] and not metrics.by_drafter["spec_decode_card_acceptance"]
    assert 'spec_decode_recent_acceptance{model_name="m",drafter="lookup"} 0.1' in metrics.text("m")
