"""What other servers do and this one does not: the answer says so, and clients do not try again."""

from __future__ import annotations

import httpx
import openai
import pytest

from outrider.serve.app import PATHS
from outrider.serve.not_served import NOT_SERVED, not_served
from tests.serve.conftest import Served
from tests.serve.sdk import MODEL


def test_nothing_that_is_served_is_in_the_table() -> None:
    assert not [path for path in PATHS if not_served(path)]
    assert not_served("/v1/embedding") is not_served("/apis/x") is not_served("/") is None


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("/v1/embeddings", "embeddings: not done here"),
        ("/rerank/", "reranking: not done here"),
        ("/v1/audio/speech", "audio"),
        ("/v1/images/generations", "images"),
        ("/api/tags", "Ollama's own API"),
        ("/api/embed", "embeddings"),
        ("/v1/messages/batches/x/results", "batches"),
    ],
)
def test_what_lies_below_a_path_belongs_to_it(path: str, what: str) -> None:
    assert what in (not_served(path) or "")


def test_every_one_is_answered_by_name(served: Served) -> None:
    with httpx.Client(base_url=served.url, timeout=20) as kept:
        for path, (what, _) in NOT_SERVED.items():
            reply = kept.post(path, json={})
            error = reply.json()["error"]
            assert (reply.status_code, error["code"]) == (404, "not_supported")
            assert error["message"].startswith(f"{what}: not done here"), path
            assert "<path>" not in error["message"]
            assert reply.headers["x-should-retry"] == "false"


def test_the_sdk_does_not_try_again(served: Served) -> None:
    """With retries allowed: one request, and that which read the first count."""
    before = served.metric("http_requests_total")
    api = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=3)
    with api, pytest.raises(openai.NotFoundError, match="embeddings: not done here"):
        api.embeddings.create(model=MODEL, input="hello")
    assert served.metric("http_requests_total") - before == pytest.approx(2)
