"""Reads a checkpoint's weights for a CPU in the format they are kept in: says what they take, shows how far it is, and
gives the file's memory back as it goes.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable

from torch import Tensor

from outrider.load.checkpoint import Checkpoint
from outrider.load.quants import Blocks
from outrider.model.parallel import ALONE, Group
from outrider.model.weights import BYTES, kept_as, kept_formats, kind_of
from outrider.settings import shown_size

log = logging.getLogger(__name__)

RELEASED = 1 << 26  # bytes after which what was read of the file is given back

Update = Callable[[int], None]  # takes the bytes so far
# Is called before weights are read, with what they will take in words and in bytes.
Watch = Callable[[str, int], Update]


class Reading:
    """Reads weights by name. `kind` is one of settings.WEIGHTS."""

    def __init__(
        self, checkpoint: Checkpoint, kind: str, draft: bool, watch: Watch | None, group: Group = ALONE
    ) -> None:
        """A rank of several reads its own outputs."""
        self.checkpoint, self.kind, self.draft, self.group = checkpoint, kind, draft, group
        self.done = self.released = 0
        formats = kept_formats(checkpoint, kind, draft)
        size = sum(formats.values()) // group.size
        text = f"weights take {shown_size(size)} in memory ({in_words(formats)})"
        log.info("%s: %s", checkpoint.path.name, text)
        if kind == "stored":
            warn_of_unpacked(checkpoint)
        self.update: Update = (lambda done: None) if watch is None else watch(text, size)

    def __call__(self, name: str) -> Tensor | Blocks:
        stored = self.checkpoint.stored(name)
        if self.checkpoint.config is not None:
            stored = self.group.part(name, stored, self.checkpoint.config)
        weight = kept_as(stored, kind_of(name, self.kind), self.draft)
        self.done += weight.raw.nbytes if isinstance(weight, Blocks) else weight.nbytes
        self.update(self.done)
        if self.done - self.released > RELEASED:
            self.checkpoint.release()
            self.released = self.done
        return weight


def in_words(formats: Counter[str]) -> str:
    """The formats of matrices, the largest first."""
    return ", ".join(name for name, size in formats.most_common() if size > 0.01 * sum(formats.values()))


def warn_of_unpacked(checkpoint: Checkpoint) -> None:
    stored = {checkpoint.stored_format(name) for name in checkpoint.names()}
    if without := sorted(stored - BYTES.keys()):
        warnings.warn(
            f"matrices of {checkpoint.path.name} in {', '.join(without)} are unpacked to float32: there are no kernels "
            "for them; --weights int8 or int4 takes less memory",
            stacklevel=2,
        )
