"""Growing guesses from a model's logits: chains, fixed shapes, and trees grown best first. For any model drafter.

Level by level: the drafter's logits at each open node go through the same processing as the target's, get the same
noise, and the best few become children. Sharing the target's noise is what makes a guess at temperature 1 as likely
to hold as one at 0. A node's survival is the product of its and its ancestors' shares; a grown tree keeps the nodes
likeliest to survive, which never orphans one, as a child cannot be likelier than its parent.

For `rejection`, which needs to know what each guess was drawn from, draws use a stream of their own and the shape is
fixed beforehand: choosing nodes by looking at them would bias the ratio test.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from outrider.types import Bet, Draft, Sequence
from outrider.verify.noise import DRAFT, gumbel, gumbel_at
from outrider.verify.process import process
from outrider.verify.rows import LogitRows

BRANCH = 4  # children a node may get in a grown tree
BEAM = 4  # nodes of a level that get children
CANDIDATES = 64  # likeliest tokens that take part in a coupled draw

Place = tuple[int, int]  # index of the sequence; node, -1 for the root


@dataclass(slots=True)
class Growth:
    """One sequence's tree in the making."""

    bet: Bet
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    survival: list[float] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    log_q: list[Tensor] = field(default_factory=list)

    def add(self, parent: int, token: int, share: float, log_q: Tensor | None) -> int:
        above = 1.0 if parent < 0 else self.survival[parent]
        self.tokens.append(token)
        self.parents.append(parent)
        self.survival.append(above * share)
        self.depths.append(1 if parent < 0 else self.depths[parent] + 1)
        if log_q is not None:
            self.log_q.append(log_q)
        return len(self.tokens) - 1

    def children(self, depth: int) -> int:
        """How many children a node at `depth` gets."""
        bet = self.bet
        if bet.tree is not None:
            return bet.tree[depth] if depth < len(bet.tree) else 0
        if depth >= bet.depth:
            return 0
        return BRANCH if bet.nodes > bet.depth else 1

    def open(self, fresh: list[int]) -> list[int]:
        """Which of the newest nodes get children in turn."""
        fresh = [node for node in fresh if self.children(self.depths[node])]
        if self.bet.tree is not None or len(fresh) <= 1:
            return fresh
        return sorted(sorted(fresh, key=lambda n: -self.survival[n])[:BEAM])

    def harvest(self) -> tuple[Draft, list[int]]:
        """The draft, at most `nodes` of the likeliest, and for each of its nodes the number it had here."""
        kept = list(range(len(self.tokens)))
        if len(kept) > self.bet.nodes:
            if self.bet.tree is None:
                kept.sort(key=lambda n: (-self.survival[n], n))
            kept = sorted(kept[: self.bet.nodes])
        number = {node: i for i, node in enumerate(kept)} | {-1: -1}
        draft = Draft(
            tuple(self.tokens[n] for n in kept),
            tuple(number[self.parents[n]] for n in kept),
            torch.stack([self.log_q[n] for n in kept]) if self.log_q and kept else None,
        )
        return draft, kept


def grow(
    sequences: Seq[Sequence], bets: Seq[Bet], roots: Tensor, expand: Callable[[list[Growth], list[Place]], Tensor]
) -> list[Growth]:
    """Trees for all sequences at once. `roots` [S, vocab] are the drafter's logits after the known text;
    `expand` feeds the given nodes and returns the logits after each."""
    growths = [Growth(bet) for bet in bets]
    places: list[Place] = [(i, -1) for i in range(len(bets)) if growths[i].children(0)]
    logits = roots[[i for i, _ in places]] if places else roots[:0]
    while places:
        fresh = _branch(sequences, growths, places, logits)
        places = [(i, node) for i, nodes in fresh.items() for node in growths[i].open(nodes)]
        if places:
            logits = expand(growths, places)
    return growths


def _branch(
    sequences: Seq[Sequence], growths: list[Growth], places: list[Place], logits: Tensor
) -> dict[int, list[int]]:
    """Give every open place its children; the new nodes of each sequence."""
    rows = _rows(sequences, growths, places)
    processed = process(logits, rows)
    counts = [growths[i].children(0 if node < 0 else growths[i].depths[node]) for i, node in places]
    tokens, shares = _coupled(processed, rows, max(counts))
    drawn = [r for r, (i, _) in enumerate(places) if growths[i].bet.mode == "rejection"]
    log_q: dict[int, Tensor] = {}
    if drawn:
        at = torch.tensor(drawn)
        log_q = dict(zip(drawn, processed[at].log_softmax(-1), strict=True))
        tokens[at] = _drawn(processed[at], rows, np.array(drawn), max(counts))
    fresh: dict[int, list[int]] = {}
    for r, ((i, node), count) in enumerate(zip(places, counts, strict=True)):
        for token, share in zip(tokens[r, :count].tolist(), shares[r, :count].tolist(), strict=True):
            fresh.setdefault(i, []).append(growths[i].add(node, token, share, log_q.get(r)))
    return fresh


def _rows(sequences: Seq[Sequence], growths: list[Growth], places: list[Place]) -> LogitRows:
    drafts = [Draft(tuple(g.tokens[:63]), tuple(g.parents[:63])) if g.tokens else Draft() for g in growths]
    owner = np.array([i for i, _ in places])
    node = np.array([n for _, n in places])
    depth = np.array([0 if n < 0 else growths[i].depths[n] for i, n in places])
    return LogitRows(sequences, drafts, owner, node, depth)


def _coupled(processed: Tensor, rows: LogitRows, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best by the law, and each one's share: [F, count] tokens, [F, count] in (0, 1]."""
    values, ids = processed.topk(min(CANDIDATES, processed.shape[1]))
    hot = torch.from_numpy(rows.spread([s.request.params.temperature > 0 for s in rows.sequences], bool))
    if bool(hot.any()):
        seeds = torch.from_numpy(rows.spread([s.seed for s in rows.sequences], np.int64))
        noise = gumbel_at(seeds, torch.from_numpy(rows.position), ids)
        values = torch.where(hot[:, None], values + noise, values)
    shares = values.softmax(-1)
    order = values.topk(count).indices
    return ids.gather(1, order), shares.gather(1, order)


def _drawn(processed: Tensor, rows: LogitRows, at: np.ndarray, count: int) -> Tensor:
    """`count` tokens a row, drawn without replacement from the drafter's own distribution, in order."""
    owners = [rows.sequences[i] for i in rows.owner[at]]
    seeds, steps = (torch.tensor([getattr(s, name) for s in owners]) for name in ("seed", "steps"))
    # A node's number keeps siblings' subtrees apart: they share a position.
    where = torch.from_numpy(rows.position[at] + (rows.node[at] + 1) * 2**20)
    return (processed + gumbel(seeds, where, processed.shape[1], DRAFT, steps)).topk(count).indices
