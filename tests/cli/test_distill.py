"""Every option of a recipe is a flag with its default; what cannot be is said before anything is loaded."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path

import pytest

from outrider.cli.distill import ANSWER, SCORE, TRAIN, distill
from outrider.distill.folder import Folder
from outrider.distill.open_shards import write_open
from outrider.distill.recipe import Recipe
from outrider.load.pairs import SHIPPED
from outrider.load.token_shards import Conversation
from tests.cli.conftest import Outrider


def test_every_option_is_a_flag_of_its_stage_with_its_default() -> None:
    typed = {name: p.default for name, p in inspect.signature(distill).parameters.items()}
    built: dict[str, object] = {}
    for group, stage in ((ANSWER, "answer"), (TRAIN, "train"), (SCORE, "score")):
        names = {one.name for one in fields(Recipe) if one.metadata["stage"] == stage} - {"target"}
        assert {flag.name for flag in group.flags} == names
        built |= group.build(typed)
    made = Recipe.of({**built, "prompts": ("p",)})
    assert made == Recipe(prompts=("p",))


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ([], "nothing to learn from: give --prompts FILE"),
        (["--prompts", "p", "--stage", "guess"], "'guess' is not answer, train, score"),
        (["--prompts", "p", "--share", "code"], "'code' is not TASK=SHARE, such as code=0.3"),
        (["--prompts", "p", "--share", "=0.5"], "'=0.5' is not TASK=SHARE"),
        (["--prompts", "p", "--share", "code=2"], "share of 'code' must be between 0 and 1"),
        (
            ["--prompts", "p", "--answer-tokens", "lots"],
            "'lots' is not a number of tokens; write 300000, 20M or 1.5G",
        ),
        (["--prompts", "p", "--temperatures", "0;1"], "'0;1' is not a list of numbers such as 0,0.7,1"),
        (["--prompts", "p", "--taps", "2,x"], "'2,x' is not a list of numbers such as 2,14,27"),
        (["--prompts", "p", "--kind", "head"], "unknown kind 'head'; known: eagle, lm"),
        (["--prompts", "p", "--los", "kl"], "did you mean --loss?"),
        (["--prompts", "p", "--stage", "train", "--html", "x"], "leave out --stage train"),
    ],
)
def test_what_cannot_be_is_refused(outrider: Outrider, tmp_path: Path, flags: list[str], what: str) -> None:
    ran = outrider("distill", "smollm2-135m", "--out", tmp_path / "out", *flags)
    assert ran.code == 2 and what in ran.err, ran.err
    assert not (tmp_path / "out").exists()


def test_a_target_and_files_that_are_not_there(outrider: Outrider, tiny_folder: Path, tmp_path: Path) -> None:
    ran = outrider("distill", "no-such-model", "--prompts", "p", "--out", tmp_path / "out")
    assert ran.code == 1 and "no-such-model" in ran.err and not (tmp_path / "out").exists()
    ran = outrider("distill", tiny_folder, "--prompts", tmp_path / "gone.jsonl", "--out", tmp_path / "out")
    assert ran.code == 2 and "gone.jsonl cannot be read" in ran.err
    (tmp_path / "wrong.jsonl").write_text('{"turns": ["fine"]}\n{"turn": "a"}\n')
    ran = outrider("distill", tiny_folder, "--prompts", tmp_path / "wrong.jsonl", "--out", tmp_path / "out")
    assert ran.code == 2 and 'wrong.jsonl, line 2: a row needs one of "turns"' in ran.err


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ((), "stopped. Nothing is finished yet: the same command begins again"),
        (("open",), "1 conversations with 1 tokens of answers. The same command goes on from there"),
        (
            ("open", "answers.json"),
            "all answers; no step of training was finished, so that training begins again.",
        ),
        (
            ("answers.json", "checkpoints/checkpoint-00000012.safetensors"),
            "all answers, and training up to step 12.",
        ),
        (("answers.json", "draft/train.json"), "the trained draft. The same"),
    ],
)
def test_ctrl_c_says_what_is_kept(
    outrider: Outrider,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    there: tuple[str, ...],
    said: str,
) -> None:
    def interrupted(*_: object) -> None:
        for name in there:
            if name == "open":
                row = Conversation.of([1, 2], [False, True], "chat", 0.0, "p")
                write_open(Folder(tmp_path).answers, 0, {0: [row]})
            else:
                (tmp_path / name).parent.mkdir(exist_ok=True)
                (tmp_path / name).touch()
        raise KeyboardInterrupt

    monkeypatch.setattr("outrider.distill.run.distill", interrupted)
    ran = outrider("distill", tiny_folder, "--made-up", 3, "--out", tmp_path)
    assert ran.code == 130 and said in ran.err


def test_the_page_has_the_score(
    outrider: Outrider, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.distill.run.distill", lambda *_: SHIPPED / "smollm2-135m-eagle")
    ran = outrider("distill", tiny_folder, "--made-up", 3, "--out", tmp_path, "--html", tmp_path / "d.html")
    assert ran.code == 0, ran.err
    assert "of draft tokens accepted" in (tmp_path / "d.html").read_text() and "written to" in ran.err
