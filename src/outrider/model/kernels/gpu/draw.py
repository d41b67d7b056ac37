"""The law of sampling over the vocabulary: argmax of logits plus Gumbel noise. Twin: verify/noise.py's draw.

The noise has the same random bits as there, word for word; only the rounding of the logarithms may differ in
the last place. Ties go to the lowest id. What comes in is processed already, but for the temperature, which
may be left to the kernel.
"""

# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"

# ruff: noqa: N803 - a kernel's compile-time constants are upper case

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from outrider.model.kernels.gpu.launch import INTERPRETED, await_previous, chained, let_next_start
from outrider.verify.noise import LAW, ROUNDS, draw

CHUNK = 1024  # groups of four tokens a program looks at


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1, ROUNDS: tl.constexpr):
    for _ in tl.static_range(ROUNDS):
        high0, low0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high2, low2 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _gumbel(word, INTERPRETED: tl.constexpr):
    uniform = ((word.to(tl.float64) + 0.5) * 2.3283064365386963e-10).to(tl.float32)
    uniform = tl.minimum(uniform, 0.999999940395355224609375)
    if INTERPRETED:  # no libdevice there
        exponential = -tl.log(1.0 - uniform.to(tl.float64)).to(tl.float32)
        return -tl.log(exponential)
    return -libdevice.log(-libdevice.log1p(-uniform))


@triton.jit
def _best_of_four(logits, row_start, group, vocab, words, temperature, noisy, INTERPRETED: tl.constexpr):
    """The best token of every group and its score; the lower id where two are equal."""
    best = tl.full(group.shape, float("-inf"), tl.float32)
    token = group * 4
    for i in tl.static_range(4):
        at = group * 4 + i
        score = tl.load(logits + row_start + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        if noisy:
            score = tl.div_rn(score, temperature) + _gumbel(words[i], INTERPRETED)
        better = score > best
        best = tl.where(better, score, best)
        token = tl.where(better, at, token)
    return best, token


@triton.jit
def _chunk_kernel(
    logits, sampled, temperature, seeds, positions, scores, tokens, vocab, stride, chunks,
    LAW: tl.constexpr, ROUNDS: tl.constexpr, WARMED: tl.constexpr, CHUNK: tl.constexpr,
    INTERPRETED: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAIN)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    await_previous(CHAIN)
    group = chunk * CHUNK + tl.arange(0, CHUNK)
    noisy = tl.load(sampled + row) != 0
    warmth = 1.0
    if WARMED:
        warmth = tl.load(temperature + row)
    words = (group.to(tl.uint32),) * 4
    if noisy:
        seed = tl.load(seeds + row)
        k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
        k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
        c1 = tl.zeros_like(group).to(tl.uint32) + tl.load(positions + row).to(tl.uint32)
        c2 = tl.full(group.shape, LAW, tl.uint32)
        words = _philox(group.to(tl.uint32), c1, c2, tl.zeros_like(c2), k0, k1, ROUNDS)
        best, token = _best_of_four(logits, row * stride, group, vocab, words, warmth, True, INTERPRETED)
    else:
        best, token = _best_of_four(logits, row * stride, group, vocab, words, warmth, False, INTERPRETED)
    top = tl.max(best, 0)
    winner = tl.min(tl.where(best == top, token, 2147483647), 0)
    tl.store(scores + row * chunks + chunk, top)
    tl.store(tokens + row * chunks + chunk, winner)


@triton.jit
def _final_kernel(scores, tokens, out, chunks, BLOCK: tl.constexpr, CHAIN: tl.constexpr):
    let_next_start(CHAIN)
    row = tl.program_id(0).to(tl.int64)
    await_previous(CHAIN)
    i = tl.arange(0, BLOCK)
    score = tl.load(scores + row * chunks + i, mask=i < chunks, other=float("-inf"))
    token = tl.load(tokens + row * chunks + i, mask=i < chunks, other=2147483647)
    top = tl.max(score, 0)
    tl.store(out + row, tl.min(tl.where(score == top, token, 2147483647), 0).to(tl.int64))


def draw_rows(
    logits: Tensor, sampled: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor | None = None
) -> Tensor:
    """[R, vocab] float32, [R] bool, [R] int64, [R] int64 -> tokens int64 [R].

    With `temperature`, float32 [R], sampled rows are divided by it first.
    """
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    chunks = triton.cdiv(vocab, 4 * CHUNK)
    scores = torch.empty((rows, chunks), dtype=torch.float32, device=logits.device)
    winners = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
    if not rows:
        return tokens
    _chunk_kernel[(rows, chunks)](
        logits, sampled, temperature, seeds, positions, scores, winners, vocab, logits.stride(0), chunks,
        LAW=LAW, ROUNDS=ROUNDS, WARMED=temperature is not None, CHUNK=CHUNK, INTERPRETED=INTERPRETED,
        num_warps=8, **chained(),
    )  # fmt: skip
    _final_kernel[(rows,)](
        scores, winners, tokens, chunks, BLOCK=triton.next_power_of_2(chunks), num_warps=1, **chained()
    )
    return tokens


def draw_rows_twin(
    logits: Tensor, sampled: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor | None = None
) -> Tensor:
    if temperature is not None:
        logits = torch.where(sampled[:, None], logits / temperature[:, None], logits)
    return draw(logits, sampled, seeds, positions)
