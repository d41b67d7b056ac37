"""The rows of a step's passes, and what a step does to the state of its sequences around them: place slots, build
batches, sample, verify, commit.

Here as torch operations. On a GPU some fifty of them would take as long to launch as all of them to run, so kernels do
the same (ops_gpu.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from outrider.device.state import SequenceState
from outrider.model.decoder import Model
from outrider.types import Batch, Draft
from outrider.verify.noise import draw_in_turn
from outrider.verify.process import penalise

# Rows on the device, how many of them belong to one sequence, how long sequences may be, and whether rows branch.
Pass = Callable[[Batch, int, int, bool], Tensor]


# ------------------------------------------------------------------------------------------- which rows a pass has

# Where sampled tokens go: by row whose logits are wanted, the draft node of its first choice, of its second...
Columns = tuple[tuple[int, ...], ...]
NOWHERE = -1  # a choice that is no draft node


@dataclass(frozen=True, slots=True)
class Layout:
    """Rows relative to the last known token, whose entry is the sequence's cached length."""

    entries: tuple[int, ...]  # of the table, whose slot each has
    depths: tuple[int, ...]  # positions
    nodes: tuple[int, ...]  # which draft node each is; -1: a known token
    masks: tuple[int, ...] = ()  # draft nodes each sees, where they branch
    last: bool = False  # only the last row's logits are wanted
    # Entries that positions lie behind, where a drafter's first is of a later token. What would lie before repeats it.
    behind: int = 0

    def __len__(self) -> int:
        return len(self.entries)

    def put_behind(self, behind: int) -> Layout:
        return replace(self, depths=tuple(depth - behind for depth in self.depths), behind=behind)

    def logit_rows(self, sequences: int) -> range:
        """Rows whose logits are wanted, in a batch of this many sequences."""
        total = sequences * len(self)
        return range(len(self) - 1, total, len(self)) if self.last else range(total)


Level = tuple[Layout, Columns]  # a pass of a drafter: its rows, and which draft nodes their logits give


class TreeLayout:
    """A draft tree's nodes as rows of passes. Row 0 is the last known token, row i + 1 is node i; a node's entry in
    the table comes as far behind the root's.
    """

    def __init__(self, shape: Draft) -> None:
        n, self.shape = len(shape), shape
        self.depths = (0, *shape.depths)
        self.depth = max(self.depths)
        self.branches = self.depth < n
        self.masks = (0, *shape.ancestors) if self.branches else ()
        self.layout = self._rows(range(n + 1))
        self.columns: Columns = tuple((row,) for row in range(n + 1))
        self.levels = [self._level(depth) for depth in range(self.depth)]

    def __len__(self) -> int:
        return len(self.shape)

    def _rows(self, rows: range | list[int]) -> Layout:
        return Layout(
            entries=tuple(rows),
            depths=tuple(self.depths[row] for row in rows),
            nodes=tuple(row - 1 for row in rows),
            masks=tuple(self.masks[row] for row in rows) if self.masks else (),
        )

    def _level(self, depth: int) -> Level:
        """Rows of this depth that have children, and which nodes those are."""
        parents = self.shape.parents
        rows = [row for row, d in enumerate(self.depths) if d == depth and row - 1 in parents]
        children = [[node for node, parent in enumerate(parents) if parent == row - 1] for row in rows]
        most = max(map(len, children))
        return self._rows(rows), tuple((*own, *[NOWHERE] * (most - len(own))) for own in children)

    def parent_rows(self, depth: int) -> tuple[int, ...]:
        """By row of the pass of this depth: the one of the pass before that is its parent."""
        (above, _), (here, _) = self.levels[depth - 1], self.levels[depth]
        return tuple(above.nodes.index(self.shape.parents[node]) for node in here.nodes)


def chain_levels(n: int) -> Iterator[Level]:
    """The passes of a chain: of the last known token, then of every node but the last."""
    for ahead in range(n):
        yield Layout((ahead,), (ahead,), (ahead - 1,)), ((ahead,),)


def known_rows(window: int, behind: int = 0) -> Layout:
    """The last `window` known tokens, with logits of the last one. A shorter text repeats its first token."""
    back = tuple(range(1 - window, 1))
    return Layout(back, back, (NOWHERE,) * window, last=True).put_behind(behind)


# ------------------------------------------------------------------------------------------- what a step does


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The sequences of a step, on the device. All tensors are [S] but the inputs."""

    inputs: Tensor  # [S, row, draft nodes wanted, whether to commit and which drafter, fresh slots]
    rows: Tensor
    lengths: Tensor
    # The same rows, with padding's row for sequences without a draft: a drafter must not write to their slots.
    drafting: Tensor
    known: Tensor  # lengths of those

    @property
    def wanted(self) -> Tensor:
        return self.inputs[:, 1]

    @property
    def commits(self) -> Tensor:
        return self.inputs[:, 2] & 1

    @property
    def drafter(self) -> Tensor:
        """By sequence: which of the step's drafters serves it."""
        return self.inputs[:, 2] >> 1

    @property
    def fresh(self) -> Tensor:
        return self.inputs[:, SLOTS:]


SLOTS = 3  # columns of the inputs before the fresh slots


class Ahead(Protocol):
    """Compiles kernels before they are launched."""

    def collecting(self) -> AbstractContextManager[None]:
        """A context in which a launch only queues its kernel to be compiled."""
        ...

    @property
    def jobs(self) -> Sized:
        """Kernels that are not compiled yet."""
        ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def drop(self) -> None: ...


class StepOps:
    """As torch operations, over one state. `model` samples: its `draw` and `filter_logits` are the law's."""

    ahead: Ahead | None = None  # here nothing is compiled

    def __init__(self, state: SequenceState, model: Model) -> None:
        self.state, self.model = state, model
        self.filtered = False  # whether the step that is being built heeds top-k, top-p and min-p
        self.edited = False  # whether it heeds penalties and logit_bias

    @property
    def touched(self) -> int | Tensor:
        """Experts with rows, added up over the layers that ran so far."""
        return self.model.kernels.touched  # type: ignore[attr-defined]  # a mixture of experts has kernels

    def spread_rows(self, rows: int) -> None:
        """Has padding read as many experts as `rows` independent rows while it is timed; 0: no longer. Not on a CPU."""

    def begin_step(self, inputs: Tensor) -> StepInputs:
        """Put the fresh slots behind each sequence's own."""
        state = self.state
        rows, fresh = inputs[:, 0].long(), inputs[:, SLOTS:]
        lengths = state.lengths[rows]
        ahead = torch.arange(fresh.shape[1], device=rows.device)
        state.table[rows[:, None], lengths[:, None] + ahead] = fresh
        drafting = torch.where(inputs[:, 1] > 0, rows, state.rows)
        return StepInputs(inputs, rows, lengths, drafting, state.lengths[drafting])

    def build_batch(
        self, rows: Tensor, lengths: Tensor, layout: Layout, drafted: Tensor | None = None
    ) -> Batch:
        """The batch of a pass over sequences [S] of such lengths; where rows are draft nodes, of these [S, n]."""
        state, sequences, each = self.state, len(rows), len(layout)
        entries = (lengths[:, None] + state.constant(layout.entries)).clamp(min=layout.behind)
        positions = (lengths[:, None] + state.constant(layout.depths)).clamp(min=0).flatten().int()
        ids = state.tokens[rows[:, None], entries]
        if drafted is not None:
            nodes = state.constant(layout.nodes, torch.int64)
            ids = torch.where(nodes < 0, ids, drafted[:, nodes.clamp(min=0)])
        owners = rows.repeat_interleave(each)
        ancestors, prefix = torch.zeros_like(owners), positions + 1
        if layout.masks:
            ancestors = state.constant(layout.masks, torch.int64).repeat(sequences)
            prefix = (lengths.int() + 1 - layout.behind).repeat_interleave(each)
        return Batch(
            ids=ids.flatten(),
            positions=positions,
            slots=state.table[rows[:, None], entries].flatten(),
            table_rows=owners.int(),
            prefix=prefix,
            ancestors=ancestors,
            table=state.table,
            logit_rows=state.constant(layout.logit_rows(sequences), torch.int64),
        )

    def edit(self, batch: Batch, logits: Tensor, drafted: Tensor, ahead: int) -> Tensor:
        """Penalties and logit_bias, where the rows' owners have any: a copy. Draft nodes before a row count."""
        state, edits, vocab = self.state, self.state.edits, logits.shape[1]
        edits.make()
        owners = batch.table_rows[batch.logit_rows].long()
        at = edits.of_row[owners].long()
        mine = at.clamp(min=0)
        # The text behind a row is the known one, and a path of draft nodes: the first of a chain, or a tree's.
        depth = batch.positions[batch.logit_rows] + ahead - state.lengths[owners] - 1
        mask = batch.ancestors[batch.logit_rows][:, None]
        node = torch.arange(drafted.shape[1], device=at.device)
        before = torch.where(mask != 0, mask >> node & 1, node < depth[:, None])
        nodes = drafted.repeat_interleave(len(logits) // len(drafted), dim=0).clamp(0, vocab - 1)
        counts = edits.counts[mine, :vocab].float().scatter_add_(1, nodes, before.float())
        edited = penalise(logits, counts, edits.prompt[mine, :vocab].bool(), edits.penalties[mine])
        return torch.where(at[:, None] >= 0, edited + edits.bias[mine, :vocab], logits)

    def filter(self, logits: Tensor, owners: Tensor) -> Tensor:
        """Logits divided by their owners' temperatures, and filtered if this step's are."""
        state = self.state
        temperature = state.temperature[owners]
        logits = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
        if self.filtered:
            columns = state.top_k[owners], state.top_p[owners], state.log_min_p[owners]
            self.model.filter_logits(logits, *columns)
        return logits

    def draw(
        self,
        batch: Batch,
        logits: Tensor,
        columns: Columns,
        out: Tensor,
        ahead: int = 1,
        drafted: Tensor | None = None,
    ) -> None:
        """Sample at each row of logits, for the position so far ahead of the row's: choices to their columns of
        out [S, n]. Draft nodes that are there already are `drafted`, if not in `out` itself.
        """
        state = self.state
        if self.edited:
            logits = self.edit(batch, logits, out if drafted is None else drafted, ahead)
        owners = batch.table_rows[batch.logit_rows].long()
        positions = batch.positions[batch.logit_rows].long() + ahead
        logits = self.filter(logits, owners)
        given = state.temperature[owners] > 0, state.seeds[owners], positions
        if len(columns[0]) == 1:
            drawn = self.model.draw(logits, *given)
        else:
            drawn = draw_in_turn(self.model.draw, logits, *given, len(columns[0]))
        places = [column for one in columns for column in one]
        meant = [i for i, column in enumerate(places) if column != NOWHERE]
        drawn = drawn.view(len(out), -1)[:, state.constant(meant, torch.int64)]
        out[:, state.constant([places[i] for i in meant], torch.int64)] = drawn

    def append_tokens(self, step: StepInputs, emitted: Tensor) -> None:
        """After plain passes: their tokens [S, n] are known."""
        rows, lengths = step.rows, step.lengths
        ahead = torch.arange(1, emitted.shape[1] + 1, device=rows.device)
        self.state.tokens[rows[:, None], lengths[:, None] + ahead] = emitted
        self._grow(step, emitted.shape[1])
        self._count(step, emitted)

    def commit(
        self,
        step: StepInputs,
        parents: tuple[int, ...],
        depth: int,
        drafted: Tensor,
        counts: Tensor | None,
        chosen: Tensor,
    ) -> Tensor:
        """Verify, and commit to the KV cache. Draft nodes [S, n], of which `counts` were proposed, are accepted where
        they equal what was sampled [S, n + 1] after the last known token and after each node. The path is known from
        now on. Returns [S, accepted, nodes proposed, tokens emitted (depth + 1), nodes among them (depth), draft tokens
        (n)].
        """
        state, rows, lengths = self.state, step.rows, step.lengths
        wanted = step.wanted.long()
        proposed = wanted if counts is None else torch.minimum(counts, wanted)
        above = state.constant(parents, torch.int64)
        node = torch.arange(1, len(parents) + 1, device=rows.device)  # as a row of the pass
        open_ = node <= proposed[:, None]
        here, sampled, held = torch.full_like(rows, NOWHERE), chosen[:, 0], []
        for _ in range(depth):
            fits = (above == here[:, None]) & (drafted == sampled[:, None]) & open_
            held.append((fits * node).amax(1))
            sampled = chosen.gather(1, held[-1][:, None])[:, 0]
            here = torch.where(held[-1] > 0, held[-1] - 1, len(parents))  # no node's parent
        path = torch.stack(held, dim=1)  # [S, depth] rows; 0 where none
        accepted = (path > 0).sum(1)
        emitted = chosen.gather(1, torch.cat([torch.zeros_like(path[:, :1]), path], dim=1))
        ahead = lengths[:, None] + torch.arange(1, depth + 2, device=rows.device)
        state.tokens[rows[:, None], ahead] = emitted
        if depth < len(parents):  # the path's slots come first now
            state.table[rows[:, None], ahead[:, :-1]] = step.fresh.gather(1, path)
        self._grow(step, accepted + 1)
        self._count(step, emitted, accepted)
        return torch.cat([accepted[:, None], proposed[:, None], emitted, path - 1, drafted], dim=1)

    def _grow(self, step: StepInputs, by: Tensor | int) -> None:
        """Adds to the lengths, but not to those of padding or of sequences that the host verifies."""
        grows = (step.rows != self.state.rows) & (step.commits > 0)
        self.state.lengths[step.rows] = torch.where(grows, step.lengths + by, step.lengths)

    def _count(self, step: StepInputs, emitted: Tensor, accepted: Tensor | None = None) -> None:
        """Of sequences that grow: tokens [S, n] emitted, all or those accepted and one more, for its penalties."""
        if not self.edited:
            return
        edits, most = self.state.edits, emitted.shape[1]
        at = edits.of_row[step.rows].long()
        number = torch.full_like(at, most) if accepted is None else accepted + 1
        counts = (at >= 0) & (step.commits > 0)
        valid = counts[:, None] & (torch.arange(most, device=at.device) < number[:, None])
        index = at.clamp(min=0)[:, None] * edits.vocab + emitted
        edits.counts.view(-1).index_add_(0, index.flatten(), valid.flatten().int())


def known_batch(state: SequenceState, rows: np.ndarray, at: np.ndarray, behind: int = 0) -> Batch:
    """Known tokens of these rows of the state, at positions that may lie `behind`; one row's logits are made, as some
    must be.
    """
    owners, where = torch.from_numpy(rows).to(state.device), torch.from_numpy(at).to(state.device)
    positions = where.int() - behind
    return Batch(
        ids=state.tokens[owners, where],
        positions=positions,
        slots=state.table[owners, where],
        table_rows=owners.int(),
        prefix=positions + 1,
        ancestors=torch.zeros_like(owners),
        table=state.table[:, behind:],
        logit_rows=torch.zeros_like(owners[:1]),
    )


def run_levels(
    run: Pass,
    ops: StepOps,
    rows: Tensor,
    lengths: Tensor,
    levels: Iterable[Level],
    n: int,
    context: int,
    vocab: int | None = None,
) -> Tensor:
    """Pass after pass, each over the tokens sampled before: [S, n] tokens."""
    sampled = ops.state.draft_buffer(len(rows), n)
    for layout, columns in levels:
        batch = ops.build_batch(rows, lengths, layout, sampled)
        logits = run(batch, len(layout), context, bool(layout.masks))
        ops.draw(batch, logits[:, :vocab], columns, sampled)
    return sampled
