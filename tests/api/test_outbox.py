"""Bytes that are ready together leave together; silence is filled by the clock."""

from __future__ import annotations

import asyncio

from treadle.api.outbox import KEEP_ALIVE, Outbox


def test_everything_ready_is_taken_at_once() -> None:
    async def scenario() -> None:
        outbox = Outbox(60)
        for part in (b"a", b"", b"b", b"c"):
            outbox.put(part)
        assert await outbox.take() == (b"abc", True)
        outbox.close()

    asyncio.run(scenario())


def test_a_waiting_sender_is_woken_by_the_first_bytes() -> None:
    async def scenario() -> None:
        outbox = Outbox(60)
        taken = asyncio.create_task(outbox.take())
        await asyncio.sleep(0)
        outbox.put(b"a")
        assert await taken == (b"a", True)
        outbox.close()

    asyncio.run(scenario())


def test_closing_gives_the_rest_and_says_that_it_is_the_last() -> None:
    async def scenario() -> None:
        outbox = Outbox(60)
        outbox.put(b"a")
        outbox.close()
        assert await outbox.take() == (b"a", False)
        assert await outbox.take() == (b"", False)

    asyncio.run(scenario())


def test_silence_is_filled_again_and_again() -> None:
    async def scenario() -> None:
        outbox = Outbox(0.01)
        assert [await outbox.take() for _ in range(3)] == [(KEEP_ALIVE, True)] * 3
        outbox.close()

    asyncio.run(scenario())


def test_there_is_no_comment_while_bytes_flow() -> None:
    async def scenario() -> None:
        outbox = Outbox(0.5)
        for _ in range(20):
            await asyncio.sleep(0.001)
            outbox.put(b"x")
        assert await outbox.take() == (b"x" * 20, True)
        outbox.close()

    asyncio.run(scenario())
