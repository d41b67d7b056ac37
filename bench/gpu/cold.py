"""Time to the first token of a new process, with an empty and with a filled cache of compiled kernels.

    PYTHONPATH=src python bench/gpu/cold.py MODEL [--draft auto] [--tokens 80] [--seconds 60]

Every run is a process of its own, as `outrider generate` is: import, load, answer one prompt. The first run starts with
an empty cache of compiled kernels, the others reuse it. Prints the seconds of each stage (import, load, first token,
last token), when kernels were compiled, how many and in how many seconds summed over threads, and how many graphs were
captured and in how many seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

PROMPT = "Why is the sky blue?"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--runs", type=int, default=2, help="number of runs; the first has an empty cache")
    parser.add_argument("--seconds", type=float, default=60.0, help="no run begins after this time")
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.began is not None:
        print(json.dumps(answer(given)))
        return 0
    begun = time.time()
    with tempfile.TemporaryDirectory() as folder:
        # The caches of Triton and of the CUDA driver.
        place = {**os.environ, "TRITON_CACHE_DIR": f"{folder}/triton", "CUDA_CACHE_PATH": f"{folder}/cuda"}
        for number in range(given.runs):
            if number and time.time() - begun > given.seconds:
                print("no time left for another run")
                break
            command = [sys.executable, *sys.argv, "--began", repr(time.time())]
            found = subprocess.run(command, env=place, stdout=subprocess.PIPE, text=True, check=True).stdout
            print(
                "empty cache:" if not number else "warm cache: ", found.strip().splitlines()[-1], flush=True
            )
    return 0


def answer(given: argparse.Namespace) -> dict[str, Any]:
    """Runs in a process of its own."""
    from outrider import LLM, SamplingParams
    from outrider.engine.memory import runs_on_gpu
    from outrider.settings import Settings

    on_gpu = runs_on_gpu(Settings())
    if on_gpu:
        from outrider.model.kernels.gpu.compiling import watch_compiling

        watch_compiling()
    moments = {"imported": time.time()}
    with LLM(given.model, draft=given.draft) as llm:
        moments["loaded"] = time.time()
        params = SamplingParams(temperature=0, max_tokens=given.tokens, ignore_eos=True)

        async def follow() -> None:
            async for event in llm.stream(PROMPT, params):
                if event.token_ids:
                    moments.setdefault("first token", time.time())
            moments["last token"] = time.time()

        asyncio.run(follow())
    stages = {"began": given.began, **moments}
    report: dict[str, Any] = {
        f"to {name}": round(moment - before, 2)
        for before, (name, moment) in zip(stages.values(), moments.items(), strict=False)
    }
    report["first token after"] = round(moments["first token"] - given.began, 2)
    report["last token after"] = round(moments["last token"] - given.began, 2)
    if on_gpu:
        from outrider.model.kernels.gpu.compiling import Compiled
        from outrider.model.kernels.gpu.recording import Recorded

        report["kernels compiled"] = Compiled.kernels
        if Compiled.kernels:
            moments = {"compiling began": Compiled.began, "compiling ended": Compiled.ended}
            report |= {name: round(moment - given.began, 2) for name, moment in moments.items()}
        report["compiling, all threads"] = round(Compiled.seconds, 2)
        report["graphs captured"], report["capturing"] = Recorded.graphs, round(Recorded.seconds, 2)
    return report


if __name__ == "__main__":
    sys.exit(main())
