"""What prompts that arrive do to a stream that is being answered, by `--prefill-stretch`: the time between its tokens,
and when the others get their first.

    python -m bench.prompts_among_answers smollm2-135m --stretch inf,4 --rounds 3
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence

from outrider import LLM, SamplingParams

TEXT = "The harbour office opens at seven, and boats that come later must wait at the outer pier until the next day. "
STREAM, EVERY = 240, 30  # tokens of the stream; tokens of it between two arrivals


async def one_round(llm: LLM, lengths: Sequence[int], number: int) -> tuple[list[float], list[float]]:
    """Gaps between the stream's tokens while prompts arrive, and the others' times to first token."""
    gaps: list[float] = []
    firsts = [0.0] * len(lengths)
    arrivals: list[asyncio.Task[None]] = []
    ids = llm.tokenizer.encode(TEXT * 200)

    async def arrive(place: int) -> None:
        begun, length = time.perf_counter(), lengths[place]
        prompt = [ids[(number * 7 + length) % 50], *ids[:length]]  # no prompt begins as another does
        async for event in llm.stream(prompt, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)):
            if event.token_ids:
                firsts[place] = time.perf_counter() - begun
                break

    params = SamplingParams(temperature=0, max_tokens=STREAM, ignore_eos=True, speculation=False)
    count, last = 0, time.perf_counter()
    async for event in llm.stream(f"Round {number}: {TEXT}", params):
        now = time.perf_counter()
        if count:
            gaps.append(now - last)
        last, count = now, count + len(event.token_ids)
        if count // EVERY > len(arrivals) < len(lengths):
            arrivals.append(asyncio.create_task(arrive(len(arrivals))))
    await asyncio.gather(*arrivals)
    return gaps, firsts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--stretch", default="inf,4", help="bounds to compare, in turn")
    parser.add_argument("--lengths", default="400,60,200", help="tokens of the prompts that arrive")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    lengths = [int(one) for one in asked.lengths.split(",")]
    models = {
        one: LLM(asked.model, draft="none", prefill_stretch=float(one), prefix_reuse=False)
        for one in asked.stretch.split(",")
    }
    gaps: dict[str, list[float]] = {one: [] for one in models}
    firsts: dict[str, list[list[float]]] = {one: [] for one in models}
    for number in range(asked.rounds + 1):
        for name, llm in models.items():
            between, first = asyncio.run(one_round(llm, lengths, number))
            if number:  # the first one only warms up
                gaps[name] += between
                firsts[name].append(first)
    for name in models:
        some = sorted(gaps[name])
        p50, p99 = (1000 * some[int(share * (len(some) - 1))] for share in (0.5, 0.99))
        waited = [1000 * statistics.median(one) for one in zip(*firsts[name], strict=True)]
        print(
            f"stretch {name}: between tokens p50 {p50:.0f} ms, p99 {p99:.0f}, longest {1000 * some[-1]:.0f}"
        )
        print(f"    first tokens of {asked.lengths} after {', '.join(f'{one:.0f}' for one in waited)} ms")


if __name__ == "__main__":
    main()
