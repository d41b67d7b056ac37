"""`rejection`: the ratio test of the papers. Exact in distribution, not in path.

Notation: p the target's distribution at a node, q the one its child x was drawn from.

*One child.* Accept x with probability min(1, p(x)/q(x)); otherwise draw from norm((p - q)+). The accepted
branch carries min(p, q), the rejected mass is the sum of (p - q)+, and the residual refills exactly that:
together p.

*Several children, drawn without replacement.* They are tried in the order they were drawn. After a rejection the
target becomes the residual, r <- norm((r - q)+), and the next child was drawn from q without the tokens already
tried. Each test is the one-child argument with r in place of p, so the emitted token follows p. A child that was
not drawn at random (q unknown) counts as drawn from a point mass: it is accepted with probability r(x), and its
token is excluded otherwise. This is exact for any choice of the child.

*A chain as a block.* With w_0 = 1 and w_i = min(1, w_{i-1} p(x_i)/q(x_i)), prefix i survives on its own
with h_i = s_i / (s_i + 1 - w_i), s_i = sum (w_i p - q)+ after x_1..x_i, and h_n = w_n; the longest
surviving prefix is kept and the next token drawn from norm((w p - q)+). It never accepts fewer tokens than
verification token by token.

The draft's draws, the acceptances and the residuals use three independent streams, new in every step. Sharing
any of them would bias the result; a test checks that this is noticed.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from outrider.verify.law import Draw, Result
from outrider.verify.noise import ACCEPT, RESIDUAL, gumbel, uniforms
from outrider.verify.rows import TreeRows


def rejection(processed: Tensor, rows: TreeRows, draw: Draw) -> list[Result]:
    del draw  # the law's noise is not used here
    p = processed.double().softmax(-1)
    q = _drawn_from(rows, p)
    coins = _coins(rows)
    results: list[Result] = [([], [])] * len(rows.sequences)
    blocks = [
        i for i, s in enumerate(rows.sequences) if s.request.params.speculation.block and _is_block(rows, i)
    ]
    others = sorted(set(range(len(results))) - set(blocks))
    for group, test in ((blocks, _block), (others, _one_by_one)):
        if group:
            last, residual = test(p, q, coins, rows, np.array(group))
            emitted = _emit(residual, rows, group, last)
            for index, row, token in zip(group, last, emitted, strict=True):
                draft = rows.drafts[index]
                path = draft.path(int(rows.node[row]))
                results[index] = path, [*(draft.tokens[i] for i in path), token]
    return results


def _is_block(rows: TreeRows, index: int) -> bool:
    draft = rows.drafts[index]
    return (
        bool(draft.tokens) and draft.log_q is not None and draft.parents == tuple(range(-1, len(draft) - 1))
    )


def _coins(rows: TreeRows) -> Tensor:
    """[R] the uniform for accepting each row's node, keyed by the node's number so that siblings differ."""
    seeds = torch.from_numpy(rows.spread([s.seed for s in rows.sequences], np.int64))
    steps = torch.from_numpy(rows.spread([s.steps for s in rows.sequences], np.int64))
    known = rows.spread([len(s.tokens) for s in rows.sequences], np.int64)
    return uniforms(seeds, torch.from_numpy(known + (rows.node + 1) * 2**20), ACCEPT, steps)


def _emit(residual: Tensor, rows: TreeRows, group: list[int], last: np.ndarray) -> list[int]:
    """A token from each residual [G, vocab]."""
    chosen = [rows.sequences[i] for i in group]
    seeds = torch.tensor([s.seed for s in chosen])
    steps = torch.tensor([s.steps for s in chosen])
    noise = gumbel(seeds, torch.from_numpy(rows.position[last]), residual.shape[1], RESIDUAL, steps)
    return (residual.log() + noise).argmax(-1).tolist()


def _drawn_from(rows: TreeRows, like: Tensor) -> Tensor:
    """[R, vocab] the distribution each row's node was drawn from; a point mass if it is unknown, zeros at a root."""
    q = torch.zeros_like(like)
    known = rows.spread([draft.log_q is not None for draft in rows.drafts], bool)
    log_q = [draft.log_q for draft in rows.drafts if draft.log_q is not None]
    if log_q:
        q[torch.from_numpy(np.flatnonzero(known & (rows.node >= 0)))] = torch.cat(log_q).to(q).exp()
    given = torch.from_numpy(np.flatnonzero(~known & (rows.node >= 0)))
    q[given, torch.from_numpy(rows.token)[given]] = 1
    return q


def _one_by_one(
    p: Tensor, drawn: Tensor, coins: Tensor, rows: TreeRows, group: np.ndarray
) -> tuple[np.ndarray, Tensor]:
    """Recursive rejection without replacement. Parents come before children and siblings in the order they
    were drawn, so one pass over the nodes, all sequences at once, is the whole recursion.
    """
    starts = rows.starts[group]
    sizes = np.array([len(rows.drafts[i]) for i in group])
    here = starts.copy()
    left = p[here]  # the target less the mass of rejected children
    tried = torch.zeros_like(left, dtype=torch.bool)
    for node in range(int(sizes.max(initial=0))):
        # Beyond its end a draft repeats its last node, which is not live.
        at = starts + np.minimum(node + 1, sizes)
        live = torch.from_numpy((node < sizes) & (rows.parent[at] == here))
        if not bool(live.any()):
            continue
        token = torch.from_numpy(rows.token[at]).clamp(min=0)[:, None]
        q = drawn[at].masked_fill(tried, 0)
        point = torch.zeros_like(q).scatter_(1, token, 1)
        total = q.sum(-1, keepdim=True)
        q = torch.where(total > 0, q / total.clamp(min=1e-300), point)
        ratio = (left.gather(1, token) / q.gather(1, token).clamp(min=1e-300))[:, 0]
        accepted = live & (coins[at] < ratio)
        rejected = (live & ~accepted)[:, None]
        spent = (left - q).clamp(min=0)
        mass = spent.sum(-1, keepdim=True)
        left = torch.where(rejected & (mass > 0), spent / mass.clamp(min=1e-300), left)
        tried |= rejected & (point > 0)
        here = np.where(accepted.numpy(), at, here)
        left = torch.where(accepted[:, None], p[at], left)
        tried &= ~accepted[:, None]
    return here, left


def _block(
    p: Tensor, drawn: Tensor, coins: Tensor, rows: TreeRows, group: np.ndarray
) -> tuple[np.ndarray, Tensor]:
    """Block verification of chains of any lengths."""
    starts = rows.starts[group]
    sizes = np.array([len(rows.drafts[i]) for i in group])
    weight = torch.ones(len(group), dtype=p.dtype)
    kept = starts.copy()
    residual = torch.zeros_like(p[starts])
    for i in range(int(sizes.max()) + 1):
        at = np.minimum(starts + i, starts + sizes)
        inside, final = torch.from_numpy(i < sizes), torch.from_numpy(i == sizes)
        if i:
            token = torch.from_numpy(rows.token[at])[:, None]
            chance = drawn[at].gather(1, token)[:, 0]
            ratio = p[rows.parent[at]].gather(1, token)[:, 0] / chance.clamp(min=1e-300)
            weight = torch.where(torch.from_numpy(i <= sizes), (weight * ratio).clamp(max=1), weight)
        following = drawn[np.minimum(at + 1, starts + sizes)].masked_fill(~inside[:, None], 0)
        spare = (weight[:, None] * p[at] - following).clamp(min=0)
        mass = spare.sum(-1)
        survives = torch.where(final, weight, mass / (mass + 1 - weight).clamp(min=1e-300))
        keep = (inside | final) & ((coins[at] <= survives) if i else torch.ones_like(inside))
        ending = torch.where(
            final[:, None] | (mass[:, None] <= 0), p[at], spare / mass[:, None].clamp(min=1e-300)
        )
        residual = torch.where(keep[:, None], ending, residual)
        kept = np.where(keep.numpy(), at, kept)
    return kept, residual
