"""Bad input: each a clear error, at the command line and in Python, and nothing lost by it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.cli import main
from outrider.errors import InvalidRequest, ModelNotFound, OutriderError, TemplateFailed

from .conftest import CONTEXT, Outrider

LONG = "x" * (CONTEXT + 10)

AT_THE_COMMAND_LINE = [
    (["hi", "--temprature", "1"], 2, "no such option: --temprature", "--temperature"),
    (["hi", "--temperature", "-0.1"], 2, "temperature must be in [0, 100]", ""),
    (["hi", "--temperature", "nan"], 2, "temperature must be in [0, 100], got nan", ""),
    (["hi", "--temperature", "hot"], 2, "--temperature", "invalid value"),
    (["hi", "--top-p", "0"], 2, "top_p must be in (0, 1]", ""),
    (["hi", "--top-p", "1.5"], 2, "top_p must be in (0, 1]", ""),
    (["hi", "--stop", ""], 2, "stop must not hold an empty string", ""),
    (["hi", "--stop-token-id", "end"], 2, "--stop-token-id", "invalid value"),
    (["hi", "--stop-token-id", "99999"], 2, "stop_token_ids: token id 99999 is outside the vocabulary", ""),
    (["hi", "--logit-bias", "99999=1"], 2, "logit_bias: token id 99999 is outside the vocabulary", ""),
    (["hi", "--logit-bias", "5"], 2, "--logit-bias", "TOKEN_ID=NUMBER"),
    (["hi", "--max-tokens", str(CONTEXT)], 2, "max_tokens 128 and a prompt of", "ask for at most"),
    (["hi", "--max-tokens", "0"], 2, "max_tokens must be at least 1", ""),
    ([LONG], 2, "maximum context length is 128 tokens", ""),
    ([""], 2, "the prompt is empty", ""),
    ([], 2, "the prompt is empty", ""),
    (["raise"], 2, "the chat template failed: not this word", ""),
    (["hi", "--prompt", "ho"], 2, "give one of PROMPT and --prompt", ""),
    (["hi", "--raw", "--system", "S"], 2, "a system prompt needs the chat template", ""),
    (["hi", "--device", "tpu"], 2, "device", "tpu"),
    (["hi", "--draft-weights", "float32"], 2, "draft_weights is for a model that drafts", "there is none"),
    (["hi", "--weights", "int"], 2, "unknown weights 'int'; did you mean 'int", ""),
    (
        ["hi", "--weights", "fp8", "--device", "cpu"],
        2,
        "cpu stores weights as stored, float32, bfloat16, int8, int4, not as fp8",
        "",
    ),
    (["hi", "--draft-weights", "int"], 2, "unknown draft_weights 'int'; did you mean 'int", ""),
    (
        ["hi", "--draft-weights", "fp8", "--device", "cpu"],
        2,
        "cpu stores draft_weights as stored, float32, bfloat16",
        "fp8",
    ),
    (
        ["hi", "--prefill-stretch", "2"],
        2,
        "no such option: --prefill-stretch",
        "",
    ),
    (["hi", "--cache-bytes", "lots"], 2, "--cache-bytes", "is not a size"),
    (["hi", "--draft", "lokup"], 1, "no drafter 'lokup'", "did you mean 'lookup'?"),
    (["hi", "--speculate", "maybe"], 2, "--speculate", "auto, off, a number"),
    (["hi", "--speculate", "mode=loose"], 2, "unknown mode 'loose'", ""),
    (["--prompts", "/no/such.jsonl"], 2, "/no/such.jsonl cannot be read", ""),
]


@pytest.mark.parametrize(("args", "code", "says", "also"), AT_THE_COMMAND_LINE)
def test_at_the_command_line(
    outrider: Outrider, tiny_folder: Path, args: list[str], code: int, says: str, also: str
) -> None:
    ran = outrider("generate", tiny_folder, *args)
    assert (ran.code, ran.out) == (code, "")
    assert ran.err.startswith("error: ") and "Traceback" not in ran.err
    assert says in ran.err and also in ran.err


def test_an_unknown_model_suggests(outrider: Outrider, empty_cache: Path) -> None:
    ran = outrider("generate", "smollm2-135n", "hi")
    assert ran.code == 1 and "did you mean 'smollm2-135m'?" in ran.err and "Traceback" not in ran.err


def test_an_unknown_command_suggests(outrider: Outrider) -> None:
    ran = outrider("generat")
    assert ran.code == 2 and "'generate'" in ran.err


def test_no_prompt_on_a_terminal(
    outrider: Outrider, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.cli.generate.sys", Terminal())
    ran = outrider("generate", tiny_folder)
    assert ran.code == 2 and "outrider generate MODEL PROMPT" in ran.err


class Terminal:
    class stdin:  # noqa: N801 - stands in for sys.stdin
        @staticmethod
        def isatty() -> bool:
            return True


def test_a_bug_is_told_without_a_traceback(
    outrider: Outrider, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a bug\nwith details")

    monkeypatch.setattr("outrider.cli.generate.open_llm", broken)
    ran = outrider("generate", tiny_folder, "hi")
    assert (ran.code, ran.err) == (1, "error: RuntimeError: a bug (OUTRIDER_DEBUG=1 shows where)\n")
    monkeypatch.setenv("OUTRIDER_DEBUG", "1")
    assert "Traceback" in outrider("generate", tiny_folder, "hi").err


@pytest.mark.parametrize("code", ["def make():\n    return 1 / 0\n", "1 / 0\n"])
def test_where_a_drafter_failed_is_shown_when_asked(
    outrider: Outrider, tiny_folder: Path, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fails_here.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    ask = ("generate", tiny_folder, "hi", "--draft", "fails_here:make", "--cache-bytes", "1M")
    ran = outrider(*ask)
    assert ran.code == 1 and "Traceback" not in ran.err
    assert "ZeroDivisionError: division by zero (OUTRIDER_DEBUG=1 shows where)" in ran.err
    monkeypatch.setenv("OUTRIDER_DEBUG", "1")
    ran = outrider(*ask)
    assert "Traceback" in ran.err and "fails_here.py" in ran.err and "\nerror: " in ran.err
    monkeypatch.delitem(sys.modules, "fails_here", raising=False)


def test_ctrl_c_is_130(outrider: Outrider, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("outrider.cli.generate.open_llm", interrupted)
    ran = outrider("generate", tiny_folder, "hi")
    assert (ran.code, ran.out, ran.err) == (main.INTERRUPTED, "", "")


# ------------------------------------------------------------------------------------------------ in Python


@pytest.fixture(scope="module")
def tiny(tiny_folder: Path) -> Iterator[LLM]:
    with LLM(tiny_folder) as llm:
        yield llm


GOOD = SamplingParams(temperature=0.8, seed=3, max_tokens=6)

IN_PYTHON: list[tuple[str, Callable[[LLM], Any], str, str | None]] = [
    (
        "unknown option",
        lambda llm: llm.generate("hi", temprature=1),
        "did you mean 'temperature'",
        "temprature",
    ),
    ("long prompt", lambda llm: llm.generate(LONG), "maximum context length", "prompt"),
    ("max_tokens", lambda llm: llm.generate("hi", max_tokens=CONTEXT), "ask for at most", "max_tokens"),
    ("empty prompt", lambda llm: llm.generate(""), "the prompt is empty", "prompt"),
    ("no messages", lambda llm: llm.chat([]), "messages", "messages"),
    ("stop type", lambda llm: llm.generate("hi", stop=5), "stop must be a string or a list", "stop"),
    ("stop type inside", lambda llm: llm.generate("hi", stop=["a", 5]), "stop must be a string", "stop"),
    (
        "temperature below 0",
        lambda llm: llm.generate("hi", temperature=-1),
        "temperature must be",
        "temperature",
    ),
    ("temperature NaN", lambda llm: llm.generate("hi", temperature=math.nan), "got nan", "temperature"),
    (
        "temperature type",
        lambda llm: llm.generate("hi", temperature="hot"),
        "must be a number",
        "temperature",
    ),
    ("top_p 0", lambda llm: llm.generate("hi", top_p=0), r"top_p must be in \(0, 1\]", "top_p"),
    ("top_p above 1", lambda llm: llm.generate("hi", top_p=1.01), r"top_p must be in \(0, 1\]", "top_p"),
    ("token id", lambda llm: llm.generate([1, 99999]), "99999 is outside the vocabulary", "prompt"),
    ("negative token id", lambda llm: llm.generate([1, -1]), "-1 is outside the vocabulary", "prompt"),
    ("token type", lambda llm: llm.generate([[1, "a"]]), "a text or a list of token ids", "prompts"),
    (
        "bias id",
        lambda llm: llm.generate("hi", logit_bias={99999: 1}),
        "outside the vocabulary",
        "logit_bias",
    ),
    ("params twice", lambda llm: llm.generate("hi", GOOD, seed=4), "not both", "params"),
    ("params count", lambda llm: llm.generate(["a", "b"], [GOOD]), "2 prompts but 1", "params"),
]


@pytest.mark.parametrize(
    ("call", "says", "param"), [case[1:] for case in IN_PYTHON], ids=[c[0] for c in IN_PYTHON]
)
def test_in_python(tiny: LLM, call: Callable[[LLM], Any], says: str, param: str | None) -> None:
    before = tiny.generate("hello", GOOD)[0].token_ids
    with pytest.raises(InvalidRequest, match=says) as told:
        call(tiny)
    assert told.value.param == param
    nothing_lost(tiny, before)


def test_a_template_that_raises(tiny: LLM) -> None:
    before = tiny.generate("hello", GOOD)[0].token_ids
    with pytest.raises(TemplateFailed, match="not this word"):
        tiny.chat([{"role": "user", "content": "raise"}])
    nothing_lost(tiny, before)


def test_one_bad_prompt_among_good_ones(tiny: LLM) -> None:
    """The good ones had been taken in already: they are aborted, not left running."""
    before = tiny.generate("hello", GOOD)[0].token_ids
    with pytest.raises(InvalidRequest, match="maximum context length"):
        tiny.generate(["hello", "hi", LONG], GOOD)
    nothing_lost(tiny, before)


def test_an_unknown_model_in_python(empty_cache: Path) -> None:
    with pytest.raises(ModelNotFound, match="did you mean 'smollm2-135m'"):
        LLM("smollm2-135n")


def test_an_unknown_setting_in_python(tiny_folder: Path) -> None:
    with pytest.raises(OutriderError, match="did you mean 'threads'"):
        LLM(tiny_folder, thread=2)


def nothing_lost(llm: LLM, expected: list[int]) -> None:
    """The same request gives the same answer, and every slot of the cache is accounted for."""
    assert llm.generate("hello", GOOD)[0].token_ids == expected
    assert llm.engine.idle
    llm.engine.table.check()
