"""Several models in one server: which one a request means, when each is loaded, and who may use it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import InvalidRequest, OutOfMemory
from outrider.serve.keys import Key, parse_keys
from outrider.serve.model_room import ModelRoom, check_table_fits
from outrider.serve.model_spec import ModelSpec, by_name, check_table, read_model
from outrider.serve.settings import ServeSettings
from tests.cli.conftest import Outrider, outrider  # noqa: F401
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


def test_a_model_is_loaded_by_the_first_request_that_names_it(both: Served) -> None:
    before = card(both, "large")
    assert (before["state"], before["max_model_len"]) == ("unloaded", None)
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda _: text_of(both, "large", 3), range(4)))
    assert len(set(texts)) == 1
    after = card(both, "large")
    assert (after["state"], after["max_model_len"]) == ("ready", 1024)
    assert both.get("/health").json()["models"] == {"small": "ready", "large": "ready"}
    assert both.metric("num_requests_waiting") == 0


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
    """Two models of which only one fits: each is unloaded for the other again and again, under load."""
    file = tmp_path / "models.toml"
    again = 'load = "first use"\nunload_after = 0.3\ncontext = 64\nmax_sequences = 4'
    file.write_text(table_of(folders, small=again, large=again))
    server = start("small", "large", "--config", str(file), env={"OUTRIDER_MEMORY_BYTES": "500K"})
    alone = {name: text_of(server, name, 5) for name in folders}
    replies: list[tuple[str, str]] = []

    def ask(name: str) -> None:
        for _ in range(30):
            replies.append((name, text_of(server, name, 5)))

    threads = [threading.Thread(target=ask, args=(name,)) for name in (*folders, *folders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(replies) == 120 and all(text == alone[name] for name, text in replies)
    assert "".join(server.lines).count("model unloaded") >= 3
    states = sorted(card(server, name)["state"] for name in folders)
    assert states == ["ready", "unloaded"]
    assert server.metric("engine_restarts_total") == 0


def test_a_model_that_cannot_be_loaded_is_an_error_of_its_requests(
    folders: dict[str, Path], tmp_path: Path, start: Callable[..., Served]
) -> None:
    broken = tmp_path / "broken"
    write_tiny(broken)
    file = tmp_path / "models.toml"
    file.write_text(table_of({"small": folders["small"], "broken": broken}, broken='load = "first use"'))
    server = start("small", "broken", "--config", str(file))
    weights = broken / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    reply = server.post(COMPLETIONS, {"model": "broken", "prompt": "a", "max_tokens": 2})
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "load_failed")
    assert card(server, "broken")["state"] == "unloaded" and "broken" in card(server, "broken")["problem"]
    assert text_of(server, "small", 1)
    weights.write_bytes(whole)
    assert text_of(server, "broken", 1)  # the next request tries again
    assert card(server, "broken")["problem"] is None


def test_requests_that_wait_for_a_model_are_bounded(
    folders: dict[str, Path], tmp_path: Path, start: Callable[..., Served]
) -> None:
    file = tmp_path / "models.toml"
    file.write_text(table_of(folders, large='load = "first use"\nmax_queued_tokens = 50'))
    server = start("small", "large", "--config", str(file))
    reply = server.post(COMPLETIONS, {"model": "large", "prompt": "a" * 400, "max_tokens": 2})
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "queue_full")
    assert card(server, "large")["state"] == "unloaded"


def test_a_key_may_be_limited_to_some_models(
    folders: dict[str, Path],
    tmp_path: Path,
    start: Callable[..., Served],
    outrider: Outrider,  # noqa: F811
) -> None:
    keys = tmp_path / "keys.toml"
    limited = outrider("keys", "add", "limited", "--file", keys, "--model", "large").out.strip()
    free = outrider("keys", "add", "free", "--file", keys).out.strip()
    assert "large" in outrider("keys", "list", "--file", keys).out
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


# --------------------------------------------------------------------------- refused before anything is loaded


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("[models.a]\ncach_bytes = 1", "[models.a]: unknown key 'cach_bytes'; did you mean 'cache_bytes'?"),
        ("[models.a]\nport = 1", "[models.a]: port concerns the whole server"),
        ('[models.a]\nload = "later"', "[models.a]: unknown load 'later'"),
        ("[models.a]\nthreads = true", "[models.a]: threads: must be a whole number"),
        ('[models.a]\ngeneration_config = "some"', "'some' is not auto or none"),
        ('model = "b"\n[models.a]', "model and [models] both say what is served"),
        ("models = 1", "models are tables headed [models.NAME]"),
        ('[models.a]\nserved_name = "b"\n[models.b]', "two models are called 'b'"),
        ('keep_traffic = "x"\n[models.a]\n[models.b]', "two models keep traffic in x"),
        ('[models.a]\ndraft = "lokup"', "no drafter 'lokup'"),
    ],
)
def test_a_wrong_table_is_refused(
    outrider: Outrider,
    tmp_path: Path,
    table: str,
    words: str,  # noqa: F811
) -> None:
    file = tmp_path / "models.toml"
    file.write_text(table)
    ran = outrider("serve", "--config", file, "--port", 0)
    assert ran.code != 0 and words in " ".join(ran.err.split())


def test_models_that_do_not_fit_together_are_refused(
    outrider: Outrider,
    folders: dict[str, Path],  # noqa: F811
) -> None:
    given = [f"{name}={folder}" for name, folder in folders.items()]
    ran = outrider("serve", *given, "--port", 0, "--memory-bytes", "80M")
    said = " ".join(ran.err.split())
    assert ran.code == 1 and "the models do not fit into 80 MiB of the machine's memory: small 0 MiB" in said
    assert 'load = "first use"' in said and "loading" not in ran.out
    ran = outrider("serve", *given, "--port", 0, "--memory-bytes", "50M", "--load", "first use")
    assert ran.code == 1 and "the model does not fit into 50 MiB" in " ".join(ran.err.split())


def test_a_model_that_is_not_there_is_refused(outrider: Outrider, folders: dict[str, Path]) -> None:  # noqa: F811
    missing = folders["small"].with_name("missing")
    ran = outrider("serve", folders["small"], missing, "--port", 0, "--load", "first use")
    assert ran.code == 1 and str(missing) in ran.err


def test_a_port_in_use_is_known_at_once(outrider: Outrider, folders: dict[str, Path]) -> None:  # noqa: F811
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ran = outrider("serve", *folders.values(), "--port", taken.getsockname()[1])
    assert ran.code == 1 and "choose another with --port" in ran.err


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
