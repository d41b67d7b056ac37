"""Files and batches, through OpenAI's own client: what it uploads, polls, cancels and fetches, and whose it is."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch

from tests.serve.conftest import COMMAND, UNENCRYPTED, Served, start_server, wait_for
from tests.serve.sdk import MODEL, client

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
KEYS = ("sk-first-0123456789abcdef", "sk-other-0123456789abcdef")
ENDED = ("completed", "failed", "expired", "cancelled")


def line(name: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    asked = {"model": MODEL, "prompt": f"say {name}", "max_tokens": 6, "seed": 3, "temperature": 0.8, **body}
    return {"custom_id": name, "method": "POST", "url": url, "body": asked}


def as_file(lines: list[Any]) -> bytes:
    return "".join(one if isinstance(one, str) else json.dumps(one) + "\n" for one in lines).encode()


def begin(served: Served, lines: list[Any], key: str = KEYS[0], endpoint: str = COMPLETIONS) -> Batch:
    api = client(served, key)
    file = api.files.create(file=("input.jsonl", as_file(lines)), purpose="batch")
    return api.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")  # type: ignore[arg-type]


def ended(served: Served, batch: Batch, key: str = KEYS[0]) -> Batch:
    found = [batch]

    def over() -> bool:
        found[0] = client(served, key).batches.retrieve(batch.id)
        return found[0].status in ENDED

    wait_for(over, 60)
    return found[0]


def results(served: Served, name: str | None, key: str = KEYS[0]) -> dict[str, Any]:
    if name is None:
        return {}
    text = client(served, key).files.content(name).text
    found = [json.loads(one) for one in text.splitlines()]
    by_id = {one["custom_id"]: one for one in found}
    assert len(by_id) == len(found)  # no line has two answers
    return by_id


def tokens_of(result: dict[str, Any]) -> list[str]:
    assert result["response"]["status_code"] == 200 and result["error"] is None
    return [choice["text"] for choice in result["response"]["body"]["choices"]]


@pytest.fixture(scope="module")
def batching(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("batches")
    keys = [flag for key in KEYS for flag in ("--api-key", key)]
    server = start_server(
        tiny_folder, *keys, "--batch-folder", str(folder), "--batch-bytes", "2M", "--threads", "1"
    )
    yield server
    assert not [text for text in server.lines if "Traceback" in text]
    assert server.stop() == 0


def test_a_batch_is_answered_line_by_line(batching: Served) -> None:
    """Answers and errors by custom_id, equal to what the same requests get alone."""
    lines = [line(f"n{i}") for i in range(20)]
    lines += [line("hot", top_p=5), line("other", model="gpt-9"), line("streamed", stream=True)]
    batch = ended(batching, begin(batching, lines))
    assert batch.status == "completed" and batch.errors is None
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (
        23,
        20,
        3,
    )
    answers, errors = results(batching, batch.output_file_id), results(batching, batch.error_file_id)
    assert [*answers] == [f"n{i}" for i in range(20)]  # in the order of the file
    for one in lines[:5]:
        alone = batching.post(COMPLETIONS, one["body"], headers={"authorization": f"Bearer {KEYS[0]}"}).json()
        assert tokens_of(answers[one["custom_id"]]) == [alone["choices"][0]["text"]]
    assert {name: e["response"]["status_code"] for name, e in errors.items()} == {
        "hot": 400, "other": 404, "streamed": 400,
    }  # fmt: skip
    assert errors["hot"]["response"]["body"]["error"]["param"] == "top_p"


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}),
        (RESPONSES, {"input": "hi", "max_output_tokens": 4}),
    ],
)
def test_other_routes_are_batched_too(batching: Served, url: str, body: dict[str, Any]) -> None:
    one = {"custom_id": "a", "method": "POST", "url": url, "body": body}
    batch = ended(batching, begin(batching, [one], endpoint=url))
    [answer] = results(batching, batch.output_file_id).values()
    assert answer["response"]["status_code"] == 200
    assert answer["response"]["body"]["object"] in ("chat.completion", "response")


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([line("a"), "{no json}\n"], "line 2: We could not parse"),
        ([line("a"), line("a")], "line 2: custom_id must be new"),
        ([line("a", url=CHAT)], "line 1: the method must be POST and the url /v1/completions"),
        ([{**line("a"), "mode": 1}], "line 1: 'mode' is not a field"),
        ([{"custom_id": "a"}], "line 1: "),
        (["\n"], "line None: a batch has 1 to 50000 lines"),
    ],
)
def test_a_file_that_is_no_batch_fails_as_a_whole(batching: Served, lines: list[Any], says: str) -> None:
    batch = ended(batching, begin(batching, lines))
    assert batch.status == "failed" and batch.failed_at and batch.output_file_id is None
    assert batch.errors is not None and batch.errors.data
    [error] = batch.errors.data
    assert f"line {error.line}: {error.message}".startswith(says)


def test_files_are_listed_fetched_and_deleted(batching: Served) -> None:
    api = client(batching, KEYS[0])
    content = as_file([line("a")])
    made = [api.files.create(file=(f"{i}.jsonl", content), purpose="batch") for i in range(3)]
    assert (made[0].bytes, made[0].filename, made[0].purpose) == (len(content), "0.jsonl", "batch")
    assert api.files.retrieve(made[1].id) == made[1]
    assert api.files.content(made[2].id).content == content
    listed = [one.id for one in api.files.list(purpose="batch", limit=2)]  # pages until there are no more
    assert listed[:3] == [one.id for one in reversed(made)] and len(listed) == len(set(listed))
    assert api.files.delete(made[0].id).deleted
    with pytest.raises(openai.NotFoundError):
        api.files.retrieve(made[0].id)


def test_a_key_sees_only_what_is_its_own(batching: Served) -> None:
    batch = ended(batching, begin(batching, [line("mine")]))
    other = client(batching, KEYS[1])
    assert batch.output_file_id is not None
    for call in (
        lambda: other.files.retrieve(batch.input_file_id),
        lambda: other.files.content(batch.output_file_id),
        lambda: other.files.delete(batch.input_file_id),
        lambda: other.batches.retrieve(batch.id),
        lambda: other.batches.cancel(batch.id),
        lambda: other.batches.create(
            input_file_id=batch.input_file_id, endpoint=COMPLETIONS, completion_window="24h"
        ),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    assert not other.files.list().data and not other.batches.list().data
    assert batch.id in [one.id for one in client(batching, KEYS[0]).batches.list(limit=1)]


def test_a_cancelled_batch_keeps_what_was_answered(batching: Served) -> None:
    """The engine stands still, so that no line ends before the batch is cancelled."""
    engine = batching.engine()
    engine.suspend()
    try:
        batch = begin(batching, [line(f"n{i}", max_tokens=2) for i in range(200)])
        api = client(batching, KEYS[0])
        wait_for(lambda: api.batches.retrieve(batch.id).status == "in_progress")
        assert api.batches.cancel(batch.id).status == "cancelling"
        with pytest.raises(openai.BadRequestError, match="still reads this file"):
            api.files.delete(batch.input_file_id)
    finally:
        engine.resume()
    batch = ended(batching, batch)
    assert batch.status == "cancelled" and batch.cancelled_at and batch.request_counts is not None
    answers = results(batching, batch.output_file_id)
    assert len(answers) == batch.request_counts.completed < 200
    with pytest.raises(openai.BadRequestError, match="is cancelled already"):
        api.batches.cancel(batch.id)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint must be one of /v1/chat/completions"),
        ({"completion_window": "1h"}, "completion_window must be '24h'"),
        ({"metadata": {"a": "b" * 600}}, "at most 16 entries"),
        ({"extra": 1}, "'extra' is not a field"),
    ],
)
def test_a_wrong_batch_is_refused(batching: Served, change: dict[str, Any], says: str) -> None:
    body = {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h", **change}
    reply = batching.post("/v1/batches", body, headers={"authorization": f"Bearer {KEYS[0]}"})
    assert (reply.status_code, says in reply.json()["error"]["message"]) == (400, True), reply.text


def test_uploads_are_bounded_and_checked(batching: Served) -> None:
    def send(content: bytes = b"{}\n", name: str = "file", **fields: str) -> httpx.Response:
        return httpx.post(
            f"{batching.url}/v1/files", files={name: ("a", content)}, data=fields, timeout=20,
            verify=UNENCRYPTED, headers={"authorization": f"Bearer {KEYS[0]}"},
        )  # fmt: skip

    before = client(batching, KEYS[0]).files.list().data
    for reply, status, says in (
        (send(purpose="fine-tune"), 400, "purpose must be 'batch'"),
        (send(purpose="batch", **{"expires_after[seconds]": "9"}), 400, "is not done here"),
        (send(name="data", purpose="batch"), 400, "no part named 'file'"),
        (send(b"x" * (3 << 20), purpose="batch"), 413, "no room"),
        (
            batching.post("/v1/files", {}, headers={"authorization": f"Bearer {KEYS[0]}"}),
            400,
            "multipart/form-data",
        ),
    ):
        assert (reply.status_code, says in reply.text) == (status, True), reply.text
    assert client(batching, KEYS[0]).files.list().data == before  # nothing of them is kept


def test_a_server_without_a_folder_says_how_to_have_one(served: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="--batch-folder DIR"):
        client(served).batches.list()


def test_the_folder_is_private_and_one_servers(tiny_folder: Path, batching: Served, tmp_path: Path) -> None:
    flags = [arg for arg in batching.process.args if "batches" in str(arg)]  # type: ignore[union-attr]
    open_folder = tmp_path / "open"
    open_folder.mkdir(mode=0o755)
    for folder, says in ((flags[-1], "in use by another process"), (str(open_folder), "chmod 700")):
        found = subprocess.run(
            [*COMMAND, "serve", str(tiny_folder), "--port", "0", "--batch-folder", folder],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert found.returncode == 1 and says in found.stderr


def test_killed_twice_every_line_is_answered_once(
    tiny_folder: Path, tmp_path: Path, start: Callable[..., Served]
) -> None:
    """Tokens are those of a run that nobody killed."""
    lines = [line(f"n{i}", max_tokens=3 + i % 7) for i in range(120)]
    lines[7::40] = [line(f"bad{i}", top_p=5) for i in range(3)]
    flags = ("--batch-folder", str(tmp_path / "kept"), "--threads", "1", "--batch-sequences", "4")
    server = start(tiny_folder, *flags)
    batch = begin(server, lines)

    def done(least: int) -> bool:
        counts = client(server).batches.retrieve(batch.id).request_counts
        return counts is not None and counts.completed >= least

    kept: dict[str, Any] = {}
    for least in (15, 50):
        wait_for(lambda least=least: done(least), 60)  # type: ignore[misc]
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(20)
        with contextlib.closing(sqlite3.connect(tmp_path / "kept" / "batches.db")) as database:
            rows = database.execute("SELECT custom_id, result FROM lines WHERE status IS NOT NULL")
            kept |= {name: json.loads(result) for name, result in rows}
        server = start(tiny_folder, *flags)
        assert done(least)  # what was answered stays answered
    batch = ended(server, batch)
    answers, errors = results(server, batch.output_file_id), results(server, batch.error_file_id)
    assert {*answers, *errors} == {one["custom_id"] for one in lines}
    assert len(kept) >= 50 and kept.items() <= (answers | errors).items()  # none of them was done again
    assert len(answers) + len(errors) == len(lines) and {*errors} == {"bad0", "bad1", "bad2"}
    again = ended(server, begin(server, lines))
    for name, answer in results(server, again.output_file_id).items():
        assert tokens_of(answer) == tokens_of(answers[name])


def test_the_command_does_the_same_without_a_server(
    tiny_folder: Path, batching: Served, tmp_path: Path
) -> None:
    """It is killed on the way; the second run goes on from there, with the tokens of the server."""
    lines = [line(f"n{i}", max_tokens=60) for i in range(30)] + [line("bad", top_p=5)]
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_bytes(as_file(lines))
    command = [*COMMAND, "batch", str(file), "-o", str(out), "--model", str(tiny_folder), "--threads", "1"]
    first = subprocess.Popen([*command, "--max-sequences", "1"], stderr=subprocess.PIPE)
    kept = tmp_path / "out.jsonl.batch" / "batches.db"

    def answered() -> int:
        with contextlib.closing(sqlite3.connect(kept)) as database, contextlib.suppress(sqlite3.Error):
            return int(database.execute("SELECT count(status) FROM lines").fetchone()[0])
        return 0

    wait_for(lambda: kept.exists() and answered() >= 5, 60)
    first.kill()
    first.communicate(timeout=20)
    assert 5 <= answered() < 31
    file.write_bytes(as_file(lines[:-1]))
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 2 and "holds answers of another file" in found.stderr
    file.write_bytes(as_file(lines))
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0 and "30 answered, 1 refused" in found.stderr, found.stderr
    answers = [json.loads(one) for one in out.read_text().splitlines()]
    assert [one["custom_id"] for one in answers] == [one["custom_id"] for one in lines]
    served = results(batching, ended(batching, begin(batching, lines)).output_file_id)
    assert [tokens_of(one) for one in answers[:-1]] == [tokens_of(served[f"n{i}"]) for i in range(30)]
    assert not kept.parent.exists()
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 2 and "exists; delete it" in found.stderr


def test_the_command_refuses_a_wrong_file_before_anything_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    command = [*COMMAND, "batch", str(file), "--model", "no-such-model"]
    for content, says in (
        (b"hello\n", "the first line must be a request"),
        (as_file([line("a"), line("a")]), "line 2: custom_id must be new"),
    ):
        file.write_bytes(content)
        found = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert found.returncode == 2 and says in found.stderr, found.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
