"""Two turns of a conversation, through the model's own chat template. Run: python examples/chat.py"""

from outrider import LLM

QUESTIONS = ("What is the capital of France?", "And what river runs through it?")


def main() -> None:
    messages = [{"role": "system", "content": "You answer in one sentence."}]
    with LLM("smollm2-135m") as llm:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            answer = llm.chat(messages, temperature=0, max_tokens=64)[0]
            messages.append({"role": "assistant", "content": answer.text})
            print(
                f"> {question}\n{answer.text}\n[{answer.cached_tokens} prompt tokens came from the cache]\n"
            )


if __name__ == "__main__":
    main()
