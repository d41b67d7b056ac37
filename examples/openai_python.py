"""OpenAI's own Python SDK against a local server: chat, streams, JSON, tools, speculation, predictions.

Run: outrider serve, and in another terminal: pip install openai && python examples/openai_python.py
OPENAI_BASE_URL and OPENAI_API_KEY say where else to go.
"""

import json
import os
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel

URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
KEY = os.environ.get("OPENAI_API_KEY", "none")


class Review(BaseModel, extra="forbid"):
    mood: Literal["good", "bad", "mixed"]
    recommended: bool


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo", "Rome"]}},
            "required": ["city"],
        },
    },
}

CODE = """\
def area(radius):
    return 3.14 * radius * radius
"""


MISSPELT = """\
The outridder rode ahead of the cariage. He watched the road, and he watched the trees beside the road. When the road
was clear he waved, and the cariage went on."""


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def chat(client: OpenAI, model: str) -> None:
    """The same seed gives the same answer, whatever else the server is doing."""
    answer = client.chat.completions.create(
        model=model, messages=ask("What is the capital of France?"), temperature=0.3, seed=7, max_tokens=32
    )
    print(f"chat: {answer.choices[0].message.content}")
    print(f"      {answer.usage.completion_tokens} tokens, seed {answer.seed}\n")


def stream(client: OpenAI, model: str) -> None:
    print("stream: ", end="")
    for chunk in client.chat.completions.create(
        model=model,
        messages=ask("Count to five."),
        temperature=0,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    ):
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        else:
            print(f"\n      {chunk.usage.completion_tokens} tokens\n")


def as_json(client: OpenAI, model: str) -> None:
    """The answer is held to the class's schema, so that it always parses."""
    answer = client.chat.completions.parse(
        model=model, messages=ask("'A fine film.' What does this review say?"), response_format=Review
    )
    print(f"json: {answer.choices[0].message.parsed!r}\n")


def call_a_tool(client: OpenAI, model: str) -> None:
    messages: list = ask("Do I need an umbrella in Oslo?")
    answer = client.chat.completions.create(
        model=model, messages=messages, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False
    )
    message = answer.choices[0].message
    call = message.tool_calls[0]
    print(f"tool: {call.function.name}({json.loads(call.function.arguments)})")
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "Rain, 9 degrees."}]
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=32)
    print(f"      {answer.choices[0].message.content}\n")


def speculate(client: OpenAI, model: str) -> None:
    """On, off or by hand, for each request; the text is the same. It pays most where answers repeat their prompts."""
    texts = []
    for how in ({"drafter": "lookup", "depth": 4, "stats": True}, False):
        answer = client.chat.completions.create(
            model=model,
            messages=ask(f"Correct the spelling and change nothing else: {MISSPELT}"),
            temperature=0,
            max_tokens=64,
            extra_body={"speculative_decoding": how},
        )
        texts.append(answer.choices[0].message.content)
        report = answer.metrics["speculative_decoding"]
        print(f"speculation {'on' if how else 'off'}: {answer.usage.completion_tokens} tokens ", end="")
        print(f"in {report['steps']} steps, ", end="")
        print(f"{report['num_accepted_draft_tokens']} of {report['num_draft_tokens']} draft tokens accepted")
    print(f"      the same text: {texts[0] == texts[1]}\n")


def predict(client: OpenAI, model: str) -> None:
    """A text sent back with a small change is mostly known beforehand: say so, and it comes faster."""
    answer = client.chat.completions.create(
        model=model,
        messages=ask(f"Rename radius to r, and answer with nothing but the code:\n{CODE}"),
        prediction={"type": "content", "content": CODE},
        temperature=0,
        max_tokens=64,
    )
    details = answer.usage.completion_tokens_details
    print(f"prediction: {details.accepted_prediction_tokens} tokens of it came true, ", end="")
    print(f"{details.rejected_prediction_tokens} did not\n{answer.choices[0].message.content}")


def main() -> None:
    client = OpenAI(base_url=URL, api_key=KEY)
    model = client.models.list().data[0].id
    for show in (chat, stream, as_json, call_a_tool, speculate, predict):
        show(client, model)


if __name__ == "__main__":
    main()
