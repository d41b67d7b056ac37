"""The load generator against a server on loopback whose every move is known."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from outrider.bench.serve import answer, client, http, processes
from outrider.bench.serve.answer import Sample
from outrider.bench.serve.arrivals import Lengths
from outrider.bench.serve.asked import CHAT, COMPLETIONS, Asked
from outrider.bench.serve.client import Drove, Load, drive
from outrider.bench.serve.conversations import Conversations
from outrider.bench.serve.figures import Bounds, figures
from outrider.bench.serve.http import NotHttp, Reading, Reply, Server
from outrider.bench.serve.processes import run
from tests.bench.load_server import LoadServer, Script, serving

FIVE = Lengths(5, 5)


def load_of(server: LoadServer, path: str = COMPLETIONS, **options: Any) -> Load:
    asked = Asked(path, "tiny", FIVE, Lengths(4, 4))
    return Load(Server.of(server.url), asked, **{"requests": 6, **options})


def quiet(ended: int) -> None:
    pass


# ------------------------------------------------------------------------------------------------ known to the tick


class Clock:
    """Time that only the server moves, and only once the client has read what was sent before."""

    def __init__(self) -> None:
        self.now = 100.0
        self.read = 0  # events that the client has read

    def perf_counter(self) -> float:
        return self.now

    process_time = staticmethod(time.process_time)


def test_times_are_those_of_the_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """First token after 2 s, then gaps of 0.25, 0.5, 0.75 and 1 s; the end is 4 s after that: exactly so."""
    clock = Clock()
    for module in (client, http):
        monkeypatch.setattr(module, "time", clock)
    body = answer.Stream.body

    def counted(self: answer.Stream, data: bytes, now: float) -> None:
        body(self, data, now)
        clock.read += data.count(b"\n\n")

    monkeypatch.setattr(answer.Stream, "body", counted)
    waits = [2, 0.25, 0.5, 0.75, 1, 4, 0]  # five tokens, usage, the end

    async def pause(number: int) -> None:
        while clock.read < number:
            await asyncio.sleep(0)
        clock.now += waits[number]

    async def measured() -> Drove:
        server = LoadServer(Script(pause=pause))
        async with await server.start():
            return await drive(load_of(server, requests=1), 0, 1, clock.perf_counter, quiet)

    drove = asyncio.run(measured())
    [sample] = drove.samples
    assert sample.times == [2, 2.25, 2.75, 3.5, 4.5] and sample.end == 8.5 and not sample.error
    found = figures([[drove]], Bounds({"ttft": 2000, "itl": 999}))
    assert found["ttft_ms"]["p50"] == 2000 and found["e2e_ms"]["max"] == 8500
    assert found["itl_ms"] == pytest.approx({"mean": 625, "p50": 625, "p90": 925, "p99": 992.5, "max": 1000})
    assert found["tpot_ms"]["p50"] == 625 and found["seconds"] == 8.5
    assert found["output_tok_s"] == pytest.approx(5 / 8.5) and found["total_tok_s"] == pytest.approx(8 / 8.5)
    assert found["goodput"]["requests"] == 0  # one gap took too long
    assert Bounds({"ttft": 2000, "itl": 1000}).kept(sample)


def test_real_times_lie_between_those_of_the_server_and_of_the_caller() -> None:
    """With the machine's clock, in processes of their own: nothing is read before it is sent or after the end."""
    with serving(tokens=3) as server:
        begin = time.perf_counter()
        droves = run(load_of(server, concurrency=2, requests=4), 2, quiet)
        passed = time.perf_counter() - begin
    samples = [sample for drove in droves for sample in drove.samples]
    assert sorted(sample.number for sample in samples) == [0, 1, 2, 3]
    assert [len(drove.samples) for drove in droves] == [2, 2]
    asked = {seen.body["prompt"]: seen for seen in server.asked}
    for sample in samples:
        seen = asked[Asked(COMPLETIONS, "tiny", FIVE, Lengths(4, 4)).body(sample.number)["prompt"]]
        for at, sent in zip(sample.times, seen.sent, strict=False):
            assert sent - seen.at <= at <= sample.end <= passed
        assert sample.tokens == 3 and sample.prompt_tokens == 3 and not sample.error


# ------------------------------------------------------------------------------------------------------ the two loops


def test_a_closed_loop_keeps_so_many_in_flight_on_as_many_connections() -> None:
    counts: list[int] = []

    async def pause(number: int) -> None:
        await asyncio.sleep(0.001)

    with serving(pause=pause) as server:
        [drove] = run(load_of(server, concurrency=3, requests=9), 1, counts.append)
    assert server.most == 3 and server.connections == 3 == drove.connections
    assert sorted(sample.number for sample in drove.samples if not sample.error) == list(range(9))
    assert counts and all(0 < count <= 9 for count in counts)
    assert drove.lags and drove.cpu > 0 and drove.seconds > 0


def talking(server: LoadServer, count: int, shape: Conversations, **options: Any) -> list[Sample]:
    clients = options.pop("clients", 1)
    load = load_of(server, CHAT, **{"requests": count, "conversations": shape, **options})
    return [sample for drove in run(load, clients, quiet) for sample in drove.samples]


@pytest.mark.parametrize("clients", [1, 2])
def test_a_conversation_repeats_what_was_said_and_waits_for_the_others(clients: int) -> None:
    shape = Conversations(3, Lengths(6, 6), systems=2)
    with serving(cache=True) as server:
        samples = talking(server, 4, shape, concurrency=clients, clients=clients, first=8)
    bodies = [seen.body["messages"] for seen in server.asked]
    assert len(bodies) == len(samples) == 12 and not any(sample.error for sample in samples)
    if clients == 1:  # every conversation has its turn before one has its next
        assert [(s.number, s.turn) for s in samples] == [
            (n, turn) for turn in range(3) for n in (8, 9, 10, 11)
        ]
        assert [len(body) for body in bodies] == [2] * 4 + [4] * 4 + [6] * 4
    last = [body for body in bodies if len(body) == 6]
    for body in last:
        assert [one["role"] for one in body] == ["system", *["user", "assistant"] * 2, "user"]
        assert body[2]["content"] == body[4]["content"] == "xxxxx"  # the server's own answers
        assert all(shorter in bodies for shorter in (body[:2], body[:4]))
    asked = [one["content"] for body in last for one in body if one["role"] == "user"]
    assert len(set(asked)) == 12  # none comes again
    assert len({body[0]["content"] for body in last}) == 2
    by_turn = {s.turn: s for s in samples if s.number == 8}
    assert [by_turn[turn].prompt_tokens for turn in range(3)] == [10, 15, 20]
    assert [by_turn[turn].cached for turn in (1, 2)] == [11, 16]


def test_a_conversation_ends_with_its_first_failure() -> None:
    with serving(fail_every=5) as server:
        samples = talking(server, 3, Conversations(4), concurrency=1)
    failed = [sample for sample in samples if sample.error]
    assert len(failed) == 2 and len(samples) == len(server.asked) == 10
    assert all(max(s.turn for s in samples if s.number == one.number) == one.turn for one in failed)


def test_conversations_begin_no_turn_once_their_time_is_over() -> None:
    with serving() as server:
        samples = talking(server, 2, Conversations(1000), concurrency=1, seconds=0.1)
    assert 1 < len(samples) < 2000 and not any(sample.error for sample in samples)


def test_a_closed_loop_begins_nothing_once_its_time_is_over() -> None:
    with serving() as server:
        [drove] = run(load_of(server, concurrency=2, requests=None, seconds=0.05), 1, quiet)
    late = [sample for sample in drove.samples if sample.start >= 0.05]
    assert len(late) <= 2 < len(drove.samples)  # each slot may have looked at the clock just before
    assert len(server.asked) == len(drove.samples)


def test_an_open_loop_does_not_wait_for_answers() -> None:
    """The server answers nobody before all have asked."""

    async def pause(number: int) -> None:
        while len(server.asked) < 5:
            await asyncio.sleep(0.001)

    with serving(pause=pause) as server:
        arrivals = [0.0, 0.0, 0.01, 0.02, 0.02]
        [drove] = run(load_of(server, arrivals=arrivals, requests=None), 1, quiet)
    assert sorted(sample.due for sample in drove.samples) == arrivals
    assert all(sample.start >= sample.due and not sample.error for sample in drove.samples)


def test_shares_of_several_processes_make_up_the_whole() -> None:
    load = Load(Server.of("h"), Asked(CHAT, "m", None), concurrency=7, requests=10)
    shares = [load.share(index, 3) for index in range(3)]
    assert [slots for slots, _ in shares] == [3, 2, 2]
    assert sorted(number for _, numbers in shares for number in numbers) == list(range(10))


def test_a_process_that_ends_early_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "__name__", "outrider.no_such_module")
    with pytest.raises(Exception, match="client process ended"):
        run(Load(Server.of("h"), Asked(CHAT, "m", None)), 2, quiet)


# --------------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (dict(), (5, 5, None)),
        (dict(framing="length"), (5, 5, None)),
        (dict(framing="close"), (5, 5, None)),
        (dict(per_event=2, ids=True), (5, 3, [2, 2, 1])),
        (dict(per_event=2), (5, 3, None)),
        (dict(per_event=2, ids=True, usage=False), (5, 3, [2, 2, 1])),
        (dict(per_event=2, usage=False), (3, 3, None)),  # events are all there is to count
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_tokens_are_counted_by_what_the_server_says(path: str, script: dict[str, Any], expected: Any) -> None:
    with serving(**script) as server:
        [drove] = run(load_of(server, path, requests=2), 1, quiet)
    for sample in drove.samples:
        assert (sample.tokens, len(sample.times), sample.counts) == expected, sample
        assert sample.counted == script.get("usage", True) and not sample.error


@pytest.mark.parametrize(
    ("script", "kind", "said"),
    [
        (dict(status=503, said="the queue is full"), "HTTP 503", "the queue is full"),
        (dict(whole=True), "no stream", "application/json"),
        (dict(breaks=2), "connection lost", ""),
        (dict(error_at=2), "error in the stream", "it broke"),
        (dict(tokens=0), "broke off|empty answer", ""),
    ],
)
def test_errors_have_kinds(script: dict[str, Any], kind: str, said: str) -> None:
    with serving(**script) as server:
        droves = run(load_of(server, requests=2), 1, quiet)
    found = figures([droves], Bounds({}))
    [(name, error)] = found["errors"].items()
    assert name in kind.split("|") and error["count"] == 2 == found["failed"] and said in error["first"]
    assert found["ttft_ms"] is None and found["output_tok_s"] == 0


def test_failures_among_answers_are_counted_apart() -> None:
    with serving(fail_every=3) as server:
        found = figures([run(load_of(server, requests=6), 1, quiet)], Bounds({"e2e": 60_000}))
    assert found["requests"] == 6 and found["failed"] == 2 and found["output_tokens"] == 20
    assert found["goodput"]["share"] == pytest.approx(4 / 6)


def test_a_connection_closed_while_idle_is_opened_again() -> None:
    with serving(hang_up_idle=True) as server:
        [drove] = run(load_of(server, requests=5), 1, quiet)
    assert not [sample.error for sample in drove.samples if sample.error]
    assert len(server.asked) == 5  # and nothing was asked twice


def test_no_answer_in_time_is_an_error() -> None:
    async def pause(number: int) -> None:
        await asyncio.sleep(60)

    with serving(pause=pause) as server:
        [drove] = run(load_of(server, requests=1, timeout=0.1), 1, quiet)
    assert [sample.error for sample in drove.samples] == ["timed out"]


def test_nobody_there() -> None:
    with serving() as server:
        load = load_of(server, requests=2)
    [drove] = run(load, 1, quiet)
    assert [sample.error for sample in drove.samples] == ["connection refused"] * 2


# ------------------------------------------------------------------------------------------------------------- HTTP

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKED = HEAD + b"3\r\nabc\r\n4;x=y\r\ndefg\r\n0\r\nTrailer: 1\r\n\r\n"


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_chunks_are_read_wherever_they_are_cut(step: int) -> None:
    reply = Reply()
    reading = Reading(reply)
    for at in range(0, len(CHUNKED), step):
        assert not reading.complete
        reading.feed(CHUNKED[at : at + step], 0.0)
    assert reading.complete and reading.reusable and reply.data == b"abcdefg" and reply.status == 200


@pytest.mark.parametrize(
    ("sent", "complete", "data"),
    [
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi", True, b"hi"),
        (b"HTTP/1.1 204 No\r\n\r\n", True, b""),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nhi", False, b"hi"),
        (b"HTTP/1.0 200 OK\r\n\r\nhi", False, b"hi"),
    ],
)
def test_lengths_of_bodies(sent: bytes, complete: bool, data: bytes) -> None:
    reading = Reading(reply := Reply())
    reading.feed(sent, 0.0)
    assert (reading.complete, reply.data) == (complete, data)
    reading.closed()
    assert reading.complete == (complete or sent.startswith(b"HTTP/1.0"))


@pytest.mark.parametrize("sent", [b"SSH-2.0-x\r\n", b"HTTP/1.1 x\r\n\r\n", HEAD + b"zz\r\n", b"\x15\x03\x01"])
def test_what_is_no_http_is_refused(sent: bytes) -> None:
    with pytest.raises(NotHttp):
        Reading(Reply()).feed(sent, 0.0)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://h:1/v1", "http://h:1"),
        ("h:1", "http://h:1"),
        ("https://h/api/v1/", "https://h:443/api"),
        ("http://[::1]:5", "http://[::1]:5"),
    ],
)
def test_addresses(url: str, shown: str) -> None:
    assert Server.of(url).url == shown


@pytest.mark.parametrize(
    "url", ["", "ftp://h", "http://", "http://h:x", "http://h:99999", "http://u@h", "http://h/?a"]
)
def test_bad_addresses(url: str) -> None:
    with pytest.raises(Exception, match="address"):
        Server.of(url)


def test_keys_are_sent_and_not_shown() -> None:
    server = Server.of("h:1", "se-cret")
    assert b"\r\nauthorization: Bearer se-cret\r\n" in server.request("GET", "/v1/models")
    assert "se-cret" not in repr(server)
    with pytest.raises(Exception, match="API key"):
        Server.of("h", "a\r\nb: c")


def test_events_are_read_wherever_they_are_cut() -> None:
    text = ': ping\n\ndata: {"choices": [{"text": "é"}]}\r\n\r\n'
    text += 'data: {"choices": [{"text": "b", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
    data = text.encode()
    for step in (1, 5, 1000):
        stream = answer.Stream(answer.Sample(0), 0.0)
        stream.head(200, {"content-type": "text/event-stream"})
        for at in range(0, len(data), step):
            stream.body(data[at : at + step], float(at))
        stream.finish(9e9)
        assert len(stream.sample.times) == 2 and not stream.sample.error, step


def test_ids_listed_at_the_end_do_not_count_as_an_event() -> None:
    """Some servers send all token ids of an answer with its last event."""
    stream = answer.Stream(answer.Sample(0), 0.0)
    stream.head(200, {"content-type": "text/event-stream"})
    stream.body(b'data: {"choices": [{"text": "a"}]}\n\ndata: {"choices": [{"text": "b"}]}\n\n', 1.0)
    stream.body(
        b'data: {"choices": [{"text": "", "token_ids": [1, 2, 3], "finish_reason": "stop"}]}\n\n', 2.0
    )
    stream.body(b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\ndata: [DONE]\n\n', 3.0)
    stream.finish(3.0)
    assert stream.sample.times == [1.0, 1.0] and stream.sample.counts is None and stream.sample.tokens == 3


def test_usage_that_runs_along_counts_tokens_of_events() -> None:
    stream = answer.Stream(answer.Sample(0), 0.0)
    stream.head(200, {"content-type": "text/event-stream"})
    for so_far in (0, 2, 5):
        event = b'data: {"choices": [{"text": "%s"}], "usage": {"completion_tokens": %d}}\n\n'
        stream.body(event % (b"a" if so_far else b"", so_far), float(so_far))
    stream.body(b"data: [DONE]\n\n", 6.0)
    stream.finish(6.0)
    assert stream.sample.counts == [2, 3] and stream.sample.times == [2.0, 5.0]
