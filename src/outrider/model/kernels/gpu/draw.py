"""The law of sampling over the vocabulary: argmax of logits plus Gumbel noise. Twin: verify/noise.py's draw.

The noise has the same random bits as the twin's; only the rounding of the logarithms may differ in the last place. Ties
go to the lowest id. The logits are processed already. In a captured step, where temperatures and seeds are indexed by
owner, the kernel may divide by the temperature itself.
"""

# mypy: disable-error-code="no-untyped-def, import-untyped, import-not-found"

# ruff: noqa: N803 - a kernel's compile-time constants are upper case

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from outrider.model.kernels.gpu.ahead import kernel
from outrider.model.kernels.gpu.launch import INTERPRETED, await_previous, chained, let_next_start
from outrider.types import Batch
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
def _score(logits, at, vocab, word, temperature, noisy, INTERPRETED: tl.constexpr):
    score = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    if noisy:
        score = tl.div_rn(score, temperature) + _gumbel(word, INTERPRETED)
    return score


@triton.jit
def _scores_of_four(logits, group, vocab, words, temperature, noisy, INTERPRETED: tl.constexpr):
    """Of the four tokens of every group."""
    a = _score(logits, group * 4, vocab, words[0], temperature, noisy, INTERPRETED)
    b = _score(logits, group * 4 + 1, vocab, words[1], temperature, noisy, INTERPRETED)
    c = _score(logits, group * 4 + 2, vocab, words[2], temperature, noisy, INTERPRETED)
    d = _score(logits, group * 4 + 3, vocab, words[3], temperature, noisy, INTERPRETED)
    return a, b, c, d


@triton.jit
def _better(score, token, other, at):
    """The better token of each pair; the first, which has the lower id, where two are equal."""
    better = other > score
    return tl.where(better, other, score), tl.where(better, at, token)


@kernel
def _chunk_kernel(
    logits, sampled, picked, owners, temperature, seeds, positions, of_row, edited, scores, tokens,
    vocab, stride, chunks, ahead,
    LAW: tl.constexpr, ROUNDS: tl.constexpr, OWNED: tl.constexpr, DIVIDE: tl.constexpr, EDITED: tl.constexpr,
    MOST: tl.constexpr, CHUNK: tl.constexpr, INTERPRETED: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """The best `MOST` of one chunk of a row's tokens, in order."""
    let_next_start(CHAIN)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    await_previous(CHAIN)
    group = chunk * CHUNK + tl.arange(0, CHUNK)
    at = row
    owner = row
    divisor = 1.0
    if OWNED:
        at = tl.load(picked + row)
        owner = tl.load(owners + at).to(tl.int64)
        own = tl.load(temperature + owner)
        noisy = own > 0.0
        if DIVIDE:
            divisor = own
    else:
        noisy = tl.load(sampled + row) != 0
    words = (group.to(tl.uint32),) * 4
    mine = logits + row * stride
    if EDITED:  # noqa: SIM102 - decided when compiling
        if tl.load(of_row + owner) >= 0:
            mine = edited + row * vocab
    if noisy:
        seed = tl.load(seeds + owner)
        k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
        k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
        c1 = tl.zeros_like(group).to(tl.uint32) + (tl.load(positions + at) + ahead).to(tl.uint32)
        c2 = tl.full(group.shape, LAW, tl.uint32)
        words = _philox(group.to(tl.uint32), c1, c2, tl.zeros_like(c2), k0, k1, ROUNDS)
        a, b, c, d = _scores_of_four(mine, group, vocab, words, divisor, True, INTERPRETED)
    else:
        a, b, c, d = _scores_of_four(mine, group, vocab, words, divisor, False, INTERPRETED)
    for i in tl.static_range(MOST):
        best, token = _better(tl.full(group.shape, float("-inf"), tl.float32), group * 4, a, group * 4)
        best, token = _better(best, token, b, group * 4 + 1)
        best, token = _better(best, token, c, group * 4 + 2)
        best, token = _better(best, token, d, group * 4 + 3)
        top = tl.max(best, 0)
        winner = tl.min(tl.where(best == top, token, 2147483647), 0)
        to = (row * chunks + chunk) * MOST + i
        tl.store(scores + to, top)
        tl.store(tokens + to, winner)
        if i + 1 < MOST:
            a = tl.where(group * 4 == winner, float("-inf"), a)
            b = tl.where(group * 4 + 1 == winner, float("-inf"), b)
            c = tl.where(group * 4 + 2 == winner, float("-inf"), c)
            d = tl.where(group * 4 + 3 == winner, float("-inf"), d)


@kernel(do_not_specialize=["stride", "each"])
def _final_kernel(
    scores, tokens, columns, out, count, stride, each, MOST: tl.constexpr, BLOCK: tl.constexpr,
    CHAIN: tl.constexpr,
):  # fmt: skip
    """The best `MOST` of what the chunks of a row found, each to its column; -1: to none."""
    let_next_start(CHAIN)
    row = tl.program_id(0).to(tl.int64)
    await_previous(CHAIN)
    i = tl.arange(0, BLOCK)
    score = tl.load(scores + row * count + i, mask=i < count, other=float("-inf"))
    token = tl.load(tokens + row * count + i, mask=i < count, other=2147483647)
    for place in tl.static_range(MOST):
        top = tl.max(score, 0)
        winner = tl.min(tl.where(score == top, token, 2147483647), 0)
        column = tl.load(columns + row % each * MOST + place)
        tl.store(out + row // each * stride + column, winner.to(tl.int64), mask=column >= 0)
        score = tl.where(token == winner, float("-inf"), score)


def draw_rows(logits: Tensor, sampled: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """[R, vocab] float32, [R] bool, [R] int64, [R] int64 -> tokens int64 [R]."""
    tokens = torch.empty((len(logits), 1), dtype=torch.int64, device=logits.device)
    columns = torch.zeros((1, 1), dtype=torch.int32, device=logits.device)
    given = (sampled, None, None, None, seeds, positions, None, None)
    _draw(logits, given, columns, tokens, 0, owned=False, divide=False)
    return tokens[:, 0]


def draw_owned(
    logits: Tensor,
    batch: Batch,
    law: tuple[Tensor, Tensor],
    columns: Tensor,
    out: Tensor,
    ahead: int,
    divide: bool,
    edited: tuple[Tensor, Tensor] | None = None,
) -> None:
    """The law for the rows of a batch with logits [R, vocab].

    `law`: temperatures and seeds by owner. A row predicts the position `ahead` of its own. Every `EACH` neighbouring
    rows belong to one sequence. `columns` [EACH, most] int32 says where in its row of `out` [S, n] each row's first
    choice goes, then its choice without that token, and so on; -1: nowhere. `divide`: divide logits by the temperature.
    `edited`: by owner, which rows have edited logits, and these logits [R, vocab].
    """
    given = (None, batch.logit_rows, batch.table_rows, *law, batch.positions, *(edited or (None, None)))
    _draw(logits, given, columns, out, ahead, owned=True, divide=divide)


def _draw(
    logits: Tensor,
    given: tuple[Tensor | None, ...],
    columns: Tensor,
    out: Tensor,
    ahead: int,
    owned: bool,
    divide: bool,
) -> None:
    rows, vocab = logits.shape
    each, most = columns.shape
    if not rows:
        return
    chunks = triton.cdiv(vocab, 4 * CHUNK)
    scores = torch.empty((rows, chunks, most), dtype=torch.float32, device=logits.device)
    winners = torch.empty((rows, chunks, most), dtype=torch.int32, device=logits.device)
    _chunk_kernel[(rows, chunks)](
        logits, *given, scores, winners, vocab, logits.stride(0), chunks, ahead,
        LAW=LAW, ROUNDS=ROUNDS, OWNED=owned, DIVIDE=divide, EDITED=given[-1] is not None, MOST=most, CHUNK=CHUNK,
        INTERPRETED=INTERPRETED, num_warps=8, **chained(),
    )  # fmt: skip
    _final_kernel[(rows,)](
        scores, winners, columns, out, chunks * most, out.stride(0), each, MOST=most,
        BLOCK=triton.next_power_of_2(chunks * most), num_warps=1, **chained(),
    )  # fmt: skip


def draw_rows_twin(logits: Tensor, sampled: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    return draw(logits, sampled, seeds, positions)
