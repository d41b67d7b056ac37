"""Fair turns: work of a few slots, begun client by client, so that a client with much work does not delay others."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class _Place:
    size: int
    begins: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Turns:
    """`slots` at once; one client has all but one of them at most. Where a client has several waiting, the smallest and
    the oldest begin alternately: its small work passes its large work, which still goes on.
    """

    def __init__(self, slots: int) -> None:
        self._slots, self._each = slots, max(1, slots - 1)
        self._running = Counter[str]()
        self._waiting: dict[str, list[_Place]] = {}  # by client, in the order of their next turns
        self._smallest = False  # what began last

    async def begin(self, client: str, size: int) -> None:
        """Returns when it is the turn of this work. Call `end` after it."""
        place = _Place(size)
        self._waiting.setdefault(client, []).append(place)
        self._fill()
        try:
            await place.begins
        except asyncio.CancelledError:
            if place.begins.cancelled():
                self._leave(client, place)
            else:
                self.end(client)  # its turn came at the same moment
            raise

    def end(self, client: str) -> None:
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
        self._fill()

    def _leave(self, client: str, place: _Place) -> None:
        if place in (places := self._waiting.get(client, [])):
            places.remove(place)
            if not places:
                del self._waiting[client]

    def _fill(self) -> None:
        while self._running.total() < self._slots:
            client = next((one for one in self._waiting if self._running[one] < self._each), None)
            if client is None:
                return
            self._smallest = not self._smallest
            places = self._waiting.pop(client)
            place = min(places, key=lambda one: one.size) if self._smallest else places[0]
            places.remove(place)
            if places:
                self._waiting[client] = places  # behind all others
            if not place.begins.cancelled():
                self._running[client] += 1
                place.begins.set_result(None)
