"""What a device knows of every sequence, and what a round does with it between the passes of its models: rows are laid
out, the law is asked, what holds is kept.

Here as tensor operations. On a GPU some fifty of them would take as long to start as all of them to run, so kernels do
the same (state_device.py).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.model.decoder import Model
from outrider.types import Batch, SamplingParams, Sequence
from outrider.verify.filters import BANNED, OFF, wanted
from outrider.verify.noise import draw_in_turn
from outrider.verify.process import warmth

# Where the law's choices go: by row of a text whose logits are wanted, the guess its first choice is, its second...
Columns = tuple[tuple[int, ...], ...]
NOWHERE = -1  # a choice that is no guess


class State:
    """What the device knows of every sequence. One row more than there are: padding's own."""

    def __init__(self, rows: int, width: int, device: torch.device, between: Between | None = None) -> None:
        self.rows, self.width, self.device = rows, width, device
        self.between = between or Between()
        self.tokens = torch.zeros(rows + 1, width, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(rows + 1, dtype=torch.int64, device=device)  # tokens in the cache
        self.table = torch.zeros(rows + 1, width, dtype=torch.int32, device=device)
        self.seeds = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(rows + 1, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self.top_p = torch.ones(rows + 1, dtype=torch.float32, device=device)
        self.floor = torch.full((rows + 1,), BANNED, dtype=torch.float32, device=device)  # log of min_p
        self.filters = np.zeros(rows + 1, bool)  # for the host: whose law has any
        self.filtered = False  # whether the round that is being made heeds them
        self._constants: dict[tuple[torch.dtype, tuple[int, ...]], Tensor] = {}

    def board(self, sequence: Sequence, entries: np.ndarray) -> None:
        """Bring a row up to what the host knows of its sequence."""
        row, known, cached = sequence.row, len(sequence.tokens), sequence.cached
        self.tokens[row, :known] = torch.tensor(sequence.tokens).to(self.device)
        self.table[row, :cached] = torch.from_numpy(entries[:cached].copy()).to(self.device)
        self.lengths[row] = cached
        self.seeds[row] = sequence.seed
        self._board_law(row, sequence.request.params)

    def _board_law(self, row: int, params: SamplingParams) -> None:
        self.temperature[row] = warmth(params.temperature)
        filters = wanted(params)
        if filters != OFF or self.filters[row]:
            self.top_k[row], self.top_p[row], self.floor[row] = filters
        self.filters[row] = filters != OFF

    def constant(self, values: Seq[int], kind: torch.dtype = torch.int32) -> Tensor:
        """Numbers on the device, put there once: a graph that is being recorded can take nothing from the host."""
        key = kind, tuple(values)
        if key not in self._constants:
            self._constants[key] = torch.tensor(key[1], dtype=kind, device=self.device)
        return self._constants[key]

    def guesses(self, texts: int, nodes: int) -> Tensor:
        """Room for what a drafter is about to say."""
        return torch.empty((texts, nodes), dtype=torch.int64, device=self.device)

    def filter(self, model: Model, logits: Tensor, owners: Tensor) -> Tensor:
        """Logits divided by their owners' temperatures, and filtered if this round's are."""
        heat = self.temperature[owners]
        logits = logits / torch.where(heat > 0, heat, 1.0)[:, None]
        if self.filtered:
            model.sift(logits, self.top_k[owners], self.top_p[owners], self.floor[owners])
        return logits


@dataclass(frozen=True, slots=True)
class Layout:
    """Rows that every text has in a pass, told from its last known token, whose position is the text's length."""

    entries: tuple[int, ...]  # of the table, whose slot each has
    depths: tuple[int, ...]  # positions
    picks: tuple[int, ...]  # which guess each is; -1: a known token
    masks: tuple[int, ...] = ()  # guesses each sees, where they branch
    last: bool = False  # only the last row's logits are wanted
    least: int = 0  # the first entry there is: what would lie before it repeats it

    def __len__(self) -> int:
        return len(self.entries)

    def logit_rows(self, texts: int) -> range:
        """Rows of a batch of so many texts whose logits are wanted."""
        return range(len(self) - 1, texts * len(self), len(self)) if self.last else range(texts * len(self))


@dataclass(frozen=True, slots=True)
class TakeOff:
    """Who takes part in a round: [S] each but the inputs, on the device."""

    inputs: Tensor  # [S, row, guesses wanted, fresh slots]
    rows: Tensor
    lengths: Tensor
    # The same, but padding's row for who wants no guess: a drafter must not write to its slots.
    guessing: Tensor
    known: Tensor  # lengths of those


class Between:
    """As tensor operations."""

    def take_off(self, state: State, inputs: Tensor) -> TakeOff:
        """Put the fresh slots behind each text's own."""
        rows, fresh = inputs[:, 0].long(), inputs[:, 2:]
        lengths = state.lengths[rows]
        state.table[rows[:, None], lengths[:, None] + torch.arange(fresh.shape[1], device=rows.device)] = (
            fresh
        )
        guessing = torch.where(inputs[:, 1] > 0, rows, state.rows)
        return TakeOff(inputs, rows, lengths, guessing, state.lengths[guessing])

    def lay(
        self, state: State, rows: Tensor, lengths: Tensor, layout: Layout, guesses: Tensor | None = None
    ) -> Batch:
        """The batch of a pass over texts [S] of such lengths; where rows are guesses, of these [S, n]."""
        texts, each = len(rows), len(layout)
        entries = (lengths[:, None] + state.constant(layout.entries)).clamp(min=layout.least)
        positions = (lengths[:, None] + state.constant(layout.depths)).clamp(min=0).flatten().int()
        ids = state.tokens[rows[:, None], entries]
        if guesses is not None:
            picks = state.constant(layout.picks, torch.int64)
            ids = torch.where(picks < 0, ids, guesses[:, picks.clamp(min=0)])
        owners = rows.repeat_interleave(each)
        ancestors, prefix = torch.zeros_like(owners), positions + 1
        if layout.masks:
            ancestors = state.constant(layout.masks, torch.int64).repeat(texts)
            prefix = (lengths.int() + 1).repeat_interleave(each)
        return Batch(
            ids=ids.flatten(),
            positions=positions,
            slots=state.table[rows[:, None], entries].flatten(),
            table_rows=owners.int(),
            prefix=prefix,
            ancestors=ancestors,
            table=state.table,
            logit_rows=state.constant(layout.logit_rows(texts), torch.int64),
        )

    def draw(
        self,
        model: Model,
        state: State,
        batch: Batch,
        logits: Tensor,
        columns: Columns,
        out: Tensor,
        ahead: int = 1,
    ) -> None:
        """The law at each row of logits, for the position so far ahead of the row's: choices to their columns of
        out [S, n].
        """
        owners = batch.table_rows[batch.logit_rows].long()
        positions = batch.positions[batch.logit_rows].long() + ahead
        logits = state.filter(model, logits, owners)
        given = state.temperature[owners] > 0, state.seeds[owners], positions
        if len(columns[0]) == 1:
            drawn = model.draw(logits, *given)
        else:
            drawn = draw_in_turn(model.draw, logits, *given, len(columns[0]))
        places = [column for one in columns for column in one]
        meant = [i for i, column in enumerate(places) if column != NOWHERE]
        drawn = drawn.view(len(out), -1)[:, state.constant(meant, torch.int64)]
        out[:, state.constant([places[i] for i in meant], torch.int64)] = drawn

    def keep(self, state: State, off: TakeOff, told: Tensor) -> None:
        """After plain passes: their tokens [S, n] are known."""
        rows, lengths = off.rows, off.lengths
        ahead = torch.arange(1, told.shape[1] + 1, device=rows.device)
        state.tokens[rows[:, None], lengths[:, None] + ahead] = told
        self._grow(state, rows, lengths + told.shape[1])

    def commit(
        self,
        state: State,
        off: TakeOff,
        parents: tuple[int, ...],
        depth: int,
        guesses: Tensor,
        counts: Tensor | None,
        chosen: Tensor,
    ) -> Tensor:
        """What holds of guesses [S, n], of which `counts` were meant, against what the law chose [S, n + 1] after the
        last known token and after each: it is known from now on. [S, accepted, guesses meant, tokens emitted (depth +
        1), the nodes among them (depth), guesses (n)].
        """
        rows, lengths, wanted, fresh = off.rows, off.lengths, off.inputs[:, 1].long(), off.inputs[:, 2:]
        meant = wanted if counts is None else torch.minimum(counts, wanted)
        above = state.constant(parents, torch.int64)
        node = torch.arange(1, len(parents) + 1, device=rows.device)  # as a row of the pass
        open_ = node <= meant[:, None]
        here, said, held = torch.full_like(rows, NOWHERE), chosen[:, 0], []
        for _ in range(depth):
            fits = (above == here[:, None]) & (guesses == said[:, None]) & open_
            held.append((fits * node).amax(1))
            said = chosen.gather(1, held[-1][:, None])[:, 0]
            here = torch.where(held[-1] > 0, held[-1] - 1, len(parents))  # nobody's parent
        path = torch.stack(held, dim=1)  # [S, depth] rows; 0 where none
        accepted = (path > 0).sum(1)
        told = chosen.gather(1, torch.cat([torch.zeros_like(path[:, :1]), path], dim=1))
        ahead = lengths[:, None] + torch.arange(1, depth + 2, device=rows.device)
        state.tokens[rows[:, None], ahead] = told
        if depth < len(parents):  # the path's slots come first now
            state.table[rows[:, None], ahead[:, :-1]] = fresh.gather(1, path)
        self._grow(state, rows, lengths + accepted + 1)
        return torch.cat([accepted[:, None], meant[:, None], told, path - 1, guesses], dim=1)

    def _grow(self, state: State, rows: Tensor, lengths: Tensor) -> None:
        state.lengths[rows] = torch.where(rows == state.rows, 0, lengths)  # padding must not grow
