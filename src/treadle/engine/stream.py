"""The outputs of one request on their way to the asyncio side."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

from treadle.types import Finish, Output

if TYPE_CHECKING:
    from treadle.engine.resident import Resident


class Stream:
    """The outputs of one request, for one asyncio loop; ends after the output with `finish`."""

    def __init__(self, id: str, resident: Resident) -> None:
        self.id = id
        self.resident = resident
        self.loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Output] = asyncio.Queue()
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        if self._ended:
            raise StopAsyncIteration
        output = await self._queue.get()
        self._ended = output.finish is not None
        return output

    def put(self, output: Output) -> None:
        self._queue.put_nowait(output)

    def abort(self, finish: Finish = Finish.ABORT) -> None:
        """Stop the work for this request; the stream still ends with its last output. `finish`: what it counts as."""
        self.resident.abort(self.id, finish)
