"""LiteLLM against a local server, through both of the APIs it speaks: OpenAI's and Anthropic's.

Run: outrider serve, and in another terminal: pip install litellm && python examples/litellm_chat.py
OPENAI_BASE_URL and OPENAI_API_KEY say where else to go.
"""

import os

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise importing it fetches prices

import litellm

URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
KEY = os.environ.get("OPENAI_API_KEY", "none")
MODEL = os.environ.get("OUTRIDER_MODEL", "smollm2-135m")

OPENAI = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": KEY}
ANTHROPIC = {"model": f"anthropic/{MODEL}", "api_base": URL.removesuffix("/v1"), "api_key": KEY}


def main() -> None:
    litellm.telemetry = False
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    texts = []
    for name, where in (("openai", OPENAI), ("anthropic", ANTHROPIC)):
        answer = litellm.completion(**where, messages=messages, temperature=0, max_tokens=32)
        texts.append(answer.choices[0].message.content)
        print(f"{name}: {texts[-1]}\n       {answer.usage.completion_tokens} tokens\n")
    print(f"the same text: {texts[0] == texts[1]}\n")

    print("stream: ", end="")
    for chunk in litellm.completion(
        **OPENAI,
        messages=messages,
        stream=True,
        max_tokens=32,
        extra_body={"speculative_decoding": {"depth": 4}},
    ):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
