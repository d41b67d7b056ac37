"""The load generator on our own server: its figures are those that the server counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.cli.main import run
from tests.serve.conftest import Served

REQUESTS, TOKENS, WARMUP = 6, 12, 2


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_what_clients_count_is_what_the_server_counts(served: Served, tmp_path: Path, endpoint: str) -> None:
    names = ("generation_tokens_total", "prompt_tokens_total")
    before = [served.metric(name) for name in names]
    out = tmp_path / "out.json"
    flags = ["--requests", REQUESTS, "--warmup", WARMUP, "--output-tokens", TOKENS, "--input-tokens", 64]
    with pytest.raises(SystemExit) as left:
        run([str(word) for word in ("bench", "serve", "--url", served.url, "--concurrency", 3, "--endpoint", endpoint,
                                    "--ignore-eos", "--json", out, *flags)])  # fmt: skip
    assert not left.value.code
    served.wait_idle()
    written, read = (served.metric(name) - count for name, count in zip(names, before, strict=True))
    report = json.loads(out.read_text())
    [found] = report["loads"][0]["servers"]
    asked = REQUESTS + WARMUP + 1  # the look at the server
    assert (
        found["failed"] == 0
        and found["output_tokens"] == REQUESTS * TOKENS
        and found["tokens_counted_by"] == "usage"
    )
    assert written == asked * TOKENS
    lengths = [row["input_tokens"] for row in found["raw"]["requests"]]
    beyond = (
        0 if endpoint == "completions" else len("[user][assistant]")
    )  # letters of the tiny model's template
    assert all(60 <= length - beyond <= 66 for length in lengths) and read >= sum(lengths)
    assert report["servers"][0]["lengths_by"] == "tokens" and report["servers"][0]["version"]
