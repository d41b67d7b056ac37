"""Growing drafts from a model's logits: chains, fixed shapes, and trees grown best first. For any model
drafter.

Level by level: the drafter's logits at each open node go through the same processing as the target's, get
the same noise, and the best few become children. Sharing the target's noise is what makes a draft at
temperature 1 as likely to be accepted as one at 0. A node's survival is the product of its and its ancestors'
shares; a grown tree keeps the nodes likeliest to survive, which never orphans one, as a child cannot be
likelier than its parent.

For `rejection`, which needs to know what each node was drawn from, draws use a stream of their own and the
shape is fixed beforehand: choosing nodes by looking at them would bias the ratio test.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from outrider.cache.pool import CacheFull
from outrider.cache.table import SlotTable
from outrider.draft.reading import slot_batch
from outrider.model.decoder import Model
from outrider.types import MAX_NODES, NO_DRAFT, Batch, Draft, DraftPlan, Sequence
from outrider.verify.law import Draw
from outrider.verify.noise import DRAFT, gumbel, gumbel_at
from outrider.verify.process import process
from outrider.verify.rows import LogitRows

BRANCH = 4  # children a node may get in a grown tree
BEAM = 4  # nodes of a level that get children, where a tree has more than twice as many nodes as levels
SLIM = 2  # nodes for each level
CANDIDATES = 64  # likeliest tokens that take part in a draw without a kernel, or of several children

Place = tuple[int, int]  # index of the sequence; node, -1 for the root


@dataclass(slots=True)
class Growth:
    """One sequence's tree in the making."""

    draft_plan: DraftPlan
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    survival: list[float] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)  # under rejection: which drawn row a node is from
    log_q: Tensor | None = None  # [n, vocab], once grown

    def add(self, parent: int, token: int, share: float, drawn: int | None) -> int:
        above = 1.0 if parent < 0 else self.survival[parent]
        self.tokens.append(token)
        self.parents.append(parent)
        self.survival.append(above * share)
        self.depths.append(1 if parent < 0 else self.depths[parent] + 1)
        if drawn is not None:
            self.drawn.append(drawn)
        return len(self.tokens) - 1

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child down to `node`, itself included."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def children(self, depth: int) -> int:
        """How many children a node at `depth` gets."""
        draft_plan = self.draft_plan
        if draft_plan.tree is not None:
            return draft_plan.tree[depth] if depth < len(draft_plan.tree) else 0
        if depth >= draft_plan.depth:
            return 0
        return BRANCH if draft_plan.nodes > draft_plan.depth else 1

    def open(self, fresh: list[int]) -> list[int]:
        """Which of the newest nodes get children in turn."""
        fresh = [node for node in fresh if self.children(self.depths[node])]
        if self.draft_plan.tree is not None or len(fresh) <= 1:
            return fresh
        depth, nodes = self.draft_plan.depth, self.draft_plan.nodes
        # A drafter's own mask has room for so many fed nodes. In a slim tree the best node alone gets children: more
        # of them bring nothing (log/114).
        beam = 1 if nodes <= SLIM * depth else min(BEAM, MAX_NODES // depth)
        return sorted(sorted(fresh, key=lambda n: -self.survival[n])[:beam])

    def harvest(self) -> tuple[Draft, list[int]]:
        """The draft, at most `nodes` of the likeliest, and for each of its nodes the number it had here."""
        kept = list(range(len(self.tokens)))
        if len(kept) > self.draft_plan.nodes:
            if self.draft_plan.tree is None:
                kept.sort(key=lambda n: (-self.survival[n], n))
            kept = sorted(kept[: self.draft_plan.nodes])
        number = {node: i for i, node in enumerate(kept)} | {-1: -1}
        draft = Draft(
            tuple(self.tokens[n] for n in kept),
            tuple(number[self.parents[n]] for n in kept),
            self.log_q if self.log_q is None or len(kept) == len(self.tokens) else self.log_q[kept],
        )
        return draft, kept


def grow(
    sequences: Seq[Sequence],
    draft_plans: Seq[DraftPlan],
    roots: Tensor,
    expand: Callable[[list[Growth], list[Place]], Tensor],
    draw: Draw | None = None,
) -> list[Growth]:
    """Trees for all sequences at once. `roots` [S, vocab] are the drafter's logits after the known text;
    `expand` feeds the given nodes and returns the logits after each; `draw` is the law's over a whole
    vocabulary, where there is a kernel for it."""
    growths = [Growth(draft_plan) for draft_plan in draft_plans]
    places: list[Place] = [(i, -1) for i in range(len(draft_plans)) if growths[i].children(0)]
    logits = roots[[i for i, _ in places]] if places else roots[:0]
    log_q: list[Tensor] = []
    while places:
        fresh = _branch(sequences, growths, places, logits, log_q, draw)
        places = [(i, node) for i, nodes in fresh.items() for node in growths[i].open(nodes)]
        if places:
            logits = expand(growths, places)
    if log_q:
        drawn = [growth for growth in growths if growth.drawn]
        each = torch.cat(log_q)[[row for growth in drawn for row in growth.drawn]]
        for growth, mine in zip(drawn, each.split([len(growth.drawn) for growth in drawn]), strict=True):
            growth.log_q = mine
    return growths


def slim_tree(draft_plan: DraftPlan, tokens: Seq[Seq[int]], shares: Seq[Seq[float]]) -> Draft:
    """The draft of a slim tree, from the children of each level's best node and their shares."""
    if draft_plan.nodes <= draft_plan.depth:
        return Draft.chain([token for [token] in tokens])
    growth, above = Growth(draft_plan), -1
    for children, parts in zip(tokens, shares, strict=True):
        pairs = zip(children, parts, strict=True)
        fresh = [growth.add(above, token, share, None) for token, share in pairs if share > 0]
        above = fresh[0]
    return growth.harvest()[0]


def _branch(
    sequences: Seq[Sequence],
    growths: list[Growth],
    places: list[Place],
    logits: Tensor,
    log_q: list[Tensor],
    draw: Draw | None,
) -> dict[int, list[int]]:
    """Give every open place its children; the new nodes of each sequence. What they were drawn from joins
    `log_q`.
    """
    rows = _rows(sequences, growths, places)
    processed = process(logits, rows)
    counts = [growths[i].children(0 if node < 0 else growths[i].depths[node]) for i, node in places]
    if draw is not None and max(counts) == 1:
        tokens, shares = _only_child(processed, rows, draw)
    else:
        tokens, shares = _coupled(processed, rows, max(counts))
    drawn = [r for r, (i, _) in enumerate(places) if _is_drawn(sequences[i])]
    number: dict[int, int] = {}
    if drawn:
        at = torch.tensor(drawn)
        before = sum(map(len, log_q))
        number = {r: before + n for n, r in enumerate(drawn)}
        log_q.append(processed[at].log_softmax(-1))
        tokens[at] = _drawn(processed[at], rows, np.array(drawn), tokens.shape[1])
    # A token the drafter rules out is not drafted: there may be fewer possible ones than children asked for.
    possible = (processed.gather(1, tokens) > float("-inf")).tolist()
    fresh: dict[int, list[int]] = {}
    for r, (children, parts) in enumerate(zip(tokens.tolist(), shares.tolist(), strict=True)):
        (i, node), growth, source = places[r], growths[places[r][0]], number.get(r)
        mine = fresh.setdefault(i, [])
        for token, share, can_be in zip(children[: counts[r]], parts, possible[r], strict=False):
            if can_be:
                mine.append(growth.add(node, token, share, source))
    return fresh


def _is_drawn(sequence: Sequence) -> bool:
    """Whether children are drawn for the ratio test; at temperature 0 it is not used and the likeliest is
    better.
    """
    params = sequence.request.params
    return params.speculation.mode == "rejection" and params.temperature > 0


def _rows(sequences: Seq[Sequence], growths: list[Growth], places: list[Place]) -> LogitRows:
    owner = np.array([i for i, _ in places])
    node = np.array([n for _, n in places])
    depth = np.array([0 if n < 0 else growths[i].depths[n] for i, n in places])
    return LogitRows(sequences, growths, owner, node, depth)


def _only_child(processed: Tensor, rows: LogitRows, draw: Draw) -> tuple[Tensor, Tensor]:
    """The best by the law, [F, 1]. A chain is never cut, so that its shares do not matter."""
    _, hot, seeds, positions = rows.keys(processed.device)
    tokens = draw(processed, hot, seeds, positions)[:, None]
    return tokens, torch.ones_like(tokens, dtype=torch.float32)


def _coupled(processed: Tensor, rows: LogitRows, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best by the law, and each one's share: [F, count] tokens, [F, count] in (0, 1]."""
    values, ids = processed.topk(min(CANDIDATES, processed.shape[1]))
    _, hot, seeds, positions = rows.keys(processed.device)
    if bool(hot.any()):
        noise = gumbel_at(seeds, positions, ids)
        values = torch.where(hot[:, None], values + noise, values)
    shares = values.softmax(-1)
    order = values.topk(min(count, values.shape[1])).indices
    return ids.gather(1, order), shares.gather(1, order)


def _drawn(processed: Tensor, rows: LogitRows, at: np.ndarray, count: int) -> Tensor:
    """`count` tokens a row, drawn without replacement from the drafter's own distribution, in order."""
    owners = [rows.sequences[i] for i in rows.owner[at]]
    seeds, steps = (torch.tensor([getattr(s, name) for s in owners]) for name in ("seed", "steps"))
    # A node's number keeps siblings' subtrees apart: they share a position.
    where = torch.from_numpy(rows.position[at] + (rows.node[at] + 1) * 2**20)
    return (processed + gumbel(seeds, where, processed.shape[1], DRAFT, steps)).topk(count).indices


# ---------------------------------------------------------------------------------- in the target's slot table

Run = Callable[[Batch, list[Growth], list[Place]], Tensor]  # logits after each of these nodes


def grow_drafts(
    table: SlotTable,
    sequences: Seq[Sequence],
    draft_plans: Seq[DraftPlan],
    roots: Tensor,
    run: Run,
    behind: int = 0,
    keep: bool = False,
    draw: Draw | None = None,
) -> list[Draft]:
    """Drafts from the logits [S, vocab] after the known tokens; none if there are too few slots to borrow.

    The slots are given back, unless the drafter wants to `keep` what it wrote there: then they stay with their nodes.
    """
    known = [len(sequence.tokens) for sequence in sequences]
    # By node, the borrowed entries of its path as bits.
    paths: list[dict[int, int]] = [{-1: 0} for _ in sequences]

    def expand(growths: list[Growth], places: list[Place]) -> Tensor:
        for i, node in places:
            table.extend(sequences[i].row, 1)
            paths[i][node] = paths[i][growths[i].parents[node]] | 1 << len(paths[i]) - 1
        masks = np.array([paths[i][node] for i, node in places], np.int64)
        base = np.array([known[i] for i, _ in places], np.int32)
        batch = slot_batch(
            table,
            np.array([growths[i].tokens[node] for i, node in places], np.int64),
            base + np.array([growths[i].depths[node] - 1 - behind for i, node in places], np.int32),
            base + np.array([_entry(paths[i][node]) for i, node in places], np.int32),
            np.array([sequences[i].row for i, _ in places], np.int32),
            base - behind,
            masks,
            np.arange(len(places)),
            behind,
        )
        return run(batch, growths, places)

    kept, drafts = False, [NO_DRAFT] * len(sequences)
    try:
        grown = [growth.harvest() for growth in grow(sequences, draft_plans, roots, expand, draw)]
        for i, (_, nodes) in enumerate(grown if keep else ()):
            fed = max((n + 1 for n, node in enumerate(nodes) if node in paths[i]), default=0)
            order = [_entry(paths[i][node]) if node in paths[i] else -1 for node in nodes[:fed]]
            table.attach(sequences[i].row, table.detach(sequences[i].row, known[i]), order)
        drafts, kept = [draft for draft, _ in grown], keep
    except CacheFull:  # a draft is never worth another sequence's place
        pass
    finally:
        if not kept:
            for sequence, length in zip(sequences, known, strict=True):
                table.commit(sequence.row, length)
    return drafts


def host_draw(model: Model) -> Draw | None:
    """The kernel of the law, where it runs over what is on the host."""
    return model.draw if model.device.type == "cpu" else None


def _entry(path: int) -> int:
    """A node comes after its ancestors, so its own bit is the highest."""
    return path.bit_length() - 1
