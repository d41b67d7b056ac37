"""Engine settings: complete and valid once built; a bad value is an error that names it."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

import pytest

from outrider import Settings
from outrider.control.guards import Guards
from outrider.engine.build import guards_of
from outrider.errors import InvalidRequest
from outrider.sampling_params import SamplingParams
from outrider.settings import family_seconds, free_memory, others_seconds


def test_users_have_few_settings_to_choose_from() -> None:
    assert len(fields(Settings)) <= 20


@pytest.mark.parametrize("name", ["tree_max_batch", "prefill_stretch", "draft_patience"])
def test_a_name_that_is_gone_is_answered_as_any_unknown_one(name: str) -> None:
    for build in (lambda: Settings(**{name: 1}), lambda: Settings.of({name: 1})):
        with pytest.raises(InvalidRequest, match=f"{name}'; (did you mean|known)") as refused:
            build()
        assert refused.value.param == name


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("cache_bytes", "1G", "a whole number"),
        ("threads", 2.5, "a whole number"),
        ("context", True, "a whole number"),
        ("context", None, "a whole number"),
        ("prefill_slowdown", "soon", "a number"),
        ("prefix_reuse", 1, "true or false"),
    ],
)
def test_values_of_another_kind_are_named(name: str, value: object, words: str) -> None:
    with pytest.raises(
        InvalidRequest, match=f"{name} must be {words}, not {type(value).__name__}"
    ) as refused:
        Settings(**{name: value})  # type: ignore[arg-type]
    assert refused.value.param == name
    assert Settings(draft_max_batch=None, prefill_slowdown=1).prefill_slowdown == 1


@pytest.mark.parametrize("name", ["threads", "context", "step_rows"])
def test_numbers_below_nothing_are_named(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} must be at least 0, got -1") as refused:
        Settings(**{name: -1})  # type: ignore[arg-type]
    assert refused.value.param == name
    assert getattr(Settings(**{name: 0}), name) >= 0


@pytest.mark.parametrize("whose", ["weights", "draft_weights"])
def test_weights_that_are_misspelt_are_named(whose: str) -> None:
    with pytest.raises(InvalidRequest, match=f"unknown {whose} 'int9'; did you mean 'int8'") as refused:
        Settings(**{whose: "int9"})
    assert refused.value.param == whose


def test_a_container_s_memory_limit_counts(tmp_path: Path) -> None:
    for name, text in {
        "proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    4194304 kB\n",
        "sys/fs/cgroup/memory.max": "max\n",
        "sys/fs/cgroup/memory.current": "1000\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_memory(tmp_path) == 4 << 30
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("1001000\n")
    assert free_memory(tmp_path) == 1_000_000
    assert free_memory(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("name", "low", "bad"),
    [
        ("draft_max_batch", 0, -1),
        ("draft_max_depth", 1, 64),
        ("draft_max_temperature", 0, float("nan")),
        ("objective", "latency", "speed"),
    ],
)
def test_bounds_of_the_planner(name: str, low: object, bad: object) -> None:
    guards = guards_of(Settings(**{name: low}))
    assert getattr(guards, name.removeprefix("draft_")) == low and guards != guards_of(Settings())
    with pytest.raises(InvalidRequest, match=name) as refused:
        Settings(**{name: bad})
    assert refused.value.param == name


def test_usual_bounds_are_the_guards_own() -> None:
    assert guards_of(Settings()) == Guards()


def test_a_stop_string_may_be_a_line_break() -> None:
    assert SamplingParams(stop=("\n",)).stop == ("\n",)
    with pytest.raises(InvalidRequest, match="empty string"):
        SamplingParams(stop=("",))


def test_what_other_programs_used_is_all_but_what_a_family_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tick = os.sysconf("SC_CLK_TCK")

    def process(number: int, seconds: list[int], children: str) -> None:
        """As Linux shows one: user, system, and the same two of children that ended."""
        folder = tmp_path / "proc" / str(number) / "task" / str(number)
        folder.mkdir(parents=True)
        used = " ".join(str(tick * one) for one in seconds)
        (folder.parents[1] / "stat").write_text(f"{number} (a) name) S {'0 ' * 10}{used} 20 0")
        (folder / "children").write_text(children)

    process(5, [3, 1, 0, 2], "6 7 ")  # 7 has ended meanwhile
    process(6, [4, 0, 0, 0], "")
    assert family_seconds(5, tmp_path) == 10 and family_seconds(7, tmp_path) == 0
    # user, nice, system, idle, waiting for disks, interrupts, interrupts, stolen
    (tmp_path / "proc" / "stat").write_text(
        f"cpu  {30 * tick} {2 * tick} {5 * tick} {900 * tick} {70 * tick} 0 {tick} {2 * tick} 0 0\ncpu0 1 2 3\n"
    )
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert others_seconds(10, tmp_path) == 30
    assert others_seconds(10, tmp_path / "none") is None
    monkeypatch.setattr(os, "cpu_count", lambda: 10**6)
    assert others_seconds(10, tmp_path) is None  # most of the machine is not ours
