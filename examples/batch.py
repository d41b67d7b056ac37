"""Many prompts in one call, each with its own parameters; they share the engine's steps.

Run: python examples/batch.py
"""

import time

from outrider import LLM, SamplingParams

COLOURS = ("red", "green", "blue", "yellow", "black", "white", "orange", "violet")


def main() -> None:
    prompts = [f"A short poem about the colour {colour}:\n" for colour in COLOURS]
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=32) for i in range(len(prompts))]
    with LLM("smollm2-135m") as llm:
        begin = time.perf_counter()
        answers = llm.generate(prompts, params)
        spent = time.perf_counter() - begin
        alone = llm.generate(prompts[3], params[3])[0]
    for colour, answer in zip(COLOURS, answers, strict=True):
        print(f"{colour:7} {' '.join(answer.text.split())}")
    written = sum(len(answer.token_ids) for answer in answers)
    print(f"\n{written} tokens in {spent:.1f} s; the same alone: {alone.token_ids == answers[3].token_ids}")


if __name__ == "__main__":
    main()
