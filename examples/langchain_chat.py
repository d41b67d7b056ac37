"""LangChain against a local server: a chain, a stream, structured output, a tool.

Run: outrider serve, and in another terminal: pip install langchain-openai && python examples/langchain_chat.py
OPENAI_BASE_URL and OPENAI_API_KEY say where else to go.
"""

import os
from typing import Literal

from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
KEY = os.environ.get("OPENAI_API_KEY", "none")
MODEL = os.environ.get("OUTRIDER_MODEL", "smollm2-135m")


class Review(BaseModel, extra="forbid"):
    """What a review says."""

    mood: Literal["good", "bad", "mixed"]
    recommended: bool


@tool
def get_weather(city: Literal["Paris", "Oslo", "Rome"]) -> str:
    """The weather in a city."""
    return f"Rain in {city}, 9 degrees."


def main() -> None:
    model = ChatOpenAI(
        model=MODEL,
        base_url=URL,
        api_key=KEY,
        seed=7,
        max_tokens=256,
        extra_body={"speculative_decoding": {"depth": 4}},
    )
    prompt = ChatPromptTemplate.from_messages(
        [("system", "You answer in one sentence."), ("user", "What is the capital of {country}?")]
    )
    answer = (prompt | model).invoke({"country": "France"})
    print(f"chain: {answer.content}\n       {answer.usage_metadata}\n")

    print("stream: ", end="")
    for chunk in model.stream("Count to five."):
        print(chunk.content, end="", flush=True)

    review = model.with_structured_output(Review).invoke("'A fine film.' What does this review say?")
    print(f"\n\nstructured: {review!r}")

    calls = model.bind_tools([get_weather], tool_choice="get_weather").invoke("Weather in Oslo?").tool_calls
    print(f"tool: {calls[0]['name']}({calls[0]['args']}) -> {get_weather.invoke(calls[0]['args'])}")


if __name__ == "__main__":
    main()
