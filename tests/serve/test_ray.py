"""`outrider deploy`: replicas on Ray Serve answer as a single server does, also when one of them dies."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.serve.conftest import UNENCRYPTED, Served, start_server, wait_for, write_tiny

pytest.importorskip("ray", reason="Ray is not installed: pip install 'outrider[ray]'")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
REPLICA = "ServeReplica:outrider:model-0"
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deployed") / "tiny"
    write_tiny(path, context=1 << 14)
    return path


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Served]:
    server = start_server(folder, "--cache-bytes", "16M", "--threads", "1")
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def deployed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two replicas behind one address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    file = tmp_path_factory.mktemp("ray") / "models.toml"
    file.write_text(
        f'port = {port}\n[models.tiny]\nmodel = {json.dumps(str(folder))}\ncache_bytes = "16M"\nthreads = 1\n'
        "min_replicas = 2\nmax_replicas = 2\nreplica_cpus = 0.1\n"
    )
    command = [sys.executable, "-m", "outrider", "deploy", str(file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    server = Served(process, f"http://127.0.0.1:{port}")
    assert process.stdout is not None
    threading.Thread(target=lambda: server.lines.extend(process.stdout), daemon=True).start()  # type: ignore[arg-type]
    try:
        wait_for(lambda: any("ready  " in line for line in server.lines), 120)
        wait_for(lambda: len(names(server)) == 2)
        yield server
    finally:
        code = server.stop()
    assert code == 0


def mixed(number: int) -> tuple[str, dict[str, Any]]:
    """Streams, seeds, tools and JSON."""
    talk: dict[str, Any] = {"messages": [{"role": "user", "content": f"question {number}"}], "max_tokens": 12}
    talk |= {"model": "tiny", "seed": number, "temperature": 1.0 if number % 2 else 0.0}
    kind = number % 5
    if kind == 0:
        return COMPLETIONS, {"model": "tiny", "prompt": f"text {number}", "max_tokens": 12, "seed": number}
    if kind == 1:
        return CHAT, {**talk, "tools": [TOOL], "tool_choice": "auto"}
    if kind == 2:
        return CHAT, {**talk, "response_format": {"type": "json_object"}}
    return CHAT, {**talk, "stream": kind == 3}


def answer(server: Served, path: str, body: dict[str, Any]) -> Any:
    reply = server.post(path, body)
    assert reply.status_code == 200, reply.text
    if not body.get("stream"):
        return [{k: v for k, v in c.items() if k != "logprobs"} for c in reply.json()["choices"]]
    assert reply.text.endswith("data: [DONE]\n\n")
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    return "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"])


def names(server: Served) -> set[str]:
    """Of the replicas that the metrics know."""
    lines = server.get("/metrics").text.splitlines()
    return {line.split('replica="')[1].split('"')[0] for line in lines if "replica=" in line}


def replicas(server: Served) -> list[psutil.Process]:
    """A replica that was killed may be there for a while, as a zombie."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    alive = [one for one in children if one.status() != psutil.STATUS_ZOMBIE]
    return [one for one in alive if REPLICA in " ".join(one.cmdline())]


def test_replicas_answer_as_a_single_server(deployed: Served, alone: Served) -> None:
    asked = [mixed(number) for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        here = list(pool.map(lambda one: answer(deployed, *one), asked))
        there = list(pool.map(lambda one: answer(alone, *one), [(p, {**b, "model": None}) for p, b in asked]))
    assert here == there
    assert deployed.get("/metrics").text.count("# TYPE outrider:steps_total counter") == 1
    assert deployed.metric("request_success_total") >= 40


def test_a_conversation_goes_back_to_its_replica(deployed: Served) -> None:
    for number in range(5):
        messages = [{"role": "user", "content": f"{number} conversation: " + "words " * 20}]
        for turn in range(4):
            reply = deployed.post(CHAT, {"messages": messages, "max_tokens": 8}).json()
            cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached > 100 or not turn
            more = ("assistant", "an answer"), ("user", "more")
            messages += [{"role": role, "content": text} for role, text in more]


def test_errors_are_those_of_a_server(deployed: Served) -> None:
    reply = deployed.post(COMPLETIONS, {"model": "other", "prompt": "a"})
    assert reply.status_code == 404 and "'tiny' is" in reply.json()["error"]["message"]
    reply = deployed.post(COMPLETIONS, {"prompt": "a", "max_token": 1})
    assert reply.status_code == 400 and "max_tokens" in reply.json()["error"]["message"]
    assert deployed.post("/v1/messages", {"model": "other"}).json()["type"] == "error"
    assert [card["id"] for card in deployed.get("/v1/models").json()["data"]] == ["tiny"]


def test_a_replica_that_dies_costs_only_its_own_streams(deployed: Served, alone: Served) -> None:
    bodies = [
        {"prompt": f"stream {n}", "max_tokens": 1500, "seed": n, "ignore_eos": True, "stream": True}
        for n in range(8)
    ]
    begun = [threading.Event() for _ in bodies]

    def follow(number: int) -> tuple[str, str | None]:
        text, problem = "", None
        with httpx.stream(
            "POST", deployed.url + COMPLETIONS, json=bodies[number], timeout=120, verify=UNENCRYPTED
        ) as reply:
            assert reply.status_code == 200
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                begun[number].set()
                event = json.loads(line[6:])
                if "error" in event:
                    problem = event["error"]["code"]
                elif event["choices"]:
                    text += event["choices"][0]["text"]
        return text, problem

    with ThreadPoolExecutor(12) as pool:
        streams = [pool.submit(follow, number) for number in range(len(bodies))]
        assert all(event.wait(60) for event in begun)
        os.kill(replicas(deployed)[0].pid, signal.SIGKILL)
        unsent = [pool.submit(answer, deployed, *mixed(number)) for number in range(100, 110)]
        ended = [stream.result() for stream in streams]
        assert len([one.result() for one in unsent]) == 10  # tried elsewhere: no error
    lost = [text for text, problem in ended if problem == "replica_lost"]
    whole = {n: text for n, (text, problem) in enumerate(ended) if problem is None}
    assert lost and whole and len(lost) + len(whole) == len(bodies)
    for number, text in whole.items():
        body = {**bodies[number], "stream": False}
        assert alone.post(COMPLETIONS, body).json()["choices"][0]["text"] == text
    wait_for(lambda: len(replicas(deployed)) == 2 and deployed.get("/health").status_code == 200, 60)
