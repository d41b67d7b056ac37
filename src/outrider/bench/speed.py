"""Measures plain decoding: against a peer, against more rows, against more requests, against the memory
limit.

Everything compared is run in turn within one call, so that a noisy machine is equally noisy for both sides;
the figures that travel are ratios of medians.
"""

from __future__ import annotations

import asyncio
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from outrider.bench.peers import Run, Transformers
from outrider.engine.llm import LLM
from outrider.model.kernels.native import read_bandwidth
from outrider.settings import cache_folder
from outrider.types import Batch, SamplingParams, Speculation

ROWS = (1, 2, 4, 8)


def plain(tokens: int) -> SamplingParams:
    """Exactly `tokens` greedy tokens, end-of-text ignored, nothing guessed."""
    off = Speculation(drafter="none")
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, speculation=off)


def outrider_greedy(llm: LLM, prompt: list[int], tokens: int) -> Run:
    """One prompt through the ordinary stream."""

    async def run() -> Run:
        params = plain(tokens)
        out: list[int] = []
        first = 0.0
        begin = time.perf_counter()
        async for event in llm.stream(prompt, params):
            first = first or time.perf_counter() - begin
            out += event.token_ids
        return Run(out, first, time.perf_counter() - begin)

    return asyncio.run(run())


def against_peer(
    llm: LLM, peer: Transformers, prompts: list[list[int]], tokens: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Batch 1, prompt by prompt, ours and theirs in turn, both on the engine's thread and its workers.

    Tokens must agree; where they do not, how close the call was.
    """
    ask = {
        "ours": lambda prompt: outrider_greedy(llm, prompt, tokens),
        "theirs": lambda prompt: llm.driver.run(lambda: peer.greedy(prompt, tokens)),
    }
    rows, differences = [], []
    for number, prompt in enumerate(prompts):
        runs = {who: ask[who](prompt) for who in (("ours", "theirs") if number % 2 else ("theirs", "ours"))}
        ours, theirs = runs["ours"], runs["theirs"]
        rows.append((ours.decode_rate, theirs.decode_rate, ours.total_s, theirs.total_s))
        if ours.tokens != theirs.tokens:
            at = next(i for i, (a, b) in enumerate(zip(ours.tokens, theirs.tokens, strict=True)) if a != b)
            gap = peer.top_two_gap(prompt + theirs.tokens[:at])
            differences.append({"prompt": number, "position": at, "peer_top_two_gap": gap})
        tell(f"{number + 1}/{len(prompts)}: {ours.decode_rate:.1f} against {theirs.decode_rate:.1f} tok/s")
    ours_rate, theirs_rate = (statistics.median(r[i] for r in rows) for i in (0, 1))
    return {
        "prompts": len(prompts),
        "tokens_each": tokens,
        "ours_tok_s": ours_rate,
        "peer_tok_s": theirs_rate,
        "decode_ratio": statistics.median(r[0] / r[1] for r in rows),
        "whole_request_ratio": statistics.median(r[3] / r[2] for r in rows),
        "prompts_equal": len(prompts) - len(differences),
        "differences": differences,
    }


def rows_cost(llm: LLM, context: int, repeats: int = 15) -> dict[str, Any]:
    """A pass over M rows at the end of a text of `context` tokens, for each M in turn, many times over."""
    passes = {m: _chain(llm, context, m) for m in ROWS}
    times: dict[int, list[float]] = {m: [] for m in ROWS}
    for repeat in range(repeats + 2):
        for m, batch in passes.items():
            begin = time.perf_counter()
            llm.model.forward(batch, llm.engine.store)
            if repeat >= 2:  # the first two warm up
                times[m].append(time.perf_counter() - begin)
    medians = {m: statistics.median(t) for m, t in times.items()}
    return {
        "context": context,
        "pass_ms": {str(m): 1e3 * t for m, t in medians.items()},
        "ratio_to_one_row": {str(m): t / medians[1] for m, t in medians.items()},
    }


def _chain(llm: LLM, context: int, rows: int) -> Batch:
    """A pass as a chain of guesses makes it. It writes to the engine's idle slots; nobody reads them after."""
    positions = torch.arange(context, context + rows, dtype=torch.int32)
    table = torch.arange(context + rows, dtype=torch.int32)[None]
    return Batch(
        ids=torch.from_numpy(np.random.default_rng(0).integers(0, llm.model.config.vocab, rows)),
        positions=positions,
        slots=positions.clone(),
        table_rows=torch.zeros(rows, dtype=torch.int32),
        prefix=positions + 1,
        ancestors=torch.zeros(rows, dtype=torch.int64),
        table=table,
        logit_rows=torch.arange(rows),
    )


def concurrency(
    llm: LLM, prompts: list[list[int]], tokens: int, together: int, rounds: int = 3
) -> dict[str, Any]:
    """Total tokens a second of `together` requests at once against one, in turn."""
    params = plain(tokens)
    rates: dict[int, list[float]] = {1: [], together: []}
    for number in range(rounds):
        for many in rates:
            chosen = [prompts[(number + i) % len(prompts)] for i in range(many)]
            llm.engine.table.prefix.clear()  # idle between rounds: nobody else touches it
            begin = time.perf_counter()
            outs = llm.generate(chosen, params)
            rates[many].append(sum(len(o.token_ids) for o in outs) / (time.perf_counter() - begin))
    one, all_ = statistics.median(rates[1]), statistics.median(rates[together])
    return {"together": together, "one_tok_s": one, "all_tok_s": all_, "ratio": all_ / one}


def memory_limit(llm: LLM, pass_s: float) -> dict[str, Any]:
    """What share of this machine's read bandwidth a one-row pass reaches, counting the weights alone."""
    config = llm.model.config
    layer = config.hidden * (config.heads * 2 + config.kv_heads * 2) * config.head_dim
    layer += 3 * config.hidden * config.intermediate
    weights = 4 * (config.layers * layer + config.vocab * config.hidden)
    limit = read_bandwidth(llm.settings.threads, cache_folder() / "kernels")
    return {
        "weight_bytes": weights,
        "read_gb_s": limit / 1e9,
        "reached_gb_s": weights / pass_s / 1e9,
        "share": weights / pass_s / limit,
        "peak_memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }
