"""The server from outside: that it starts, answers, and says who it is."""

from __future__ import annotations

from tests.serve.conftest import Served


def test_it_answers(served: Served) -> None:
    reply = served.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    )
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["finish_reason"] in ("length", "stop")
