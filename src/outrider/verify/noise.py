"""The randomness of the law: Gumbel noise G(seed, position, token), the same on every device.

A counter-based generator (Philox 4x32, ten rounds) keyed by the request's seed; the counter is the absolute
position and the token's group of four, and its four output words serve those four tokens. The generator has no
state, so noise can be computed for any token of any position in any order.

The law uses stream LAW. Rejection needs independent randomness for its drafts, its acceptances and its
residuals, new in every step: it uses other streams, with the step in the counter.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

LAW, DRAFT, ACCEPT, RESIDUAL = range(4)


def philox(counter: list[Tensor], key: list[Tensor]) -> list[Tensor]:
    """Four 32-bit words from four counter words and two key words, all int64 tensors that broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (second >> 32 & _WORD) ^ c1 ^ k0,
            second & _WORD,
            (first >> 32 & _WORD) ^ c3 ^ k1,
            first & _WORD,
        )
        k0, k1 = k0 + _WEYL[0] & _WORD, k1 + _WEYL[1] & _WORD
    return [c0, c1, c2, c3]


def gumbel(
    seeds: Tensor, positions: Tensor, vocab: int, stream: int = LAW, steps: Tensor | None = None
) -> Tensor:
    """G for every token of every row: seeds, positions (and steps) int64 [R] -> float32 [R, vocab]."""
    group = torch.arange(-(-vocab // 4), dtype=torch.int64, device=seeds.device)[None]
    words = _words(seeds, positions, group, stream, steps)
    return _to_gumbel(torch.stack(words, dim=-1).flatten(1)[:, :vocab])


def gumbel_at(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """The law's G for chosen tokens only: seeds, positions [R], tokens int64 [R, k] -> float32 [R, k]."""
    words = _words(seeds, positions, tokens // 4, LAW, None)
    return _to_gumbel(torch.stack(words, dim=-1).gather(-1, (tokens % 4)[..., None])[..., 0])


def uniforms(seeds: Tensor, positions: Tensor, stream: int, steps: Tensor) -> Tensor:
    """One number in (0, 1) per row, float64."""
    words = _words(seeds, positions, torch.zeros_like(seeds)[:, None], stream, steps)
    return (words[0][:, 0].double() + 0.5) * 2.0**-32


def _words(
    seeds: Tensor, positions: Tensor, group: Tensor, stream: int, steps: Tensor | None
) -> list[Tensor]:
    step = torch.zeros_like(seeds) if steps is None else steps
    key = [seeds[:, None] & _WORD, seeds[:, None] >> 32 & _WORD]
    return philox([group, positions[:, None], torch.full_like(group, stream), step[:, None]], key)


def _to_gumbel(words: Tensor) -> Tensor:
    """-log of a unit exponential made from 32 random bits.

    The winner of an argmax has large noise, so the exponential is drawn near zero with full relative
    precision (log1p of a small uniform); the other end, where float32 would round to infinity, is clamped
    and never wins.
    """
    uniform = ((words.double() + 0.5) * 2.0**-32).float().clamp_(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def draw(logits: Tensor, sampled: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """The argmax of every row, with noise where `sampled`: [R, vocab], [R] bool, [R], [R] -> tokens int64
    [R].

    Kernels with the same signature may replace it and must equal it.
    """
    at = sampled.nonzero()[:, 0]
    if len(at):
        logits = logits.index_add(0, at, gumbel(seeds[at], positions[at], logits.shape[1]))
    return logits.argmax(-1)


def draw_in_turn(
    one: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    logits: Tensor,
    sampled: Tensor,
    seeds: Tensor,
    positions: Tensor,
    most: int,
) -> Tensor:
    """[R, most] the token that the draw `one` chooses at every row, then its choice without that token, and so on."""
    left, drawn = logits.clone(), []
    for _ in range(most):
        drawn.append(one(left, sampled, seeds, positions))
        left.scatter_(1, drawn[-1][:, None], -torch.inf)
    return torch.stack(drawn, dim=1)


def choice_seed(seed: int, choice: int) -> int:
    """The seed of choice i of n, as a signed 64-bit number: choice 0 is the request's own."""
    mixed = seed & (2**64 - 1)
    if choice:
        mixed = (mixed + choice * 0x9E3779B97F4A7C15) & (2**64 - 1)
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & (2**64 - 1)
        mixed ^= mixed >> 31
    return mixed - 2**64 if mixed >= 2**63 else mixed
