"""A connection whose requests must begin: bounds on the head of a request, which comes before any check of a key."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD = 64 * 2**10  # bytes of the request line and the headers; what came in one read may be more
HEAD_S = 60.0  # for a new connection, and for a request that has begun; uvicorn watches idle ones


class Connection(HttpToolsProtocol):
    """uvicorn's, which reads a head of any size for any time."""

    _timer: asyncio.TimerHandle | None = None
    _in_head = False
    _head = 0  # bytes of the head before the last read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head += len(data)
            if self._head > MAX_HEAD:
                self.send_400_response(f"The headers are larger than {MAX_HEAD} bytes.")

    def on_message_begin(self) -> None:
        self._in_head, self._head = True, 0
        self._watch()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._unwatch()
        super().on_headers_complete()

    def _watch(self) -> None:
        self._unwatch()
        self._timer = self.loop.call_later(HEAD_S, self._give_up)

    def _give_up(self) -> None:
        """Nothing of an answer is lost by it: an earlier request of the connection may still be answered."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
