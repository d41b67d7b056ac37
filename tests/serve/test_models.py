"""Several models in one server: which one a request means, when each is loaded, and who may use it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.cli.main import make_app
from outrider.errors import InvalidRequest, OutOfMemory
from outrider.serve.backend import Backend
from outrider.serve.engine_process import reporting
from outrider.serve.keys import Key, parse_keys
from outrider.serve.link import Loading, Start, from_engine, receive_as
from outrider.serve.metrics import Metrics
from outrider.serve.model_room import ModelRoom, check_table_fits
from outrider.serve.model_spec import ModelSpec, by_name, check_table, read_model
from outrider.serve.settings import ServeSettings
from tests.serve.conftest import Served, start_server, write_tiny

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
USER = [{"role": "user", "content": "Hello there"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two tiny models that differ in their weights."""
    above = tmp_path_factory.mktemp("models")
    found = {"small": above / "small", "large": above / "large"}
    write_tiny(found["small"])
    write_tiny(found["large"], context=1024, seed=1)
    return found


@pytest.fixture(scope="module")
def both(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of both, from a config file; the second is loaded on first use."""
    file = tmp_path_factory.mktemp("config") / "models.toml"
    file.write_text(table_of(folders, large='load = "first use"\nmax_tokens = 7'))
    server = start_server("small", "large", "--config", str(file))
    yield server
    assert server.stop() == 0


def table_of(folders: dict[str, Path], **more: str) -> str:
    return "".join(
        f"[models.{name}]\nmodel = {json.dumps(str(folder))}\n{more.get(name, '')}\n"
        for name, folder in folders.items()
    )


def card(server: Served, name: str, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = server.get(f"/v1/models/{name}", **options).json()
    return found


def text_of(server: Served, model: str | None, seed: int, **more: Any) -> str:
    body = {"prompt": f"number {seed}", "max_tokens": 12, "temperature": 1.0, "seed": seed, **more}
    reply = server.post(COMPLETIONS, body if model is None else {**body, "model": model})
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def test_each_model_answers_as_a_server_of_its_own(
    both: Served, folders: dict[str, Path], start: Callable[..., Served]
) -> None:
    """Requests to both at once; tokens are those of a server with one model."""
    asked = [(name, seed) for seed in range(6) for name in folders]
    with ThreadPoolExecutor(4) as pool:
        texts = dict(zip(asked, pool.map(lambda one: text_of(both, *one), asked), strict=True))
    for name, folder in folders.items():
        alone = start(folder)
        for seed in range(6):
            assert text_of(alone, None, seed) == texts[name, seed]
    assert texts["small", 0] != texts["large", 0]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": USER, "max_tokens": 2}),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 2}),
        (RESPONSES, {"input": "a", "max_output_tokens": 2}),
        (MESSAGES, {"messages": USER, "max_tokens": 2}),
    ],
)
def test_the_request_chooses_in_every_api(both: Served, path: str, body: dict[str, Any]) -> None:
    for name in ("small", "large"):
        assert both.post(path, {**body, "model": name}).json()["model"] == name
    reply = both.post(path, {**body, "model": "medium"})
    assert reply.status_code == 404
    assert "'medium' is not served here; 'small', 'large' are" in reply.json()["error"]["message"]


def test_other_routes_take_the_model_too(both: Served) -> None:
    text_of(both, "large", 0)
    assert both.post("/tokenize", {"model": "large", "prompt": "abc"}).json()["max_model_len"] == 1024
    assert both.post("/tokenize", {"prompt": "abc"}).json()["max_model_len"] == 2048
    counted = both.post("/v1/messages/count_tokens", {"model": "large", "messages": USER})
    assert counted.json()["input_tokens"] > 0
    live = both.get("/v1/live?model=large").json()
    assert (live["model"], live["models"]) == ("large", ["small", "large"])
    assert live["generation_tokens"] > 0
    assert both.get("/v1/live?model=medium").status_code == 404
    assert both.get("/v1/live?modle=large").status_code == 400
    metrics = both.get("/metrics").text
    for name in ("small", "large"):
        assert f'outrider:engine_up{{model_name="{name}"}} 1' in metrics
    assert metrics.count("# TYPE outrider:engine_up gauge") == 1


def test_limits_are_the_models_own(both: Served) -> None:
    text_of(both, "large", 0)
    assert [card(both, name)["default_max_tokens"] for name in ("small", "large")] == [512, 7]


def test_no_request_is_lost_while_models_take_turns(
    folders: dict[str, Path], tmp_path: Path, start: Callable[..., Served]
) -> None:
    """Two models of which only one fits: under load each is unloaded for the other, and loaded again."""
    file = tmp_path / "models.toml"
    again = 'load = "first use"\nunload_after = 0.5\ncontext = 64\nmax_sequences = 4'
    file.write_text(table_of(folders, small=again, large=again))
    server = start("small", "large", "--config", str(file), env={"OUTRIDER_MEMORY_BYTES": "500K"})
    replies: list[tuple[str, str]] = []

    def unloads() -> int:
        return sum("model unloaded" in line for line in server.lines)

    def ask(name: str) -> None:
        for _ in range(3000):
            replies.append((name, text_of(server, name, 5)))
            if unloads() >= 3:
                return

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, (*folders, *folders)))
    assert {name for name, _ in replies} == {*folders} and len(set(replies)) == 2
    assert unloads() >= 3 and server.metric("engine_restarts_total") == 0
    assert " status=5" not in "".join(server.lines)


def test_a_model_is_loaded_by_the_first_request_that_names_it(
    folders: dict[str, Path], tmp_path: Path, start: Callable[..., Served]
) -> None:
    """Requests wait for it within the queue's limits. One that cannot be loaded is an error of its own requests."""
    broken, file = tmp_path / "broken", tmp_path / "models.toml"
    write_tiny(broken)
    later = 'load = "first use"\nmax_queued_tokens = 200'
    file.write_text(table_of({**folders, "broken": broken}, large=later, broken=later))
    server = start("small", "large", "broken", "--config", str(file))
    long = server.post(COMPLETIONS, {"model": "large", "prompt": "a" * 2000, "max_tokens": 2})
    assert (long.status_code, long.json()["error"]["code"]) == (503, "queue_full")
    assert [card(server, "large")[name] for name in ("state", "max_model_len")] == ["unloaded", None]
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(lambda _: text_of(server, "large", 3), range(4)))) == 1
    assert [card(server, "large")[name] for name in ("state", "max_model_len")] == ["ready", 1024]
    assert server.metric("num_requests_waiting") == 0

    weights = broken / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    reply = server.post(COMPLETIONS, {"model": "broken", "prompt": "a", "max_tokens": 2})
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "load_failed")
    assert card(server, "broken")["state"] == "unloaded" and card(server, "broken")["problem"]
    assert server.get("/health").json()["models"] == {
        "small": "ready",
        "large": "ready",
        "broken": "unloaded",
    }
    weights.write_bytes(whole)
    assert text_of(server, "broken", 1)  # the next request tries again
    assert card(server, "broken")["problem"] is None


def test_a_key_may_be_limited_to_some_models(
    folders: dict[str, Path], tmp_path: Path, start: Callable[..., Served]
) -> None:
    keys = tmp_path / "keys.toml"

    def made(*words: str) -> str:
        ended = CliRunner().invoke(make_app(), ["keys", *words, "--file", str(keys)])
        assert ended.exit_code == 0, ended.output
        return str(ended.stdout.strip())

    limited, free = made("add", "limited", "--model", "large"), made("add", "free")
    assert made("list").splitlines() == ["limited\tonly large", "free\tno limits"]
    server = start(f"small={folders['small']}", f"large={folders['large']}", "--key-file", str(keys))
    names: dict[str, list[str]] = {}
    for key in (limited, free):
        bearer = {"Authorization": f"Bearer {key}"}
        names[key] = [one["id"] for one in server.get("/v1/models", headers=bearer).json()["data"]]
        body = {"prompt": "a", "max_tokens": 2}
        codes = [
            server.post(COMPLETIONS, {**body, "model": name}, headers=bearer).status_code for name in folders
        ]
        assert codes == ([403, 200] if key == limited else [200, 200])
        default = server.post(COMPLETIONS, body, headers=bearer).json()["model"]
        assert default == ("large" if key == limited else "small")
        assert server.get("/v1/live?model=small", headers=bearer).status_code == codes[0]
    assert names == {limited: ["large"], free: ["small", "large"]}


# ----------------------------------------------------------------------------------------------- the table


def test_first_use_needs_room_for_one_alone() -> None:
    later = ServeSettings(load="first use")
    table = [ModelSpec("a", "a"), ModelSpec("b", "b", serve=later), ModelSpec("c", "c")]
    needs = {"a": ("cpu", 40, 20), "b": ("cpu", 60, 40), "c": ("cuda", 500, 500)}
    check_table_fits(table, ModelRoom(needs, {"cpu": 100, "cuda": 1000}))
    for free in ({"cpu": 99, "cuda": 1000}, {"cpu": 100, "cuda": 999}):
        with pytest.raises(OutOfMemory):
            check_table_fits(table, ModelRoom(needs, free))
    both = [ModelSpec("a", "a"), ModelSpec("b", "b")]
    check_table_fits(both, ModelRoom(needs, {"cpu": 160}))
    with pytest.raises(OutOfMemory, match="a 0 MiB weights"):
        check_table_fits(both, ModelRoom(needs, {"cpu": 159}))
    check_table_fits(both, ModelRoom(needs, {}))  # free memory is not known on this system


def test_names_of_models(tmp_path: Path) -> None:
    assert read_model("B=/models/b") == ("B", "/models/b")
    assert read_model("/models/b.gguf") == ("b.gguf", "/models/b.gguf")
    assert read_model("org/name") == ("org/name", "org/name")
    odd = tmp_path / "a=b"
    odd.mkdir()
    assert read_model(str(odd)) == ("a=b", str(odd))
    with pytest.raises(InvalidRequest):
        read_model("B=")
    shared = [ModelSpec("a", "/m"), ModelSpec("/m", "/n"), ModelSpec("b", "/m")]
    check_table(shared)
    assert by_name(shared) == {"a": 0, "/m": 1, "/n": 1, "b": 2}


def test_a_keys_models_are_read_and_checked() -> None:
    text = f'[[key]]\nname = "a"\nhash = "sha256:{"0" * 64}"\n'
    [key] = parse_keys(text + 'models = ["x"]', "file")
    assert key.allows(["y", "x"]) and not key.allows(["y"]) and Key("b", b"").allows(["y"])
    for wrong in ("models = []", 'models = "x"', "models = [1]", 'models = [""]'):
        with pytest.raises(InvalidRequest, match="a list of names"):
            parse_keys(text + wrong, "file")


def test_progress_is_the_share_of_the_weights_that_is_read() -> None:
    async def run() -> list[float | None]:
        backend = Backend(Start("tiny", "none", {}, ("text", "info")), ServeSettings(), Metrics())
        seen = [backend.progress]
        for done in (1, 4):
            await backend._handle(Loading(done, 4))
            seen.append(backend.progress)
        backend._lost()
        return [*seen, backend.progress]

    assert asyncio.run(run()) == [None, 0.25, 1.0, None]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        update = reporting(theirs)("words", 1000)
        for done in range(0, 1001, 5):
            update(done)
        theirs.shutdown(socket.SHUT_WR)
        received = []
        while (message := receive_as(from_engine, ours)) is not None:
            received.append(message)
    assert received[-1] == Loading(1000, 1000) and 10 < len(received) <= 51
