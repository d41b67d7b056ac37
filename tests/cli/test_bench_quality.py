"""`outrider bench --what quality`: a format against the unrounded model, on the user's prompts."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from outrider.bench.quality import Reference, measure_quality
from outrider.errors import InvalidRequest
from tests.cli.conftest import SMALL, Outrider


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    file = tmp_path / "asked.jsonl"
    rows = [{"task": "chat", "turns": [f"hello {i}" * (1 + 10 * i)]} for i in range(2)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_formats_are_compared_with_the_unrounded_model(
    outrider: Outrider, tiny_folder: Path, asked: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    ran = outrider(
        "bench", tiny_folder, "--what", "quality", "--formats", "float32,bfloat16", "--prompts", asked,
        "--json", out, *SMALL,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    report = json.loads(out.read_text())
    itself, rounded = report["formats"]["float32"], report["formats"]["bfloat16"]
    assert (itself["top1"], itself["answers_equal"], itself["answers"]) == (1.0, 2, 2)
    assert itself["kl_mean"] < 1e-6 and itself["tokens_before_difference"] == 6
    assert itself["perplexity"] == report["reference_perplexity"]
    assert 1e-7 < rounded["kl_mean"] <= rounded["kl_p99"] < 0.1
    assert rounded["perplexity"] != itself["perplexity"]
    assert "bfloat16" in ran.err and "(reference)" in ran.err


def test_perplexity_is_that_of_the_prompts_log_probabilities(
    outrider: Outrider, tiny_folder: Path, asked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.bench.quality.CHUNK", 16)  # texts have several
    out = tmp_path / "out.json"
    outrider(
        "bench",
        tiny_folder,
        "--what",
        "quality",
        "--formats",
        "float32",
        "--prompts",
        asked,
        "--json",
        out,
        *SMALL,
    )
    with LLM(tiny_folder, draft="none", kernels="torch", device="cpu", max_sequences=4) as llm:
        texts = [json.loads(line)["turns"][0] for line in asked.read_text().splitlines()]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        scores = [one.logprob for text in texts for one in llm.chat(text, params)[0].prompt_logprobs[1:]]
    expected = math.exp(-sum(scores) / len(scores))
    assert json.loads(out.read_text())["reference_perplexity"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--what", "quality", "--formats", "int9"), "unknown format 'int9'"),
        (("--what", "quality", "--html", "x.html"), "leave out --what quality"),
        (("--what", "quality", "--methods", "auto"), "leave out --methods"),
        (("--what", "quality", "--temperatures", "0.7"), "leave out --temperatures"),
        (("--what", "quality", "--as-if", "1b"), "leave out --peer and --as-if"),
        (("--formats", "float32"), "go with --what quality"),
        (("--against", "other"), "go with --what quality"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    outrider: Outrider, tiny_folder: Path, options: tuple[str, ...], said: str
) -> None:
    ran = outrider("bench", tiny_folder, *options, *SMALL)
    assert ran.code == 2 and said in ran.err.replace("\n", " ")


def test_models_of_other_vocabularies_are_refused(tiny_folder: Path) -> None:
    with LLM(tiny_folder, draft="none", kernels="torch", device="cpu", max_sequences=4) as llm:
        other = Reference([[1, 2]], [[3]], 1.0, llm.model.config.vocab + 1, io.BytesIO())
        with pytest.raises(InvalidRequest, match="only versions of one model can be compared"):
            measure_quality(llm, other, lambda *_: None)
