"""`outrider serve` with several models: a table that cannot be served is refused before anything is loaded."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.serve.conftest import write_tiny

from .conftest import Outrider


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    above = tmp_path_factory.mktemp("models")
    for name in ("small", "large"):
        write_tiny(above / name)
    return {name: above / name for name in ("small", "large")}


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("[models.a]\ncach_bytes = 1", "[models.a]: unknown key 'cach_bytes'; did you mean 'cache_bytes'?"),
        ("[models.a]\nport = 1", "[models.a]: port concerns the whole server"),
        ('[models.a]\nload = "later"', "[models.a]: unknown load 'later'"),
        ("[models.a]\nthreads = true", "[models.a]: threads: must be a whole number"),
        ('[models.a]\ngeneration_config = "some"', "'some' is not auto or none"),
        ('model = "b"\n[models.a]', "model and [models] both say what is served"),
        ("models = 1", "models are tables headed [models.NAME]"),
        ('[models.a]\nserved_name = "b"\n[models.b]', "two models are called 'b'"),
        ('keep_traffic = "x"\n[models.a]\n[models.b]', "two models keep traffic in x"),
        ('[models.a]\ndraft = "lokup"', "no drafter 'lokup'"),
    ],
)
def test_a_wrong_table_is_refused(
    outrider: Outrider,
    tmp_path: Path,
    table: str,
    words: str,
) -> None:
    file = tmp_path / "models.toml"
    file.write_text(table)
    ran = outrider("serve", "--config", file, "--port", 0)
    assert ran.code != 0 and words in " ".join(ran.err.split())


def test_models_that_do_not_fit_together_are_refused(
    outrider: Outrider,
    folders: dict[str, Path],
) -> None:
    given = [f"{name}={folder}" for name, folder in folders.items()]
    ran = outrider("serve", *given, "--port", 0, "--memory-bytes", "80M")
    said = " ".join(ran.err.split())
    assert ran.code == 1 and "the models do not fit into 80 MiB of the machine's memory: small 0 MiB" in said
    assert 'load = "first use"' in said and "loading" not in ran.out


def test_a_model_that_is_not_there_is_refused(outrider: Outrider, folders: dict[str, Path]) -> None:
    missing = folders["small"].with_name("missing")
    ran = outrider("serve", folders["small"], missing, "--port", 0, "--load", "first use")
    assert ran.code == 1 and str(missing) in ran.err


def test_a_port_in_use_is_known_at_once(outrider: Outrider, folders: dict[str, Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ran = outrider("serve", *folders.values(), "--port", taken.getsockname()[1])
    assert ran.code == 1 and "choose another with --port" in ran.err
