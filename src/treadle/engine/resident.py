"""One model in memory: what the asyncio side may ask of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from treadle.cache.formats import least
from treadle.config import Config
from treadle.engine.memory import Ledger
from treadle.engine.stream import Stream
from treadle.errors import BadRequest, ContextLengthExceeded, QueueFull
from treadle.types import Caps, Drafting, Finish, Request, Skimming
from treadle.vision.spans import largest

if TYPE_CHECKING:
    from treadle.engine.loop import Loop
    from treadle.engine.thread import EngineThread
    from treadle.models.calibration import CalibrationFile
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
        drafting: Drafting,
        calibration: CalibrationFile | None = None,
    ) -> None:
        self.model = model
        self.revisions = frozenset(revisions)  # of the prefixes that it may have in the cache
        self.config = config
        self.ledger = ledger
        self.loop = loop
        self.calibration = calibration  # belongs to the engine thread too
        self.used = time.monotonic()  # when it last began or ended something
        self._thread = thread
        self._drafting = drafting
        self._streams: set[str] = set()
        self._holds = 0

    @property
    def busy(self) -> bool:
        """Whether something runs, waits or is about to be submitted."""
        return bool(self._streams or self._holds)

    @property
    def drafting(self) -> Drafting:
        """What speculation is in force."""
        speculation = self.loop.speculation
        fault = "" if speculation is None else speculation.fault
        if not fault:
            return self._drafting
        return Drafting(tuple(s for s in self._drafting.sources if s != "draft"), None, fault)

    @property
    def skimming(self) -> Skimming | None:
        """What sparse prefill is in force; None: there is no small model for it."""
        return None if self.loop.skim is None else self.loop.skim.facts

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
        _check_purpose(request, caps)
        if request.spans and self.model.reader is None:
            raise BadRequest("This model cannot see images.", param="messages")
        rows = 1 if self.config.on_busy == "queue" else self.config.max_rows
        if len(self._streams) >= rows + self.config.max_waiting:
            raise QueueFull(f"{len(self._streams)} requests are running or waiting already; try again shortly.")
        if request.id in self._thread.streams:
            raise BadRequest(f"The request id {request.id!r} is in use.", param="id")
        if request.kv is not None and not request.kv.exact and caps.kv_fault is not None:
            raise BadRequest(f"This model's rows are exact only: {caps.kv_fault}.", param="kv_bits")
        if self.loop.skim is None and (request.sparse or request.keep is not None):
            param = "specprefill" if request.sparse else "specprefill_keep_pct"
            raise BadRequest("No small model is here for that (--specprefill-model names one).", param=param)
        room = caps.context_length - len(request.prompt) if request.max_tokens is None else request.max_tokens
        kv = least(request.kv, caps, self.config.kv_bits) or request.kv
        self.ledger.check(len(request.prompt), room, kv, largest(request.spans))
        stream = Stream(request.id, self)
        self._streams.add(request.id)
        self._thread.submit(stream, request)
        return stream

    def abort(self, id: str, finish: Finish) -> None:
        self._thread.abort(id, finish)

    def ended(self, id: str) -> None:
        """The last output of a stream was handed over."""
        self._streams.discard(id)
        self.used = time.monotonic()


def _check_spans(request: Request) -> None:
    """Pictures follow one another, and the last token, from which the reply goes on, is in none."""
    edges = [edge for span in request.spans for edge in (span.start, span.end)]
    if edges != sorted(edges) or any(span.start == span.end for span in request.spans):
        raise BadRequest("Images of a prompt must not overlap.", param="messages")
    if edges[0] < 0 or edges[-1] >= len(request.prompt):
        raise BadRequest("An image must not be the end of a prompt.", param="messages")


def _check_purpose(request: Request, caps: Caps) -> None:
    """Tokens come from models that write, embeddings from those that embed in this way."""
    embedding = caps.embedding
    if request.pooling is None and embedding is not None and not embedding.generates:
        raise BadRequest("This model has no output layer: it embeds only.", param="model")
    if request.pooling is not None and (embedding is None or embedding.pooling is not request.pooling):
        raise BadRequest("This model makes no such embeddings.", param="model")


def _check(request: Request, vocab_size: int, context_length: int) -> None:
    """MLX does not check bounds, so every id is checked here once more."""
    prompt = request.prompt
    if len(prompt) == 0:
        raise BadRequest("The prompt is empty.", param="prompt")
    if int(np.min(prompt)) < 0 or int(np.max(prompt)) >= vocab_size:
        raise BadRequest(f"Token ids must lie between 0 and {vocab_size - 1}.", param="prompt")
    if len(prompt) > context_length - (request.pooling is None):
        raise ContextLengthExceeded(len(prompt), context_length)
    if request.spans:
        _check_spans(request)
    for token, _ in request.sampling.logit_bias:
        if not 0 <= token < vocab_size:
            raise BadRequest(f"logit_bias has the id {token}, but ids end at {vocab_size - 1}.", param="logit_bias")
    if request.max_tokens is not None and request.max_tokens < 0:
        raise BadRequest("max_tokens must not be negative.", param="max_tokens")
