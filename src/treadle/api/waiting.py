"""An answer whose model may have to be loaded first.

A stream that has waited for `keepalive_s` begins with comments, so that nobody between takes the silence for an end;
whatever fails after that is told inside the stream. Before, and for a reply in one piece, it is a plain refusal.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from treadle.api.context import Context
from treadle.api.errors import internal_error
from treadle.api.exchange import disconnected, end
from treadle.api.outbox import KEEP_ALIVE
from treadle.api.ports import ResidentPort, SlotPort
from treadle.api.sse import HEADERS
from treadle.api.wire import OPENAI
from treadle.errors import TreadleError

log = logging.getLogger(__name__)

Fault = Callable[[TreadleError], bytes]


async def answer(
    here: Context,
    slot: SlotPort,
    stream: bool,
    reply: Callable[[ResidentPort], Awaitable[Response]],
    fault: Fault = OPENAI.fault,
) -> Response:
    """What `reply` makes of the loaded model; at once if it is loaded. `fault` ends a stream that has begun."""

    async def make() -> Response:
        async with slot.use() as resident:
            return await reply(resident)

    return await make() if slot.state == "ready" else Waiting(make, here.config.keepalive_s if stream else None, fault)


class Waiting(Response):
    """Runs `make`, then the answer that it gives. `keepalive_s` is None for a reply in one piece."""

    def __init__(self, make: Callable[[], Awaitable[Response]], keepalive_s: float | None, fault: Fault) -> None:
        super().__init__()
        self._make = make
        self._keepalive_s = keepalive_s
        self._fault = fault

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        making = asyncio.ensure_future(self._make())
        gone = asyncio.create_task(disconnected(receive))
        try:
            begun = await self._wait(making, gone, send)
        finally:
            await end(gone)
            if not making.done():
                making.cancel()
                await asyncio.wait([making])
        if making.cancelled():
            return
        try:
            response = making.result()
        except Exception as error:
            if not begun:
                raise
            await send({"type": "http.response.body", "body": self._told(error), "more_body": False})
        else:
            await response(scope, receive, without_start(send) if begun else send)

    async def _wait(self, making: asyncio.Future[Response], gone: asyncio.Task[None], send: Send) -> bool:
        """Until the answer is there or nobody wants it; whether the stream has begun."""
        begun = False
        while True:
            await asyncio.wait((making, gone), timeout=self._keepalive_s, return_when=asyncio.FIRST_COMPLETED)
            if making.done() or gone.done():
                return begun
            if not begun:
                await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
            begun = True
            await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})

    def _told(self, error: Exception) -> bytes:
        if isinstance(error, TreadleError):
            return self._fault(error)
        log.error("A bug ended a stream.", exc_info=error)
        return self._fault(internal_error())


def without_start(send: Send) -> Send:
    """`send` for an answer whose first message has been sent."""

    async def rest(message: Message) -> None:
        if message["type"] != "http.response.start":
            await send(message)

    return rest
