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
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from outrider.bench.compare import first_difference
from outrider.bench.peers import Run, Transformers
from outrider.engine.llm import LLM
from outrider.model.decoder import Decoder, Layered, kv_bytes
from outrider.model.kernels.gpu.recording import record
from outrider.model.kernels.native import read_bandwidth
from outrider.model.weights import named_tensors
from outrider.settings import cache_folder
from outrider.types import Batch, SamplingParams, Speculation

ROWS = (1, 2, 4, 8)
Tell = Callable[[str, float], None]  # what runs next, and the share that is done


def _quiet(what: str, done: float) -> None:
    pass


def plain(tokens: int) -> SamplingParams:
    """Exactly `tokens` greedy tokens, end-of-text ignored, nothing drafted."""
    off = Speculation(drafter="none")
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, speculation=off)


def outrider_greedy(llm: LLM, prompt: list[int], tokens: int) -> Run:
    """One prompt through the ordinary stream."""

    async def run() -> Run:
        params = plain(tokens)
        out: list[int] = []
        first, there = 0.0, 0
        begin = time.perf_counter()
        async for event in llm.stream(prompt, params):
            out += event.token_ids
            if not first:
                first, there = time.perf_counter() - begin, len(out)
        return Run([out], first, time.perf_counter() - begin, there)

    return asyncio.run(run())


def against_peer(
    llm: LLM, peer: Transformers, prompts: list[list[int]], tokens: int, tell: Tell
) -> dict[str, Any]:
    """Batch 1, prompt by prompt, ours and theirs in turn, both on the engine's thread and its workers.

    Tokens must agree; where they do not, how close the call was.
    """
    ask = {
        "ours": lambda prompt: outrider_greedy(llm, prompt, tokens),
        "theirs": lambda prompt: llm.driver.run(lambda: peer.greedy(prompt, tokens)),
    }
    rows, differences = [], []
    said = "Outrider and its peer"
    for number, prompt in enumerate(prompts):
        tell(f"{said}, prompt {number + 1} of {len(prompts)}", number / len(prompts))
        runs = {who: ask[who](prompt) for who in (("ours", "theirs") if number % 2 else ("theirs", "ours"))}
        ours, theirs = runs["ours"], runs["theirs"]
        rows.append((ours.decode_rate, theirs.decode_rate, ours.total_s, theirs.total_s))
        if (at := first_difference(ours.tokens, theirs.tokens)) is not None:
            gap = peer.top_two_gap(prompt + theirs.tokens[:at])
            differences.append({"prompt": number, "position": at, "peer_top_two_gap": gap})
        said = f"{ours.decode_rate:.1f} against {theirs.decode_rate:.1f} tok/s"
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


def rows_cost(llm: LLM, context: int, tell: Tell = _quiet) -> dict[str, Any]:
    """A pass over M rows at the end of a text of `context` tokens, for each M in turn, many times over."""
    times = pass_seconds(llm, [(1, m) for m in ROWS], context, 15, tell)
    found = dict(zip(ROWS, times, strict=True))
    return {
        "context": context,
        "pass_ms": {str(m): 1e3 * t for m, t in found.items()},
        "ratio_to_one_row": {str(m): t / found[1] for m, t in found.items()},
    }


def pass_seconds(
    llm: LLM, shapes: Sequence[tuple[int, int]], context: int, repeats: int = 7, tell: Tell = _quiet
) -> list[float]:
    """The target's pass alone, for each (sequences, rows) of `shapes`, in turn; medians.

    The rows are shared out among the ends of texts of `context` tokens. For an engine that is idle: it takes
    free slots and gives them back.
    """
    return llm.driver.run(lambda: _pass_seconds(llm, shapes, context, repeats, tell))


def _pass_seconds(
    llm: LLM, shapes: Sequence[tuple[int, int]], context: int, repeats: int, tell: Tell
) -> list[float]:
    table, opened = llm.engine.table, []
    each = max(-(-rows // sequences) for sequences, rows in shapes)
    most = table.pool.total // sum(sequences for sequences, _ in shapes)
    context = min(context, most - each, llm.engine.context - each)
    runs = []
    try:
        for sequences, rows in shapes:
            texts = [table.open((), reuse=False)[0] for _ in range(sequences)]
            opened += texts
            for row in texts:
                table.extend(row, context + each)
            batch = _ends(llm, texts, rows, context)
            runs.append(
                _device_pass(llm, batch, context + each)
                if llm.model.device.type == "cuda"
                else _host_pass(llm, batch)
            )
        times = []
        for number in range(repeats):
            tell("passes over several tokens", number / repeats)
            times.append([run() for run in runs])
        return [statistics.median(column) for column in zip(*times, strict=True)]
    finally:
        for row in opened:
            table.release(row)


def _host_pass(llm: LLM, batch: Batch) -> Callable[[], float]:
    def run() -> float:
        begin = time.perf_counter()
        llm.model.forward(batch, llm.engine.cache.store)
        return time.perf_counter() - begin

    run()
    return run


def _device_pass(llm: LLM, batch: Batch, context: int) -> Callable[[], float]:
    """The pass as in a captured step, in its own graph, timed by two events of the device."""
    assert isinstance(llm.model, Layered)
    target = llm.model.make_pass(llm.engine.cache.store)
    there, each = batch.to(llm.model.device), batch.rows // len(batch.table_rows.unique())
    graph, _ = record(lambda: target(there, each, context, False), share=llm.model.group.recorded)

    def run() -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    run()
    return run


def _ends(llm: LLM, opened: list[int], rows: int, context: int) -> Batch:
    """The last rows of each text, as a chain of draft tokens has them: as many for each, rounded up."""
    each = -(-rows // len(opened))
    owners = torch.tensor(opened).repeat_interleave(each)
    positions = torch.arange(context, context + each, dtype=torch.int32).repeat(len(opened))
    table, rows = llm.engine.table.tensor, len(owners)
    return Batch(
        ids=torch.from_numpy(np.random.default_rng(0).integers(0, llm.tokenizer.vocab_size, rows)),
        positions=positions,
        slots=table[owners, positions.long()].contiguous(),
        table_rows=owners.int(),
        prefix=positions + 1,
        ancestors=torch.zeros(rows, dtype=torch.int64),
        table=table,
        logit_rows=torch.arange(rows),
    )


def concurrency(
    llm: LLM, prompts: list[list[int]], tokens: int, together: int, repeats: int = 3, tell: Tell = _quiet
) -> dict[str, Any]:
    """Total tokens a second of `together` requests at once against one, in turn; on a GPU after a run that
    captures the graphs.
    """
    params = plain(tokens)
    rates: dict[int, list[float]] = {1: [], together: []}
    if llm.model.device.type == "cuda":
        llm.generate([prompts[i % len(prompts)] for i in range(together)], params)
    for number in range(repeats):
        for turn, many in enumerate(rates):
            tell(f"plain decoding, {many} at once", (number + turn / 2) / repeats)
            chosen = [prompts[(number + i) % len(prompts)] for i in range(many)]
            llm.engine.table.prefix.clear()  # idle between runs: no other thread touches it
            begin = time.perf_counter()
            outs = llm.generate(chosen, params)
            rates[many].append(sum(len(o.token_ids) for o in outs) / (time.perf_counter() - begin))
    one, all_ = statistics.median(rates[1]), statistics.median(rates[together])
    return {"together": together, "one_tok_s": one, "all_tok_s": all_, "ratio": all_ / one}


def memory_used(llm: LLM) -> dict[str, float]:
    """Of this process and its device, at most so far, and of the cache, in GB."""
    cached = llm.engine.table.pool.total * kv_bytes(llm.model)
    found = {
        "process_peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "kv_cache_gb": cached / 1e9,
        "kv_cache_tokens": float(llm.engine.table.pool.total),
    }
    if llm.model.device.type == "cuda":
        found["gpu_peak_gb"] = torch.cuda.max_memory_allocated(llm.model.device) / 1e9
    return found


def memory_limit(llm: LLM, pass_s: float) -> dict[str, Any]:
    """What share of this machine's read bandwidth a one-row pass reaches, counting the weights alone."""
    model = llm.model
    weights = model.weight_bytes()
    # Of an embedding that is not the head, too, a pass reads one row.
    if isinstance(model, Decoder) and model.head is not model.embedding:
        weights -= sum(tensor.nbytes for _, tensor in named_tensors("", model.embedding))
    limit = read_bandwidth(llm.settings.threads, cache_folder() / "kernels")
    return {
        "weight_bytes": weights,
        "read_gb_s": limit / 1e9,
        "reached_gb_s": weights / pass_s / 1e9,
        "share": weights / pass_s / limit,
        "peak_memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }
