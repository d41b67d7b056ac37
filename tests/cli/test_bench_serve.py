"""`outrider bench serve` as users call it, against servers on loopback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.load_server import serving
from tests.cli.conftest import Outrider

FEW = ("--requests", 4, "--warmup", 1, "--input-tokens", 8, "--output-tokens", 5)


def test_loads_one_after_the_other_with_everything_written_out(outrider: Outrider, tmp_path: Path) -> None:
    out, page = tmp_path / "out.json", tmp_path / "page.html"
    with serving(tokens=None) as server:
        ran = outrider("bench", "serve", "--url", f"{server.url}/v1", "--concurrency", "1,2", *FEW, "--ignore-eos",
                       "--goodput", "ttft=60000,itl=60000", "--body", "top_p=0.5", "--body", "user=me",
                       "--json", out, "--html", page)  # fmt: skip
    assert ran.code == 0, ran.err
    assert ran.out == ""
    found = json.loads(out.read_text())
    assert found["kind"] == "serve" and found["complete"] and found["certificate"]["commit"]
    assert [load["load"] for load in found["loads"]] == ["concurrency 1", "concurrency 2"]
    assert found["servers"][0] | {"version": ""} == {
        "url": server.url, "model": "tiny", "version": "", "lengths_by": "tokens"
    }  # fmt: skip
    for load in found["loads"]:
        [one] = load["servers"]
        assert one["requests"] == 4 and one["failed"] == 0 and one["output_tokens"] == 20
        assert one["goodput"]["share"] == 1 and len(one["raw"]["requests"]) == 4
        assert len(one["raw"]["itl_ms"]) == one["raw"]["itl_of"] == 16
    bodies = [seen.body for seen in server.asked]
    assert len(bodies) == 1 + 2 * (1 + 4)  # the look at it; the warm-up and the requests of each load
    assert len({body["prompt"] for body in bodies}) == len(bodies)
    assert all(len(body["prompt"].split()) == 8 and body["max_tokens"] == 5 for body in bodies)
    assert all(body["ignore_eos"] and (body["top_p"], body["user"]) == (0.5, "me") for body in bodies)
    lines = ran.err.splitlines()
    assert max(map(len, (line for line in lines if "written to" not in line))) <= 80
    assert any(line.startswith("concurrency 2: 4 requests in ") for line in lines) and "goodput" in ran.err
    assert "<svg" in page.read_text()


def test_two_servers_in_turn_with_ratios(outrider: Outrider, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    with serving() as first, serving() as second:
        ran = outrider("bench", "serve", "--url", first.url, "--url", second.url, "--concurrency", 2, "--rounds", 2,
                       *FEW, "--json", out)  # fmt: skip
    assert ran.code == 0, ran.err
    [load] = json.loads(out.read_text())["loads"]
    assert [server["requests"] for server in load["servers"]] == [8, 8]
    [ratios] = load["ratios"]
    assert (
        0
        < ratios["output_tok_s"]["low"]
        <= ratios["output_tok_s"]["median"]
        <= ratios["output_tok_s"]["high"]
    )
    mine, other = ([seen.body["prompt"] for seen in server.asked] for server in (first, second))
    assert sorted(mine) == sorted(other)  # the same prompts
    # A, B, B, A: the second round begins with the other server
    assert max(seen.at for seen in second.asked) < max(seen.at for seen in first.asked)
    assert "B over A, 2 rounds" in ran.err


def test_open_loops(outrider: Outrider, tmp_path: Path) -> None:
    trace, out = tmp_path / "trace", tmp_path / "out.json"
    trace.write_text("0 7 2\n0.01 3 4\n")
    with serving(tokens=None) as server:
        ran = outrider("bench", "serve", "--url", server.url, "--trace", trace, "--warmup", 0, "--json", out)
        assert ran.code == 0, ran.err
        assert [(len(s.body["prompt"].split()), s.body["max_tokens"]) for s in server.asked[1:]] == [
            (7, 2),
            (3, 4),
        ]
        ran = outrider(
            "bench", "serve", "--url", server.url, "--rate", "500,inf", "--burst", 2, *FEW, "--json", out
        )
        assert ran.code == 0, ran.err
    loads = json.loads(out.read_text())["loads"]
    assert [load["load"] for load in loads] == ["rate 500", "rate inf"]
    assert [load["servers"][0]["requests"] for load in loads] == [4, 4]


def test_prompts_of_a_file(outrider: Outrider, tmp_path: Path) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_text(
        'plain\n{"turns": ["first", "second"]}\n{"messages": [{"role": "user", "content": "m"}]}\n'
    )
    with serving() as server:
        ran = outrider("bench", "serve", "--url", server.url, "--prompts", file, "--requests", 3, "--warmup", 0,
                       "--concurrency", 1)  # fmt: skip
        assert ran.code == 0, ran.err
        assert {seen.path for seen in server.asked} == {"/v1/chat/completions"}
        assert [seen.body["messages"][0]["content"] for seen in server.asked[1:]] == ["plain", "first", "m"]
        assert "1 of 3 rows have several turns" in ran.err
        assert not [seen for seen in server.seen if seen.path == "/tokenize"]
        ran = outrider("bench", "serve", "--url", server.url, "--prompts", file, "--endpoint", "completions")
        assert ran.code == 2 and "conversations" in ran.err
        ran = outrider("bench", "serve", "--url", server.url, "--prompts", file, "--limit", 1, "--requests", 1,
                       "--endpoint", "completions")  # fmt: skip
        assert ran.code == 0 and server.asked[-1].body["prompt"] == "plain"


def test_errors_are_shown_and_only_failing_altogether_is_failure(outrider: Outrider) -> None:
    with serving(fail_every=2, said="the queue is full") as server:
        ran = outrider("bench", "serve", "--url", server.url, *FEW)
    assert ran.code == 0 and "failed: 2 x HTTP 503: the queue is full" in ran.err


def test_a_key_is_sent_and_never_written(
    outrider: Outrider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, page = tmp_path / "out.json", tmp_path / "page.html"
    args = ["--api-key", "se-cret", "--json", str(out), "--html", str(page)]
    monkeypatch.setattr("sys.argv", ["outrider", "bench", "serve", *args])
    with serving(key="se-cret") as server:
        ran = outrider("bench", "serve", "--url", server.url, *FEW, *args)
        assert ran.code == 0, ran.err
        assert "--api-key *** --json" in json.loads(out.read_text())["certificate"]["command"]
        assert "se-cret" not in out.read_text() + page.read_text() + ran.err
        ran = outrider("bench", "serve", "--url", server.url)
        assert ran.code == 1 and "wants an API key (HTTP 401: a key is needed)" in ran.err
        monkeypatch.setenv("OUTRIDER_API_KEY", "se-cret")
        assert outrider("bench", "serve", "--url", server.url, *FEW).code == 0


@pytest.mark.parametrize(
    ("script", "flags", "said"),
    [
        (dict(whole=True), (), "no stream: it answered in one piece, as application/json"),
        (dict(status=404, said="no model x"), ("--model", "x"), "no such route or model (404: no model x)"),
        (dict(models=False), (), "/v1/models: no such route or model (404: Not Found); --url is"),
        (
            dict(status=400, said="what is ignore_eos?"),
            (),
            "HTTP 400: what is ignore_eos?; fields other servers",
        ),
        (dict(status=503, said="loading"), (), "HTTP 503: loading; is it still starting"),
        (dict(status=500, said="out of cheese"), (), "HTTP 500: out of cheese"),
        (dict(breaks=1), (), "connection lost"),
    ],
)
def test_a_server_that_will_not_do_is_named(
    outrider: Outrider, script: dict, flags: tuple[str, ...], said: str
) -> None:
    with serving(**script) as server:
        ran = outrider("bench", "serve", "--url", server.url, *flags)
    assert ran.code == 1 and server.url in ran.err and said in ran.err, ran.err
    assert "Traceback" not in ran.err


def test_a_server_that_is_not_there_is_named(outrider: Outrider) -> None:
    with serving() as server:
        pass
    ran = outrider("bench", "serve", "--url", server.url)
    assert ran.code == 1 and f"{server.url}: connection refused" in ran.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--url", "ftp://x"], "'ftp://x' is not an address such as"),
        (["--concurrency", "0"], "--concurrency '0' is not a list of numbers"),
        (["--concurrency", "1.5"], "is not a list of whole numbers"),
        (["--concurrency", "inf"], "is not a list of whole numbers"),
        (["--rate", "fast"], "--rate 'fast' is not a list of numbers"),
        (["--rate", "1", "--concurrency", "1"], "give one of --concurrency and --rate, not both"),
        (["--rate", "inf", "--seconds", "2"], "give --requests, not --seconds"),
        (["--burst", "3"], "--burstiness and --burst go with --rate"),
        (["--endpoint", "talk"], "is not chat or completions"),
        (["--body", "x"], "is not NAME=VALUE"),
        (["--body", "{x"], "is not JSON"),
        (["--body", "n=2"], "one answer a request"),
        (["--body", "stream=false"], "always streamed"),
        (["--goodput", "speed=1"], "one of ttft, itl, tpot, e2e"),
        (["--trace", "/no/such/file"], "/no/such/file cannot be read"),
        (["--prompts", "/no/such/file"], "/no/such/file cannot be read"),
        (["--html", "/no/such/folder/x"], "cannot be written"),
        (["--json", "/no/such/folder/x"], "cannot be written"),
        (["--concurency", "1"], "did you mean --concurrency?"),
        (["--requests", "0"], "requests"),
    ],
)
def test_bad_flags_are_named_before_anything_is_asked(
    outrider: Outrider, flags: list[str], said: str
) -> None:
    ran = outrider("bench", "serve", *flags)
    assert ran.code == 2 and said in ran.err, ran.err


def test_flags_of_another_load_generator_are_understood(outrider: Outrider) -> None:
    with serving(tokens=None) as server:
        ran = outrider("bench", "serve", "--base-url", server.url, "--max-concurrency", 1, "--num-prompts", 2,
                       "--random-input-len", 6, "--random-output-len", 3, "--model", "tiny")  # fmt: skip
    assert ran.code == 0, ran.err
    assert (len(server.asked[-1].body["prompt"].split()), server.asked[-1].body["max_tokens"]) == (6, 3)


def test_conversations_are_told_by_turn(outrider: Outrider, tmp_path: Path) -> None:
    out, page = tmp_path / "out.json", tmp_path / "page.html"
    with serving(cache=True) as server:
        ran = outrider("bench", "serve", "--url", server.url, "--conversations", 3, "--turns", 3, "--concurrency", 2,
                       "--system-tokens", 9, "--input-tokens", "4:6", "--output-tokens", 5, "--warmup", 1,
                       "--json", out, "--html", page)  # fmt: skip
    assert ran.code == 0, ran.err
    report = json.loads(out.read_text())
    assert "3 conversations of 3 turns" in report["settings"]["prompts"]
    [one] = report["loads"][0]["servers"]
    assert one["requests"] == 9 and [row["requests"] for row in one["prefix"]["turns"]] == [3, 3, 3]
    assert one["prefix"]["turns"][2]["cached_share"] > 0.5 < one["prefix"]["cached_share"]
    assert "stood in the turn before" in ran.err and "<th>Turn</th>" in page.read_text()
    assert max(map(len, (line for line in ran.err.splitlines() if "written to" not in line))) <= 80


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--conversations", 2, "--rate", 1), "--conversations makes chat requests in a closed loop"),
        (("--conversations", 2, "--endpoint", "completions"), "and other endpoints"),
        (("--turns", 5), "go with --conversations"),
        (("--system-tokens", 5), "go with --conversations"),
    ],
)
def test_what_does_not_go_with_conversations(outrider: Outrider, flags: tuple, said: str) -> None:
    ran = outrider("bench", "serve", *flags)
    assert ran.code == 2 and said in " ".join(ran.err.split())


def test_lengths_are_words_where_there_is_no_tokenizer(outrider: Outrider, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    with serving(tokenize=False, models=False) as server:
        ran = outrider("bench", "serve", "--url", server.url, "--model", "m", *FEW, "--json", out)
    assert ran.code == 0, ran.err
    assert json.loads(out.read_text())["servers"][0]["lengths_by"] == "words"
    assert len(server.asked[-1].body["prompt"].split()) == 8


def test_bench_names_it_and_help_fits(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert "outrider bench serve" in outrider("bench", "--help").out
    ran = outrider("bench", "serve", "--help")
    assert ran.code == 0 and max(map(len, ran.out.splitlines())) <= 80 and len(ran.out.splitlines()) <= 50
    assert "outrider bench serve --help-all" in ran.out
    assert "--burstiness" in outrider("bench", "serve", "--help-all").out
