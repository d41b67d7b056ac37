"""What passes cost outlives the process that measured it, where it still fits."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from outrider import LLM, Settings
from outrider.control.costs import EagerCosts
from outrider.draft.names import Part
from outrider.engine import kept_costs
from outrider.engine.kept_costs import KeptCosts
from outrider.types import StepRecord
from tests.full_disk import file_size_limit
from tests.targets import write_target
from tests.tiny import tiny_model

CURVE = {1: 0.01, 2: 0.011, 4: 0.012, 8: 0.03, 16: 0.05}
DRAFTS = (Part("lookup", "lookup"),)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(kept_costs.FOLDER, str(tmp_path / "costs"))
    return tmp_path / "costs"


def made(costs: EagerCosts | None = None, drafts: tuple[Part, ...] = DRAFTS, **settings) -> KeptCosts:
    model = tiny_model(weights=settings.get("weights", "stored"))
    return KeptCosts.of(model, Settings(**settings), drafts, costs or EagerCosts())


def learned(curve: dict[int, float]) -> EagerCosts:
    costs = EagerCosts()
    costs.curve, costs.per_draft, costs.per_level = dict(curve), {"lookup": 0.0003}, {"lookup": 0.0001}
    return costs


def step(rows: int, seconds: float) -> StepRecord:
    return StepRecord(rows, 1, 1, rows - 1, 0, 1, 0, 0, seconds, 0, seconds, [])


def test_it_is_taken_up_at_the_pace_of_now(folder: Path) -> None:
    made(learned(CURVE)).keep(always=True)
    again = made()
    assert again.recall(lambda rows: 2 * CURVE[rows])  # the machine has other load
    assert again.costs.curve == pytest.approx({rows: 2 * seconds for rows, seconds in CURVE.items()})
    assert again.costs.drafting({"lookup": 4}) == pytest.approx(2 * 0.0007)
    assert again.costs.step(6) == pytest.approx(2 * (CURVE[4] + CURVE[8]) / 2)


def test_each_format_of_weights_has_a_file_of_its_own(folder: Path) -> None:
    """What a model was loaded in counts, not what was asked for: a file's own format is one of many."""
    asked = (
        {},
        {"weights": "bfloat16"},
        {"weights": "int8"},
        {"weights": "int4"},
        {"draft_weights": "float32"},
    )
    assert len({made(**settings).file for settings in asked}) == 5
    assert made().file == made(weights="float32").file


def test_what_does_not_fit_is_left(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    made(learned(CURVE)).keep(always=True)
    with caplog.at_level(logging.DEBUG, "outrider"):
        for factor in (0.7, 1.4):
            again = made()
            assert not again.recall(lambda rows, by=factor: CURVE[rows] * (by if rows > 1 else 1))
            assert not again.costs.curve and not again.costs.per_level
    told = [(r.levelname, "step costs are measured anew" in r.message) for r in caplog.records]
    assert told == [("DEBUG", True)] * 2  # nothing a new user should meet first


def test_one_point_that_does_not_fit_is_enough(folder: Path) -> None:
    """Rows of two are the commonest drafts, and eight may fit by chance."""
    wrong = CURVE | {2: 1.7 * CURVE[1], 8: CURVE[8]}
    made(learned(wrong)).keep(always=True)
    assert not made().recall(lambda rows: (CURVE | {2: 1.1 * CURVE[1]})[rows])


def test_steps_refine_it(folder: Path) -> None:
    """Rows that were taken often enough are kept by how much longer they took than plain steps of the same time."""
    kept = made(learned(CURVE))
    for _ in range(kept_costs.STEPS - 1):
        kept.costs.observe(step(4, 3 * 1.5 * CURVE[4]), False)
    kept.costs.observe(step(3, 9.0), False)  # once: chance
    assert kept.costs.known_curve() == CURVE  # at what pace? there was no plain step
    for _ in range(kept_costs.STEPS):
        kept.costs.observe(step(1, 3 * CURVE[1]), False)  # the machine had other load
    kept.keep()
    again = made()
    assert again.recall(lambda rows: 2 * CURVE[rows])
    assert again.costs.curve[4] == pytest.approx(2 * 1.5 * CURVE[4])
    assert again.costs.curve[8] == pytest.approx(2 * CURVE[8])
    assert set(again.costs.curve) == set(CURVE)


def test_it_is_written_now_and_then(folder: Path) -> None:
    kept = made(learned(CURVE))
    kept.keep()
    assert not folder.exists()  # nothing is new
    for _ in range(kept_costs.STEPS):
        kept.costs.observe(step(1, 0.01), False)
    kept.keep()
    (file,) = folder.iterdir()
    file.unlink()
    kept.keep()
    assert not list(folder.iterdir())


def test_each_has_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By threads, draft, processor and version; a file that was renamed says what it is for."""
    made(learned(CURVE)).keep(always=True)
    other = [made(threads=7), made(drafts=(Part("model", "some/draft"),))]
    for name, value in (("processor", lambda: "another"), ("package_version", lambda _: "outrider 99")):
        with monkeypatch.context() as patch:
            patch.setattr(kept_costs, name, value)
            other.append(made())
    for one in other:
        assert not one.recall(lambda rows: CURVE[rows])
    (file,) = folder.iterdir()
    assert other[0].file is not None
    file.rename(other[0].file)
    assert not other[0].recall(lambda rows: CURVE[rows])


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: "not json",
        lambda kept: "[]",
        lambda kept: json.dumps({"about": kept["about"]}),
        lambda kept: json.dumps({**kept, "curve": {"2": 1.0}}),  # no pass of one row
        lambda kept: json.dumps({**kept, "curve": {"1": -1.0}}),
        lambda kept: json.dumps({**kept, "curve": {"1": float("nan")}}),
        lambda kept: json.dumps({**kept, "curve": {"1": 1.0, "99999999": 1.0}}),
        lambda kept: json.dumps({**kept, "curve": [1, 2]}),
        lambda kept: json.dumps({**kept, "per_level": {"lm": "soon"}}),
        lambda kept: json.dumps(kept)[:-9],  # cut off
        lambda kept: "[" * 100_000,
        lambda kept: json.dumps(kept).replace("0.01,", "1" * 400 + ","),  # no float is as large
        lambda kept: json.dumps({**kept, "curve": {"1": 1e300, "2": 1e-300}}),
        lambda kept: json.dumps({**kept, "curve": {"1": 5e-324}}),
        lambda kept: json.dumps({**kept, "curve": CURVE | {16: 1e9}}),
        lambda kept: json.dumps({**kept, "per_level": {"lookup": 1e9}}),
        lambda kept: json.dumps({**kept, "per_draft": {"lookup": -1}}),
        lambda kept: json.dumps({**kept, "padding": "x" * kept_costs.MAX_BYTES}),
        lambda kept: "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
    ],
)
def test_a_damaged_file_is_as_none(folder: Path, damage, caplog: pytest.LogCaptureFixture) -> None:
    made(learned(CURVE)).keep(always=True)
    (file,) = folder.iterdir()
    file.write_text(damage(json.loads(file.read_text())), encoding="latin-1")
    replaced_with_one_line(file, caplog)


def replaced_with_one_line(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is there is ignored, the log names it once, and a sound file takes its place."""
    again = made(learned(CURVE))
    with caplog.at_level(logging.INFO):
        assert not again.recall(lambda rows: CURVE[rows])
    [line] = caplog.records
    assert line.getMessage().startswith(f"costs kept in {file} are ignored: ")
    again.keep(always=True)
    assert made().recall(lambda rows: CURVE[rows])
    assert list(file.parent.iterdir()) == [file]


def test_a_pipe_in_its_place_is_not_waited_for(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = made().file
    assert file is not None
    folder.mkdir()
    os.mkfifo(file)
    replaced_with_one_line(file, caplog)


def test_a_link_to_an_endless_file_is_replaced(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = made().file
    assert file is not None
    folder.mkdir()
    file.symlink_to("/dev/zero")
    replaced_with_one_line(file, caplog)
    assert not file.is_symlink()


def test_what_another_user_wrote_is_ignored(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(learned(CURVE)).keep(always=True)
    (file,) = folder.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(kept_costs.os, "geteuid", lambda: os.stat(file).st_uid + 1)
        patch.setattr(kept_costs, "ROOT", -1)  # the tests may run as root
        with caplog.at_level(logging.INFO):
            assert not made().recall(lambda rows: CURVE[rows])
    assert "another user" in caplog.text
    assert made().recall(lambda rows: CURVE[rows])


def test_a_folder_in_its_place_stays_and_is_named_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = made(learned(CURVE))
    assert kept.file is not None
    kept.file.mkdir(parents=True)
    (kept.file / "a user's file").write_text("")
    with caplog.at_level(logging.INFO):
        assert not kept.recall(lambda rows: CURVE[rows])
        for _ in range(3):
            kept.keep(always=True)
    ignored, unwritten = [line.getMessage() for line in caplog.records]
    assert "are ignored: " in ignored and unwritten.startswith("costs are not kept: ")
    assert list(folder.iterdir()) == [kept.file] and list(kept.file.iterdir())


def test_a_full_disk_leaves_nothing_and_is_named_once(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(learned(CURVE)).keep(always=True)
    (file,) = folder.iterdir()
    kept = made(learned({1: 5.0}))
    with caplog.at_level(logging.INFO), file_size_limit(64):
        for _ in range(3):
            kept.keep(always=True)
    [line] = caplog.records
    assert line.getMessage().startswith("costs are not kept: ")
    assert list(folder.iterdir()) == [file] and made().recall(lambda rows: CURVE[rows])
    kept.keep(always=True)  # there is room again
    assert made().recall(lambda rows: 5.0)


def test_where_nothing_can_be_written_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(kept_costs.FOLDER, str(tmp_path / "file" / "costs"))
    made(learned(CURVE)).keep(always=True)
    monkeypatch.setenv(kept_costs.FOLDER, "")
    made(learned(CURVE)).keep(always=True)
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_an_engine_keeps_and_recalls(folder: Path, tmp_path: Path) -> None:
    """What `prepare` measured and what steps taught is there at the next start, before anything is prepared."""
    target = write_target(tmp_path / "model")
    first = LLM(target, draft="lookup")
    try:
        first.prepare(2)
        (file,) = folder.iterdir()
        curve = json.loads(file.read_text())["curve"]
        assert {"1", "2", "4", "8"} <= curve.keys()
        file.unlink()
        first.generate([[5, 6, 7]], max_tokens=2 * kept_costs.STEPS, ignore_eos=True, speculation=False)
        first.driver.run(lambda: None)  # it is written once the answer was given
        assert file.exists()
    finally:
        first.driver.close()
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "curve": {"1": 1.0}})
    )  # it fits whatever is so
    second = LLM(target, draft="lookup")
    try:
        assert set(second.engine.planner.costs.eager.curve) == {1}
        second.prepare(2)
        assert {1, 2, 4, 8} <= set(second.engine.planner.costs.eager.curve)
    finally:
        second.driver.close()
    third = LLM(target, draft="none")
    try:
        assert third.engine.kept_costs is None
    finally:
        third.driver.close()
