"""`outrider deploy`: what it reads from its file, and what it says before anything is started."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from outrider.cli.deploy import app, plan
from outrider.errors import InvalidRequest
from outrider.serve.deploy_settings import DeploySettings
from outrider.serve.keys import ANYONE, Key
from outrider.serve.replica_route import merged_metrics, prefix_of, ranking

from .conftest import Outrider

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_error_names_it(outrider: Outrider) -> None:
    ran = outrider("deploy", ROOT / "deploy/ray/models.toml")
    assert ran.code == 1 and "outrider deploy needs ray, which is not installed; " in ran.err
    assert "ray" in ran.err.split("; ")[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[models.a]\nmin_replica = 2", "unknown key 'min_replica'; did you mean 'min_replicas'?"),
        (
            "[models.a]\nmin_replicas = 3\nmax_replicas = 2",
            "max_replicas (2) must be at least min_replicas (3)",
        ),
        ("min_replicas = 0", "min_replicas must be at least 1"),
        ('[models.a]\nserved_name = "b"\n[models.b]', "two models are called 'b'"),
        ('batch_folder = "kept"\n[models.a]', "batch_folder is for outrider serve: replicas cannot share it"),
        ('[models.a]\nkv_events = "tcp://127.0.0.1:5557"', "kv_events is for outrider serve"),
    ],
)
def test_a_wrong_file_is_refused(outrider: Outrider, tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "models.toml"
    file.write_text(text)
    ran = outrider("deploy", file)
    assert ran.code == 2 and words in " ".join(ran.err.split())


def test_a_missing_model_is_known_before_ray_is_started(outrider: Outrider, tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text('[models.a]\nmodel = "/no/such.gguf"')
    ran = outrider("deploy", file)
    assert ran.code == 1 and "a: there is no file or folder '/no/such.gguf'" in ran.err


def test_each_model_has_its_own_replicas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(
        'min_replicas = 2\nmax_replicas = 2\n[models.a]\n[models.b]\nmodel = "c"\nmax_replicas = 4'
    )
    made = []
    monkeypatch.setattr(
        "outrider.cli.deploy._ray_app", lambda: type("Stub", (), {"application": made.append})
    )
    app({"file": str(file)})
    [found] = made
    assert [(spec.name, spec.source) for spec in found.table] == [("a", "a"), ("b", "c")]
    assert [how.max_replicas for _, how in found.models] == [2, 4]
    assert [how.min_replicas for _, how in found.models] == [2, 2]
    with pytest.raises(InvalidRequest, match="file=FILE"):
        app({"path": str(file)})
    assert plan is not None and DeploySettings().max_replicas == 1


def test_a_conversation_keeps_its_prefix_and_others_have_another() -> None:
    first = [{"role": "system", "content": "s"}, {"role": "user", "content": "one"}]
    later = [*first, {"role": "assistant", "content": "a"}, {"role": "user", "content": "two"}]
    prefix = prefix_of(ANYONE, {"messages": first})
    assert prefix_of(ANYONE, {"messages": later}) == prefix
    others = [
        prefix_of(Key("k", b"digest"), {"messages": first}),
        prefix_of(ANYONE, {"messages": first, "cache_salt": "x"}),
        prefix_of(ANYONE, {"messages": [first[0], {"role": "user", "content": "other"}]}),
        prefix_of(ANYONE, {"prompt": "one"}),
    ]
    assert len({prefix, *others}) == 5


def test_a_replica_that_goes_moves_only_its_own_conversations() -> None:
    all_three = {name: name for name in "abc"}
    without = {name: name for name in "ab"}
    for number in range(50):
        [best, *more] = ranking(f"{number}", 0, all_three)
        assert ranking(f"{number}", 1, all_three) == [*more, best]
        if best != "c":
            assert ranking(f"{number}", 0, without)[0] == best
    assert {ranking(f"{number}", 0, all_three)[0] for number in range(50)} == {"a", "b", "c"}
    assert ranking("x", 0, {}) == []


def test_metrics_of_replicas_are_one_text() -> None:
    one = '# HELP n words\n# TYPE n counter\nn{model_name="m"} 1\n'
    text = (
        '# HELP n words\n# TYPE n counter\nn{replica="a",model_name="m"} 1\nn{replica="b",model_name="m"} 1\n'
    )
    assert merged_metrics([("a", one), ("b", one)]) == text
