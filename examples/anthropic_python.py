"""Anthropic's own Python SDK against a local server: a message, a stream, a tool, speculation.

Run: outrider serve, and in another terminal: pip install anthropic && python examples/anthropic_python.py
ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY say where else to go.
"""

import os

from anthropic import Anthropic
from anthropic.types import Message

URL = os.environ.get("ANTHROPIC_BASE_URL", "http://127.0.0.1:8000")
KEY = os.environ.get("ANTHROPIC_API_KEY", "none")
MODEL = os.environ.get("OUTRIDER_MODEL", "smollm2-135m")

WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo", "Rome"]}},
        "required": ["city"],
    },
}


MISSPELT = """\
The outridder rode ahead of the cariage. He watched the road, and he watched the trees beside the road. When the road
was clear he waved, and the cariage went on."""


def ask(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def text_of(answer: Message) -> str:
    """Of all its blocks of text; an answer that ends at once has none."""
    return "".join(block.text for block in answer.content if block.type == "text")


def message(client: Anthropic) -> None:
    answer = client.messages.create(
        model=MODEL, max_tokens=32, system="You answer in one sentence.", messages=ask("What is a comet?")
    )
    print(f"message: {text_of(answer)}\n         {answer.stop_reason}, {answer.usage.output_tokens} tokens\n")


def stream(client: Anthropic) -> None:
    print("stream: ", end="")
    with client.messages.stream(model=MODEL, max_tokens=32, messages=ask("Count to five.")) as events:
        for text in events.text_stream:
            print(text, end="", flush=True)
    print("\n")


def use_a_tool(client: Anthropic) -> None:
    messages = ask("Do I need an umbrella in Oslo?")
    answer = client.messages.create(
        model=MODEL,
        max_tokens=128,
        messages=messages,
        tools=[WEATHER],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    use = answer.content[0]
    print(f"tool: {use.name}({use.input})")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "Rain, 9 degrees."}
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(model=MODEL, max_tokens=32, messages=messages)
    print(f"      {text_of(answer)}\n")


def speculate(client: Anthropic) -> None:
    """What Anthropic does not have goes in `extra_body`; the text is the same with speculation on and off."""
    texts = []
    for how in ({"drafter": "lookup", "depth": 4}, False):
        answer = client.messages.create(
            model=MODEL,
            max_tokens=64,
            messages=ask(f"Correct the spelling and change nothing else: {MISSPELT}"),
            extra_body={"temperature": 0, "speculative_decoding": how},
        )
        texts.append(text_of(answer))
        report = answer.metrics["speculative_decoding"]
        print(f"speculation {'on' if how else 'off'}: {answer.usage.output_tokens} tokens ", end="")
        print(f"in {report['steps']} steps")
    print(f"      the same text: {texts[0] == texts[1]}")


def main() -> None:
    client = Anthropic(base_url=URL, api_key=KEY)
    for show in (message, stream, use_a_tool, speculate):
        show(client)


if __name__ == "__main__":
    main()
