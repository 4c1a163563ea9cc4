"""One answer to one client: ended the moment the client goes away.

Pure ASGI: a task waits for the server's disconnect message beside the answer, so nothing polls, and a request
that is not streamed is watched as well as one that is.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from treadle.api.errors import internal_error, json_response
from treadle.api.job import Job, Running
from treadle.api.outbox import Outbox
from treadle.api.reply import ChunkWriter, Collector
from treadle.api.sse import HEADERS
from treadle.api.wire import OPENAI, Wire
from treadle.errors import TreadleError

log = logging.getLogger(__name__)


async def disconnected(receive: Receive) -> None:
    """Return when the client is gone. The body has been read already."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def end(*tasks: asyncio.Task[None]) -> None:
    """Cancel what still runs and wait until it is gone."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Exchange(Response):
    """Runs `respond` against the client's patience; whatever happens, the job is closed after it."""

    def __init__(self, job: Running) -> None:
        super().__init__()
        self._running = job

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = asyncio.create_task(self.respond(scope, receive, send))
        gone = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()
        finally:
            self._running.close()
            await end(answer, gone)


class Whole(Exchange):
    """The reply as one JSON object: the same events, collected."""

    def __init__(self, job: Job, collector: Collector, wire: Wire = OPENAI) -> None:
        super().__init__(job)
        self.job = job
        self._collector = collector
        self._wire = wire

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.job.run(self._collector.add)
            response = json_response(self._collector.reply(self.job.usage), headers={"x-request-id": self.job.id})
        except TreadleError as error:
            response = self._wire.refusal(error)
        await response(scope, receive, send)


class Streamed(Exchange):
    """The reply as server-sent events. The first bytes leave before the prompt is computed."""

    def __init__(self, job: Job, writer: ChunkWriter, keepalive_s: float, wire: Wire = OPENAI) -> None:
        super().__init__(job)
        self.job = job
        self._writer = writer
        self._wire = wire
        self._keepalive_s = keepalive_s

    async def respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [*HEADERS, (b"x-request-id", self.job.id.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        outbox = Outbox(self._keepalive_s, self._wire.silence)
        outbox.put(self._writer.opening())
        producer = asyncio.create_task(self._produce(outbox))
        try:
            more = True
            while more:
                data, more = await outbox.take()
                await send({"type": "http.response.body", "body": data, "more_body": more})
        finally:
            outbox.close()
            await end(producer)

    async def _produce(self, outbox: Outbox) -> None:
        """Put every event as a chunk, then the end; a fault ends the stream with an error object instead."""

        def put(index: int, event: Any) -> None:
            outbox.put(self._writer.chunk(index, event))

        try:
            await self.job.run(put)
            outbox.put(self._writer.closing(self.job.usage))
        except TreadleError as error:
            outbox.put(self._wire.fault(error))
        except Exception:
            log.exception("A bug ended the stream of %s.", self.job.id)
            outbox.put(self._wire.fault(internal_error()))
        finally:
            outbox.close()
