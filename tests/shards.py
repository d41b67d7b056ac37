"""Writes conversations to shards, as many as a test needs."""

from __future__ import annotations

from pathlib import Path

from outrider.load.token_shards import Conversation, shard_paths, write_shard


class ShardWriter:
    """Appends conversations to a folder, a shard whenever enough have come. Continues after what is there."""

    def __init__(self, folder: Path, shard_tokens: int = 1 << 18) -> None:
        self.folder, self.shard_tokens = folder, shard_tokens
        self._next = max(shard_paths(folder), default=-1) + 1
        self._held: list[Conversation] = []
        self._tokens = 0

    def add(self, conversation: Conversation) -> Path | None:
        """The shard, where this one filled it."""
        self._held.append(conversation)
        self._tokens += len(conversation)
        return self.flush() if self._tokens >= self.shard_tokens else None

    def flush(self) -> Path | None:
        """Write what is held. If that fails it is still held, for another try."""
        if not self._held:
            return None
        path = write_shard(self.folder, self._next, self._held)
        self._next, self._held, self._tokens = self._next + 1, [], 0
        return path
