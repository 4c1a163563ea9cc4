"""One model in memory: what the asyncio side may ask of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from treadle.config import Config
from treadle.engine.memory import Ledger
from treadle.engine.stream import Stream
from treadle.errors import BadRequest, ContextLengthExceeded, QueueFull
from treadle.types import Request

if TYPE_CHECKING:
    from treadle.engine.loop import Loop
    from treadle.engine.thread import EngineThread
    from treadle.models.load import ModelCard


class Resident:
    """A loaded model with its loop and its part of the memory. `loop` belongs to the engine thread.

    Nothing else outside that thread holds the weights, so that they go when the loop goes.
    """

    def __init__(
        self,
        model: ModelCard,
        config: Config,
        ledger: Ledger,
        loop: Loop,
        thread: EngineThread,
        revisions: Set[str],
    ) -> None:
        self.model = model
        self.revisions = frozenset(revisions)  # of the prefixes that it may have in the cache
        self.config = config
        self.ledger = ledger
        self.loop = loop
        self.used = time.monotonic()  # when it last began or ended something
        self._thread = thread
        self._streams: set[str] = set()
        self._holds = 0

    @property
    def busy(self) -> bool:
        """Whether something runs, waits or is about to be submitted."""
        return bool(self._streams or self._holds)

    @contextmanager
    def held(self) -> Iterator[None]:
        """It stays loaded while inside: between a look at the model and the submission of what was made for it."""
        self._holds += 1
        self.used = time.monotonic()
        try:
            yield
        finally:
            self._holds -= 1
            self.used = time.monotonic()

    def submit(self, request: Request) -> Stream:
        """Queue a request. Raises NotReady, QueueFull, BadRequest, ContextLengthExceeded or MemoryRefused at once."""
        caps = self.model.caps
        self._thread.check()
        _check(request, caps.vocab_size, caps.context_length)
        rows = 1 if self.config.on_busy == "queue" else self.config.max_rows
        if len(self._streams) >= rows + self.config.max_waiting:
            raise QueueFull(f"{len(self._streams)} requests are running or waiting already; try again shortly.")
        if request.id in self._thread.streams:
            raise BadRequest(f"The request id {request.id!r} is in use.", param="id")
        self.ledger.check(
            len(request.prompt),
            caps.context_length - len(request.prompt) if request.max_tokens is None else request.max_tokens,
        )
        stream = Stream(request.id, self)
        self._streams.add(request.id)
        self._thread.submit(stream, request)
        return stream

    def abort(self, id: str) -> None:
        self._thread.abort(id)

    def ended(self, id: str) -> None:
        """The last output of a stream was handed over."""
        self._streams.discard(id)
        self.used = time.monotonic()


def _check(request: Request, vocab_size: int, context_length: int) -> None:
    """MLX does not check bounds, so every id is checked here once more."""
    prompt = request.prompt
    if len(prompt) == 0:
        raise BadRequest("The prompt is empty.", param="prompt")
    if int(np.min(prompt)) < 0 or int(np.max(prompt)) >= vocab_size:
        raise BadRequest(f"Token ids must lie between 0 and {vocab_size - 1}.", param="prompt")
    if len(prompt) >= context_length:
        raise ContextLengthExceeded(len(prompt), context_length)
    for token, _ in request.sampling.logit_bias:
        if not 0 <= token < vocab_size:
            raise BadRequest(f"logit_bias has the id {token}, but ids end at {vocab_size - 1}.", param="logit_bias")
    if request.max_tokens is not None and request.max_tokens < 0:
        raise BadRequest("max_tokens must not be negative.", param="max_tokens")
