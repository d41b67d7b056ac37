"""The examples that need a server, run as a user would run them. Those with libraries that take long to import are
run in test_clients.py.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.conftest import Served
from tests.serve.sdk import MODEL

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(served: Served, *command: str) -> str:
    """What the command printed, once it has ended well."""
    places = {"OPENAI_BASE_URL": f"{served.url}/v1", "OPENAI_API_KEY": "none", "OUTRIDER_MODEL": MODEL}
    ended = subprocess.run(
        command,
        cwd=EXAMPLES,
        env={**os.environ, **places, "PYTHONIOENCODING": "utf-8:replace"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
    )
    printed = ended.stdout.decode("utf-8", "replace")
    assert ended.returncode == 0, printed
    return printed


def test_the_python_sdk(served: Served) -> None:
    printed = run(served, sys.executable, "openai_python.py")
    assert "seed 7" in printed
    assert "json: Review(mood=" in printed
    assert "tool: get_weather({'city': " in printed
    assert "the same text: True" in printed
    assert "tokens of it came true" in printed
    assert re.search(r"speculation on: \d+ tokens in \d+ steps, \d+ of \d+ draft tokens accepted", printed)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(served: Served) -> None:
    printed = run(served, "sh", "curl.sh", served.url)
    assert '{"status":"ok",' in printed
    assert "data: [DONE]" in printed
    assert '"token_origins":[' in printed
    assert '"accepted_prediction_tokens":' in printed
    assert '"token_logprobs":[null,' in printed
    assert "outrider:spec_decode_num_drafts_total" in printed


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_fails_where_there_is_no_server() -> None:
    ended = subprocess.run(
        ["sh", "curl.sh", "http://127.0.0.1:9"], cwd=EXAMPLES, capture_output=True, timeout=60
    )
    assert ended.returncode != 0


def has_js_sdk() -> bool:
    node = shutil.which("node")
    look = [str(node), "--input-type=module", "-e", "import 'openai'"]
    return node is not None and subprocess.run(look, cwd=EXAMPLES, capture_output=True).returncode == 0


def test_the_javascript_sdk(served: Served) -> None:
    if not has_js_sdk():
        pytest.skip("node or its openai package is missing: npm install --no-save openai")
    printed = run(served, "node", "openai_js.mjs")
    assert "seed 7" in printed
    assert "the same text: true" in printed
