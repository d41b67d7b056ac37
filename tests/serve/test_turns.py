"""Turns: clients one after the other, few at once, and nobody left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from outrider.serve.turns import Turns


class Play:
    """Work that begins when it is its turn and ends when the test says so."""

    def __init__(self, slots: int) -> None:
        self.turns = Turns(slots)
        self.begun: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, *names: str, size: int = 0) -> None:
        """A name begins with its client's."""
        for name in names:
            self.tasks[name] = asyncio.create_task(self._work(name, size))
        await self.settle()

    async def _work(self, name: str, size: int) -> None:
        await self.turns.begin(name[0], size)
        self.begun.append(name)

    async def end(self, name: str) -> None:
        self.turns.end(name[0])
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


def play(slots: int, work: Callable[[Play], Awaitable[None]]) -> None:
    async def main() -> None:
        await work(Play(slots))

    asyncio.run(main())


def test_clients_take_turns_and_none_has_every_slot() -> None:
    async def work(on: Play) -> None:
        await on.ask("a1", "a2", "a3", "a4")
        assert on.begun == ["a1"]  # the other slot is for somebody else
        await on.ask("b1", "c1", "b2")
        assert on.begun == ["a1", "b1"]
        await on.end("a1")
        assert on.begun[2:] == ["a2"]  # a has waited longest
        await on.end("b1")
        assert on.begun[3:] == ["c1"]  # b had its turn after c came
        await on.end("c1")
        assert on.begun[4:] == ["b2"]
        for name in ("a2", "b2", "a3"):
            await on.end(name)
        assert on.begun[5:] == ["a3", "a4"]

    play(2, work)


def test_small_work_passes_large_work_of_the_same_client() -> None:
    async def work(on: Play) -> None:
        await on.ask("a1", "a2", "a3", "a4", "a5", size=100)
        await on.ask("a6", "a7", size=1)
        for _ in range(6):
            await on.end(on.begun[-1])
        assert on.begun == ["a1", "a2", "a6", "a3", "a7", "a4", "a5"]

    play(1, work)


def test_who_is_cancelled_takes_no_turn() -> None:
    async def work(on: Play) -> None:
        await on.ask("a1", "b1", "c1")
        assert set(on.turns._waiting) == {"b", "c"}
        on.tasks["b1"].cancel()
        await on.settle()
        assert set(on.turns._waiting) == {"c"}
        await on.end("a1")
        assert on.begun == ["a1", "c1"]
        await on.ask("d1", "e1")
        on.tasks["d1"].cancel()
        on.turns.end("c")  # in the same round as the cancellation
        await on.settle()
        assert on.begun == ["a1", "c1", "e1"]
        await on.ask("f1", "g1")
        on.turns.end("e")  # the turn comes first, then the cancellation
        on.tasks["f1"].cancel()
        await on.settle()
        assert on.begun == ["a1", "c1", "e1", "g1"]

    play(1, work)
