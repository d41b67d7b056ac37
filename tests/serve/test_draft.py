"""The draft of a running server: swapped and rolled back under load, by those who may, from where it may come."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Semaphore
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from outrider.cli.main import make_app
from outrider.load.cards import Acceptance, Card, DraftFacts, Score, TargetFacts, TaskScore, write_card
from outrider.load.token_shards import read_shards
from outrider.serve.draft import check_admin, draft_beneath
from outrider.serve.draft_swaps import DraftSwaps
from outrider.serve.errors import ApiError
from outrider.serve.keys import digest_of
from outrider.serve.link import ServedDraft, Swap, Swapped
from outrider.serve.metrics import Metrics
from outrider.serve.traffic import folder_name
from tests.serve.conftest import UNENCRYPTED, Served, start_server, write_tiny
from tests.tiny import noised, tiny_config

KEYS = {name: f"or-{name}-0123456789abcdef" for name in ("admin", "marked", "other")}
STREAMS, FEW = 32, 7


def write_keys(file: Path) -> None:
    marks = {"admin": "admin = true", "marked": "keep_traffic = true", "other": ""}
    entries = [
        f'[[key]]\nname = "{name}"\nhash = "sha256:{digest_of(key).hex()}"\n{marks[name]}\n'
        for name, key in KEYS.items()
    ]
    file.write_text("\n".join(entries))


def write_drafts(folder: Path) -> None:
    """A draft that is rarely right, one that always is, and one of another shape."""
    write_tiny(folder / "target")
    shutil.copytree(folder / "target", folder / "drafts" / "right")
    shutil.copytree(folder / "target", folder / "drafts" / "wrong")
    tensors = load_file(folder / "target" / "model.safetensors")
    noisy = noised(tiny_config(vocab=len(tensors["model.embed_tokens.weight"])), 0, 2.0)
    save_file({name: noisy(name) for name in tensors}, folder / "drafts" / "wrong" / "model.safetensors")
    shutil.copytree(folder / "target", folder / "drafts" / "longer")
    config = json.loads((folder / "target" / "config.json").read_text())
    longer = {**config, "max_position_embeddings": 4096}
    (folder / "drafts" / "longer" / "config.json").write_text(json.dumps(longer))
    (folder / "drafts" / "outside").symlink_to(folder / "target")
    chain = Acceptance(10, 40, (10, 10), (9, 8))
    score = Score(
        2,
        2,
        40,
        (TaskScore("chat", 0.0, 4, chain, chain, target_probability=0.5),),
        "m",
        "2026-01-31",
        "c",
        "v",
    )
    facts = DraftFacts("lm", "huggingface", 1000, ("outrider",))
    write_card(folder / "drafts" / "right", Card(1, TargetFacts("t", "0" * 64, 1000), facts, score=score))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_drafts(tmp_path)
    write_keys(tmp_path / "keys.toml")
    return tmp_path


def headers(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}"}


def swap(server: Served, path: str, key: str = "admin") -> httpx.Response:
    return server.post("/v1/draft/swap", {"path": path}, headers=headers(key))


def body(i: int) -> dict[str, Any]:
    """Half greedy, half sampled; every fourth prompt is shared."""
    return {
        "prompt": [3 + i % 4, *range(5, 9 + i % 7)], "max_tokens": 36, "seed": i, "temperature": 0.9 * (i % 2),
        "ignore_eos": True, "stream": True, "return_token_ids": True, "speculative_decoding": {"depth": 2},
    }  # fmt: skip


def stream(url: str, i: int, begun: Semaphore) -> list[int]:
    ids: list[int] = []
    ended = False
    name = ("marked", "other", "other")[i % 3]
    with (
        httpx.Client(timeout=60, verify=UNENCRYPTED) as client,
        client.stream("POST", f"{url}/v1/completions", json=body(i), headers=headers(name)) as answer,
    ):
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                [choice] = json.loads(line[6:])["choices"]
                ids += choice.get("token_ids") or []
                ended = ended or choice["finish_reason"] == "length"
                begun.release()
    assert ended and len(ids) == 36
    return ids


def crowd(
    server: Served, size: int = STREAMS, during: Callable[[Callable[[], bool]], None] | None = None
) -> list[list[int]]:
    """So many streams at once, and what is done while they run."""
    begun = Semaphore(0)
    with ThreadPoolExecutor(size) as pool:
        streams = [pool.submit(stream, server.url, i, begun) for i in range(size)]
        for _ in range(size if during else 0):
            assert begun.acquire(timeout=60)
        if during:
            during(lambda: not all(one.done() for one in streams))
        return [one.result() for one in streams]


def test_the_draft_of_a_running_server(place: Path) -> None:
    """One server for all of it: starting one takes seconds."""
    folder = place / "traffic"
    server = start_server(
        place / "target", "--draft", str(place / "drafts" / "wrong"), "--draft-folder", str(place / "drafts"),
        "--key-file", str(place / "keys.toml"), "--keep-traffic", str(folder), "--cache-bytes", "8M",
    )  # fmt: skip
    try:
        tokens = swaps_under_load_lose_nothing_and_change_no_token(server, place)
        other_drafts_are_refused_by_name(server)
        only_those_who_run_it_may(server)
        the_command_shows_swaps_and_rolls_back(server)
        served = [(body(i)["prompt"], tokens[i]) for i in range(0, STREAMS, 3)] * 2
        served += [(body(i)["prompt"], tokens[i]) for i in range(0, FEW, 3)]
        served += other_requests(server)
    finally:
        code = server.stop()  # it writes what it holds
    assert code == 0
    exactly_what_marked_keys_were_served_is_kept(folder, served)


def swaps_under_load_lose_nothing_and_change_no_token(server: Served, place: Path) -> list[list[int]]:
    expected = crowd(server)
    [before] = server.get("/v1/draft", headers=headers("admin")).json()["data"]
    assert before["path"].endswith("wrong") and before["card"] is None and before["acceptance"] < 0.4
    while_running: list[dict[str, Any]] = []

    def exchange(running: Callable[[], bool]) -> None:
        for ask in (
            lambda: swap(server, "right"),
            lambda: server.post("/v1/draft/rollback", {}, headers=headers("admin")),
            lambda: swap(server, str(place / "drafts" / "right")),
        ):
            answer = ask()
            assert answer.status_code == 200, answer.text
            while_running.extend(answer.json()["data"] if running() else [])

    assert crowd(server, during=exchange) == expected
    names = [Path(one["path"]).name for one in while_running]
    assert names and names == ["right", "wrong", "right"][: len(names)]
    assert crowd(server, FEW) == expected[:FEW]
    [after] = server.get("/v1/draft", headers=headers("admin")).json()["data"]
    assert after["acceptance"] > 0.8 and Path(after["previous"]).name == "wrong"
    assert after["card"]["score"]["date"] == "2026-01-31"
    text = server.get("/metrics", headers=headers("other")).text
    gauge = lambda name: float(re.search(rf'{name}{{[^}}]*drafter="lm"}} (\S+)', text)[1])  # noqa: E731
    assert gauge("spec_decode_card_acceptance") == pytest.approx(0.9)
    assert gauge("spec_decode_recent_acceptance") == pytest.approx(after["acceptance"])
    assert gauge("spec_decode_card_target_probability") == pytest.approx(0.5)
    assert 0 < gauge("spec_decode_recent_target_probability") < 1
    assert not re.search(r"admission_rejections_total\{[^}]*\} [1-9]", text)
    assert re.search(r"traffic_keeping\{[^}]*\} 1\n", text)
    return expected


def other_drafts_are_refused_by_name(server: Served) -> None:
    answer = swap(server, "longer")
    assert answer.status_code == 400
    assert re.search("longer has another shape.*context is 4096, not 2048", answer.json()["error"]["message"])
    for path in ("missing", "../target", "outside", "/", ".", "", "a\0b"):
        answer = swap(server, path)
        assert answer.status_code == 404 and "there is no folder" in answer.json()["error"]["message"], path
    assert server.post("/v1/draft/swap", {}, headers=headers("admin")).json()["error"]["param"] == "path"


def only_those_who_run_it_may(server: Served) -> None:
    for name in ("marked", "other"):
        assert swap(server, "right", name).status_code == 403
        assert server.get("/v1/draft", headers=headers(name)).status_code == 403
        refused = server.post("/v1/draft/rollback", {}, headers=headers(name))
        assert refused.json()["error"]["code"] == "not_admin"
    assert server.get("/v1/draft").status_code == 401


def the_command_shows_swaps_and_rolls_back(server: Served) -> None:
    def run(*words: str) -> str:
        key = {"OUTRIDER_API_KEY": KEYS["admin"], "OUTRIDER_URL": server.url}
        ended = CliRunner().invoke(make_app(), ["draft", *words], env=key)
        assert ended.exit_code == 0, (ended.output, ended.exception)
        return ended.output

    run("swap", "wrong")
    shown = run("swap", "right")
    assert re.match(r"lm\t\S+right\tsince 20", shown) and "0.900 by its card" in shown
    assert "wrong" in run("rollback").splitlines()[0]
    assert json.loads(run("show", "--json"))["data"][0]["path"].endswith("wrong")
    asked = ["draft", "swap", "no", "--url", server.url, "--api-key", KEYS["admin"]]
    assert "refused: there is no folder no" in str(CliRunner().invoke(make_app(), asked).exception)


def other_requests(server: Served) -> list[tuple[list[int], list[int]]]:
    """Several prompts and choices of a marked key; and one in a mode that is not exact, which is not to be kept."""
    lossy = {**body(1), "stream": False, "speculative_decoding": {"mode": "lossy", "depth": 2}}
    assert server.post("/v1/completions", lossy, headers=headers("marked")).status_code == 200
    many = {"prompt": [[5, 6], [7]], "n": 2, "max_tokens": 3, "return_token_ids": True, "temperature": 0.5}
    answer = server.post("/v1/completions", many, headers=headers("marked")).json()
    return [(many["prompt"][c["index"] // 2], c["token_ids"]) for c in answer["choices"]]


def exactly_what_marked_keys_were_served_is_kept(
    folder: Path, served: list[tuple[list[int], list[int]]]
) -> None:
    kept = list(read_shards(folder / folder_name("marked")))
    assert {path.name for path in folder.iterdir()} == {".lock", "key-marked"}
    found = [(one.ids[~one.answered].tolist(), one.ids[one.answered].tolist()) for one in kept]
    assert sorted(found) == sorted(served)
    assert {one.temperature for one in kept} == {0.0, 0.9, 0.5}
    assert all(list(one.answered) == sorted(one.answered) for one in kept)  # the prompt comes first


# ------------------------------------------------------------------------------------------- without a server


def test_an_engine_started_again_is_asked_for_the_swapped_draft(tmp_path: Path) -> None:
    asked: list[Swap] = []
    at_first = ServedDraft("lm", str(tmp_path / "one"), 1.0, None)

    async def life() -> None:
        swaps = DraftSwaps(asked.append, Metrics())
        swaps.started([at_first], 60)
        assert not asked
        swapping = asyncio.create_task(swaps.swap(tmp_path / "two", 60))
        await asyncio.sleep(0)
        two = ServedDraft("lm", str(tmp_path / "two"), 2.0, at_first.path)
        swaps.received(Swapped(asked[-1].number, two))
        assert await swapping == two == swaps.drafts["lm"]
        lost = asyncio.create_task(swaps.swap(None, 60))
        await asyncio.sleep(0)
        swaps.lost()
        with pytest.raises(ApiError, match="engine stopped"):
            await lost
        swaps.started([at_first], 60)  # another engine
        await asyncio.sleep(0)
        assert asked[-1].path == str(tmp_path / "two") and len(asked) == 3
        swaps.received(Swapped(asked[-1].number, None, "it is gone"))  # a warning, and the first draft stays
        await asyncio.sleep(0)
        assert swaps.drafts["lm"] == at_first

    asyncio.run(life())


@pytest.mark.parametrize(
    ("host", "header", "allowed"),
    [
        ("127.0.0.1", {}, True),
        ("::1", {}, True),
        ("::ffff:127.0.0.1", {}, True),
        ("192.0.2.7", {}, False),
        ("127.0.0.1", {"x-forwarded-for": "192.0.2.7"}, False),
        (None, {}, False),
    ],
)
def test_without_keys_only_this_machine_may(host: str | None, header: dict[str, str], allowed: bool) -> None:
    client = None if host is None else SimpleNamespace(host=host)
    request = SimpleNamespace(key=None, client=client, headers=header)
    if allowed:
        check_admin(request)
    else:
        with pytest.raises(ApiError, match="own machine"):
            check_admin(request)


def test_without_folders_no_draft_is_taken(tmp_path: Path) -> None:
    with pytest.raises(ApiError, match="--draft-folder"):
        draft_beneath(str(tmp_path), ())
