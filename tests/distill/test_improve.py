"""The whole round on a real server over a tiny model: traffic is kept, the draft in use learns from it, and the better
one is swapped in; one that is not better is not.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from outrider import LLM, Settings
from outrider.cli.main import make_app
from outrider.distill import report as reports
from outrider.distill.recipe import Recipe
from outrider.distill.report import Silent
from outrider.distill.run import distill
from outrider.distill.shadow import held_conversations, traffic_folders
from outrider.errors import InvalidRequest, OutriderError
from tests.distill.learnable import ANSWER, OPTIONS, PROMPT, answer, write_learnable
from tests.distill.test_train import Stops
from tests.serve.conftest import Served, start_server, wait_for
from tests.serve.test_draft import KEYS, headers, write_keys
from tests.tiny import prompt_of

PROMPTS, TOGETHER = 420, 30
HOW = ("--context", "64", "--batch-tokens", "512", "--unroll", "2", "--learning-rate", "1e-2",
       "--score-limit", "1", "--score-tokens", "8", "--cache-bytes", "4M", "--threads", "1",
       "--train-tokens", "12000")  # fmt: skip


def write_live(place: Path) -> None:
    """A head that has hardly learned anything."""
    write_learnable(place / "target")
    with LLM(place / "target", draft="none", **OPTIONS) as llm:
        answer(llm, place / "few", 12, 5000)
    recipe = Recipe(
        target=str(place / "target"), shards=(str(place / "few"),), context=64, batch_tokens=64, train_tokens=64,
        unroll=2, vocabulary=200,
    )  # fmt: skip
    settings = Settings(device="cpu", threads=1, max_sequences=8, cache_bytes=1 << 22)
    draft = distill(recipe, place / "first", settings, Silent(), ["train"])
    shutil.copytree(draft, place / "drafts" / "live")


def serve_traffic(server: Served, folder: Path) -> None:
    for first in range(0, PROMPTS, TOGETHER):
        prompts = [prompt_of(PROMPT, 9000 + first + i) for i in range(TOGETHER)]
        body = {
            "prompt": prompts,
            "max_tokens": ANSWER,
            "temperature": first // TOGETHER % 2,
            "ignore_eos": True,
        }
        assert server.post("/v1/completions", body, headers=headers("marked")).status_code == 200
    wait_for(lambda: len(held(folder)) >= 4)


def held(folder: Path) -> list[object]:
    try:
        return list(held_conversations(traffic_folders(folder)))
    except InvalidRequest:
        return []


def test_a_round_improves_the_draft_of_a_running_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("target", "few", "drafts"):
        (tmp_path / name).mkdir()
    write_live(tmp_path)
    write_keys(tmp_path / "keys.toml")
    kept, drafts, out = tmp_path / "traffic", tmp_path / "drafts", tmp_path / "drafts" / "round-1"
    server = start_server(
        tmp_path / "target", "--draft", str(drafts / "live"), "--draft-folder", str(drafts), "--key-file",
        str(tmp_path / "keys.toml"), "--keep-traffic", str(kept), "--keep-traffic-bytes", "1M",
        "--cache-bytes", "8M", "--device", "cpu",
    )  # fmt: skip

    def run(*words: str) -> Result:
        env = {"OUTRIDER_API_KEY": KEYS["admin"], "OUTRIDER_URL": server.url}
        flags = ["--target", str(tmp_path / "target"), "--traffic", str(kept)]
        return CliRunner().invoke(make_app(), ["draft", *words, *flags], env=env)

    def in_use() -> Path:
        return Path(server.get("/v1/draft", headers=headers("admin")).json()["data"][0]["path"])

    try:
        serve_traffic(server, kept)
        planned = run("improve", "--out", str(out), *HOW, "--dry-run", "--json")
        assert planned.exit_code == 0 and "nothing was written" in planned.output, planned.output
        assert json.loads(planned.stdout)["compared"] >= 4 and not out.exists()

        monkeypatch.setattr(reports, "default_report", lambda: Stops(8))
        stopped = run("improve", "--out", str(out), *HOW)
        assert isinstance(stopped.exception, SystemExit | KeyboardInterrupt) and stopped.exit_code != 0
        assert (
            in_use().name == "live" and (out / "traffic").is_dir() and not (out / "draft/train.json").exists()
        )
        monkeypatch.setattr(reports, "default_report", Silent)
        done = run("improve", "--out", str(out), *HOW)
        assert done.exit_code == 0, (done.output, done.exception)
        assert "a difference of +" in done.output and in_use() == out / "draft"
        assert (out / "draft" / "card.json").exists() and not (out / "traffic").exists()
        gated = json.loads((out / "gate.json").read_text())
        assert gated["made_for"]["running"] == str(drafts / "live") and gated["comparison"]["gain"] > 0
        assert "in use already" in run("improve", "--out", str(out), *HOW).output

        worse = run("promote", str(drafts / "live"))
        assert worse.exit_code == 1 and "the draft in use stays" in worse.output and in_use() == out / "draft"
        same = run("improve", "--out", str(drafts / "round-2"), *HOW[:-2], "--train-tokens", "1",
                   "--learning-rate", "1e-8")  # fmt: skip
        assert same.exit_code == 1 and in_use() == out / "draft", same.output
        other = run("improve", "--out", str(drafts / "round-2"), *HOW)
        assert isinstance(other.exception, OutriderError) and "was begun with" in str(other.exception)

        assert server.post("/v1/draft/rollback", {}, headers=headers("admin")).status_code == 200
        better = run("promote", str(out / "draft"))
        assert better.exit_code == 0 and in_use() == out / "draft", better.output
    finally:
        server.stop()
