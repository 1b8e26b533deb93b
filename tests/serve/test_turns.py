"""Turns: who is next, and what happens to those who leave."""

from __future__ import annotations

import asyncio
import threading

import pytest

from foretell.serve.turns import Errand, Turns


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_clients_take_turns_however_much_one_asks_for() -> None:
    async def go() -> list[str]:
        turns = Turns(2, 1)
        order: list[str] = []

        async def one(client: str, name: str) -> None:
            async with turns.hold_turn(client):
                order.append(name)
                await settled()

        tasks = [asyncio.create_task(one("much", f"much{k}")) for k in range(4)]
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(one("little", "little")), asyncio.create_task(one("b", "b"))]
        await asyncio.gather(*tasks)
        assert not turns.taken.total() and not turns._queues
        return order

    assert asyncio.run(go()) == ["much0", "little", "much1", "b", "much2", "much3"]


def test_who_leaves_gives_its_turn_to_the_next() -> None:
    async def go() -> None:
        turns = Turns(1, 1)
        await turns.take_turn("a")
        waiting = asyncio.create_task(turns.take_turn("b"))
        behind = asyncio.create_task(turns.take_turn("c"))
        await settled()
        waiting.cancel()
        await settled()
        assert not behind.done()
        turns.end_turn("a")
        await behind
        leaves = asyncio.create_task(turns.take_turn("d"))
        await settled()
        turns.end_turn("c")
        leaves.cancel()  # as it is called
        await settled()
        await turns.take_turn("e")
        assert turns.taken.total() == 1

    asyncio.run(go())


def test_a_turn_lasts_as_long_as_its_thread_and_its_errand_ends_with_the_client() -> None:
    async def go() -> None:
        turns = Turns(1, 1)
        opened, ended = threading.Event(), []

        def work(errand: Errand) -> None:
            opened.wait(20)
            ended.append(errand.over)
            raise ValueError("nobody is told")

        task = asyncio.create_task(turns.run_errand("a", work))
        await settled()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        follower = asyncio.create_task(turns.run_errand("b", lambda _: threading.get_ident()))
        await settled()
        assert not follower.done() and turns.taken["a"] == 1
        opened.set()
        assert await follower != threading.get_ident()
        assert ended == [True]

    asyncio.run(go())
