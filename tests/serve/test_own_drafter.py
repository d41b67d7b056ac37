"""`outrider serve --draft package.module:Class`: a drafter of one's own in a server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.serve.conftest import Served

DRAFTER = """
from outrider import Draft, Drafter

class Again(Drafter):
    def propose(self, sequences, draft_plans):
        return [Draft.chain([s.output[-1] if s.output else 5] * plan.depth) for s, plan in zip(sequences, draft_plans)]

def fails():
    return 1 / 0
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Where a package with a drafter is found."""
    import outrider

    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").touch()
    (tmp_path / "own" / "drafters.py").write_text(DRAFTER)
    return {"PYTHONPATH": f"{tmp_path}:{Path(outrider.__file__).parents[1]}", "OUTRIDER_DEBUG": "1"}


def test_it_drafts_and_changes_nothing(
    served: Served, serve_tiny: Callable[..., Served], env: dict[str, str]
) -> None:
    own = serve_tiny("--draft", "own.drafters:Again", env=env)
    for temperature in (0, 1):
        ask = {
            "prompt": "ab ab ab",
            "max_tokens": 24,
            "temperature": temperature,
            "seed": 3,
            "ignore_eos": True,
        }
        answer = own.post("/v1/completions", ask | {"speculative_decoding": {"depth": 3}}).json()
        plain = served.post("/v1/completions", ask | {"speculative_decoding": {"drafter": "none"}}).json()
        assert answer["choices"][0]["text"] == plain["choices"][0]["text"] != ""
        assert answer["timings"]["draft_n"] > 0 == plain["timings"]["draft_n"]


def test_where_it_failed_is_shown_when_asked(serve_tiny: Callable[..., Served], env: dict[str, str]) -> None:
    failing = serve_tiny("--draft", "own.drafters:fails", env=env, ready=False)
    assert failing.process.wait(60) == 1
    for line in ("could not be made: ZeroDivisionError", "Traceback", 'drafters.py", line'):
        assert failing.printed(line)
