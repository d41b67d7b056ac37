"""OpenAI's own client, pointed at a server of ours. It never tries again by itself: an error is to be seen."""

from __future__ import annotations

from functools import cache
from typing import Any

from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletion

from tests.serve.conftest import Served

MODEL = "tiny"  # the folder's name


@cache
def _client(url: str, key: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)


def client(served: Served, key: str = "none") -> OpenAI:
    return _client(served.url, key)


def async_client(served: Served) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60)


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def chat(api: OpenAI, text: str = "hello there", **options: Any) -> ChatCompletion:
    """One question, answered at once. Fields that OpenAI does not have go in `extra_body`."""
    return api.chat.completions.create(model=MODEL, messages=user(text), **options)


def said(answer: ChatCompletion, choice: int = 0) -> str:
    return answer.choices[choice].message.content or ""


def ids_of(served: Served, text: str) -> list[int]:
    """Token ids of a text, as the server reads it."""
    return served.post("/tokenize", {"prompt": text}).json()["tokens"]


def exactly(text: str) -> dict[str, Any]:
    """Options that make any model begin with this text: guesses come from it, and every guess is good enough.
    At most 63 tokens, which is characters here; what follows is the model's own.
    """
    speculation = {"mode": "lossy", "rule": "threshold", "threshold": 0.0, "depth": 63}
    prediction = {"type": "content", "content": text}
    return {"prediction": prediction, "extra_body": {"speculative_decoding": speculation}}
