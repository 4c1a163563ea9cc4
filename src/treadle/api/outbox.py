"""Bytes on their way to one socket: all that is ready goes out in one send, and the clock fills silence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

KEEP_ALIVE = b": keep-alive\n\n"


def keep_alive() -> bytes:
    """The comment that decoders skip."""
    return KEEP_ALIVE


class Outbox:
    """Written by `put`, emptied by one sender awaiting `take`. Lives on one event loop.

    A wall-clock timer puts `silence()`, a comment by default, whenever nothing was put for `keepalive_s` seconds;
    it is re-armed when it fires, so a token costs no timer. Nothing is bounded here: a reply is no longer than
    its context.
    """

    def __init__(self, keepalive_s: float, silence: Callable[[], bytes] = keep_alive) -> None:
        self._keepalive_s = keepalive_s
        self._silence = silence
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes] = []
        self._closed = False
        self._waiter: asyncio.Future[None] | None = None
        self._last_put = self._loop.time()
        self._timer = self._loop.call_later(keepalive_s, self._tick)

    def put(self, data: bytes) -> None:
        """Add bytes, and wake the sender."""
        if not data:
            return
        self._parts.append(data)
        self._last_put = self._loop.time()
        self._wake()

    def close(self) -> None:
        """No more bytes will be put: `take` returns what is left, then nothing."""
        self._closed = True
        self._timer.cancel()
        self._wake()

    async def take(self) -> tuple[bytes, bool]:
        """Wait for bytes; all there are, and whether more may come."""
        while not self._parts and not self._closed:
            self._waiter = self._loop.create_future()
            await self._waiter
        data = b"".join(self._parts)
        self._parts.clear()
        return data, not self._closed

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _tick(self) -> None:
        due = self._last_put + self._keepalive_s
        if self._loop.time() >= due:
            self.put(self._silence())
            due = self._last_put + self._keepalive_s
        self._timer = self._loop.call_at(due, self._tick)
