"""Continue a text. Run: python examples/generate.py"""

from outrider import LLM, SamplingParams


def main() -> None:
    with LLM("smollm2-135m") as llm:
        params = SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_tokens=48)
        answer = llm.generate("The outrider rode ahead of the carriage because", params)[0]
    print(answer.text)
    print(f"[{len(answer.token_ids)} tokens, ended by {answer.finish_reason}, seed {answer.seed}]")


if __name__ == "__main__":
    main()
