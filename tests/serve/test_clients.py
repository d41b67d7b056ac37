"""Libraries that people put before a server: LangChain, LiteLLM, instructor, each driving the same server.

One file, because importing them takes seconds; the examples that show them are run here for the same reason.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from tests.serve.conftest import Served
from tests.serve.sdk import MODEL, chat, client, said

EXAMPLES = Path(__file__).parents[2] / "examples"
ASKED: list[Any] = [{"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module", autouse=True)
def _no_network() -> None:
    """LiteLLM fetches a list of prices when it is imported, unless told not to."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"


class Person(BaseModel, extra="forbid"):
    """A person."""

    name: Literal["Ada", "Alan"]
    old: bool


def greedy(served: Served, **options: Any) -> str:
    """What the other libraries are to say as well."""
    return said(chat(client(served), temperature=0, max_tokens=12, **options))


# -------------------------------------------------------------------------------------------------- LangChain


@pytest.fixture(scope="module")
def langchain(served: Served) -> Any:
    langchain_openai = pytest.importorskip("langchain_openai")
    return langchain_openai.ChatOpenAI(
        model=MODEL, base_url=f"{served.url}/v1", api_key="none", temperature=0, max_tokens=12, max_retries=0
    )


def test_langchain_invokes_and_streams(served: Served, langchain: Any) -> None:
    whole = langchain.invoke("hello there")
    streamed = list(langchain.stream("hello there"))
    assert whole.content == "".join(chunk.content for chunk in streamed) == greedy(served)
    assert whole.usage_metadata["output_tokens"] == 12
    assert len(streamed) > 3


def test_langchain_binds_tools(langchain: Any) -> None:
    zones = {"zone": {"enum": ["UTC", "CET"]}}
    schema = {"type": "object", "properties": zones, "required": ["zone"], "additionalProperties": False}
    clock = {"title": "get_time", "description": "The time in a zone.", **schema}
    bound = langchain.bind_tools([clock], tool_choice="get_time", max_tokens=100)
    [call] = bound.invoke("What time is it?").tool_calls
    assert (call["name"], call["args"]["zone"] in ("UTC", "CET")) == ("get_time", True)


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_langchain_fills_a_class(langchain: Any, method: str) -> None:
    roomy = langchain.model_copy(update={"max_tokens": 200})
    assert isinstance(roomy.with_structured_output(Person, method=method).invoke("who?"), Person)


# ---------------------------------------------------------------------------------------------------- LiteLLM


def litellm_at(served: Served, provider: str) -> dict[str, Any]:
    base = f"{served.url}/v1" if provider == "openai" else served.url
    return {"model": f"{provider}/{MODEL}", "api_base": base, "api_key": "none", "num_retries": 0}


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_litellm_completes_and_streams(served: Served, provider: str) -> None:
    litellm = pytest.importorskip("litellm")
    options = {**litellm_at(served, provider), "messages": ASKED, "temperature": 0, "max_tokens": 12}
    whole = litellm.completion(**options)
    chunks = litellm.completion(**options, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert whole.choices[0].message.content == text == greedy(served)
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 12)


def test_litellm_tells_errors_apart(served: Served) -> None:
    litellm = pytest.importorskip("litellm")
    for provider in ("openai", "anthropic"):
        where = {**litellm_at(served, provider), "model": f"{provider}/other"}
        with pytest.raises(litellm.NotFoundError, match="not served here"):
            litellm.completion(**where, messages=ASKED, max_tokens=2)


# ------------------------------------------------------------------------------------------------- instructor


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor_fills_a_class(served: Served, mode: str) -> None:
    instructor = pytest.importorskip("instructor")
    own = instructor.from_openai(client(served), mode=instructor.Mode[mode])
    person = own.create(
        model=MODEL, response_model=Person, messages=ASKED, max_tokens=200, max_retries=0, seed=1
    )
    assert isinstance(person, Person)


# --------------------------------------------------------------------------------------------------- examples


@pytest.mark.parametrize(
    ("name", "library", "shown"),
    [
        ("langchain_chat", "langchain_openai", ["structured: Review(mood=", "tool: get_weather({'city': "]),
        ("litellm_chat", "litellm", ["openai: ", "anthropic: ", "the same text: True", "stream: "]),
        ("instructor_extract", "instructor", ["tool_call: Review(mood=", "json_schema_mode: Review(mood="]),
        ("anthropic_python", "anthropic", ["tool: get_weather({'city': ", "the same text: True"]),
    ],
)
def test_examples(
    served: Served,
    name: str,
    library: str,
    shown: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As a user would run them, but in this process."""
    pytest.importorskip(library)
    places = {"OPENAI_BASE_URL": f"{served.url}/v1", "OPENAI_API_KEY": "none", "OUTRIDER_MODEL": MODEL}
    places |= {"ANTHROPIC_BASE_URL": served.url, "ANTHROPIC_API_KEY": "none"}
    for variable, value in places.items():
        monkeypatch.setenv(variable, value)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    for words in shown:
        assert words in printed
