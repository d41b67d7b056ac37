"""Print two answers while both are being written; leave one early. Run: python examples/stream.py"""

import asyncio

from outrider import LLM


async def follow(llm: LLM, question: str, longest: int) -> str:
    """The answer's text, cut after `longest` characters: leaving the loop aborts the request."""
    text = ""
    messages = [{"role": "user", "content": question}]
    async for event in llm.stream(messages, temperature=0, max_tokens=96):
        text += event.text
        print(f"{question[:12]}... {event.text!r}")
        if len(text) > longest:
            break
    return text


async def main() -> None:
    with LLM("smollm2-135m") as llm:
        texts = await asyncio.gather(
            follow(llm, "Why is the sky blue?", longest=400),
            follow(llm, "Tell me a long story.", longest=80),
        )
    for text in texts:
        print(f"\n{text}")


if __name__ == "__main__":
    asyncio.run(main())
