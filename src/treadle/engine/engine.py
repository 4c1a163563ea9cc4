"""The engine: one thread that owns MLX, the model and the loop; streams of `Output` for the asyncio side.

`submit`, `abort`, `counts` and `state` may be called on the asyncio thread and never wait. Results of one turn of the
loop reach asyncio in one hand-over for all streams.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np

from treadle.config import Config
from treadle.engine.memory import Ledger
from treadle.errors import BadRequest, ContextLengthExceeded, LoadError, NotReady, QueueFull, TreadleError
from treadle.types import CacheReport, Finish, Output, Request

if TYPE_CHECKING:
    from treadle.engine.loop import Loop
    from treadle.models.load import LoadedModel

log = logging.getLogger("treadle.engine")

T = TypeVar("T")
ABORT_S = 10.0  # how long a shutdown waits for the last outputs of aborted requests
TIDY_S = 1.0  # an idle engine looks after its cache this often
STUCK_S = 120.0  # a turn of the loop that takes longer counts as a stuck device


class Stream:
    """The outputs of one request, for one asyncio loop; ends after the output with `finish`."""

    def __init__(self, id: str, engine: Engine) -> None:
        self.id = id
        self.loop = asyncio.get_running_loop()
        self._engine = engine
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

    def abort(self) -> None:
        """Stop the work for this request; the stream still ends with its last output."""
        self._engine.abort(self.id)


class Engine:
    """Owns the engine thread. `load` runs on that thread, because lazy arrays cannot change threads."""

    def __init__(self, load: Callable[[], LoadedModel], config: Config) -> None:
        self.config = config
        self.failure: str | None = None
        self._load = load
        self._loaded: LoadedModel | None = None
        self._ledger: Ledger  # from the moment the model is loaded
        self._state = "loading"
        self._settled = threading.Event()  # loaded or failed
        self._inbox: queue.SimpleQueue[Callable[[Loop], object] | None] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}
        self._running = 0
        self._turn_began: float | None = None
        self._thread = threading.Thread(target=self._main, name="treadle-engine", daemon=True)

    # The asyncio side

    def start(self) -> None:
        self._thread.start()

    @property
    def state(self) -> str:
        """loading | ready | stuck | failed | stopping | stopped"""
        began = self._turn_began
        if self._state == "ready" and began is not None and time.monotonic() - began > STUCK_S:
            return "stuck"
        return self._state

    @property
    def model(self) -> LoadedModel:
        if self._loaded is None:
            raise NotReady(self.failure or "The model is still loading.")
        return self._loaded

    async def ready(self) -> LoadedModel:
        """Wait for the model. Raises LoadError with the reason when it cannot be loaded."""
        await asyncio.to_thread(self._settled.wait)
        if self.failure is not None:
            raise LoadError(self.failure)
        return self.model

    def counts(self) -> tuple[int, int]:
        """(running, waiting) requests."""
        running = min(self._running, len(self._streams))
        return running, len(self._streams) - running

    def submit(self, request: Request) -> Stream:
        """Queue a request. Raises NotReady, QueueFull, BadRequest, ContextLengthExceeded or MemoryRefused at once."""
        caps = self.model.caps
        if self._state != "ready":
            raise NotReady(self.failure or "The server is shutting down.")
        _check(request, caps.vocab_size, caps.context_length)
        rows = 1 if self.config.on_busy == "queue" else self.config.max_rows
        if len(self._streams) >= rows + self.config.max_waiting:
            raise QueueFull(f"{len(self._streams)} requests are running or waiting already; try again shortly.")
        if request.id in self._streams:
            raise BadRequest(f"The request id {request.id!r} is in use.", param="id")
        self._ledger.check(
            len(request.prompt),
            caps.context_length - len(request.prompt) if request.max_tokens is None else request.max_tokens,
        )
        stream = self._streams[request.id] = Stream(request.id, self)
        self._inbox.put(lambda loop: loop.submit(request))
        return stream

    def abort(self, id: str) -> bool:
        """End a request within one step or one prefill chunk. False when the id is unknown."""
        known = id in self._streams
        if known:
            self._inbox.put(lambda loop: loop.abort(id))
        return known

    async def cache_report(self) -> CacheReport:
        """The prefix cache now. Raises NotReady without a model."""
        return await self._ask(lambda loop: loop.reuse.report())

    async def cache_clear(self) -> int:
        """Drop every cached prefix that is not in use, on disk too; bytes freed. Raises NotReady without a model."""
        return await self._ask(lambda loop: loop.reuse.clear())

    async def _ask(self, question: Callable[[Loop], T]) -> T:
        """Have the engine thread answer between two turns of its loop."""
        _ = self.model
        if self._state != "ready":
            raise NotReady(self.failure or "The server is shutting down.")
        asked: concurrent.futures.Future[T] = concurrent.futures.Future()

        def answer(loop: Loop) -> None:
            if asked.set_running_or_notify_cancel():
                try:
                    asked.set_result(question(loop))
                except Exception as error:  # it belongs to whoever asked
                    asked.set_exception(error)

        self._inbox.put(answer)
        return await asyncio.wrap_future(asked)

    async def stop(self) -> None:
        """Refuse new requests, let running ones finish for `drain_s`, abort the rest, end the thread."""
        if self._state in ("ready", "loading"):
            self._state = "stopping"
        deadline = time.monotonic() + self.config.drain_s
        while self._streams and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for id in list(self._streams):
            self.abort(id)
        deadline = time.monotonic() + ABORT_S
        while self._streams and self._thread.is_alive() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        self._inbox.put(None)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, 5.0)
        self._state = "stopped"

    def _deliver(self, outputs: list[Output]) -> None:
        """On the asyncio thread: hand outputs to their streams."""
        for output in outputs:
            stream = self._streams.get(output.id)
            if stream is not None:
                if output.finish is not None:
                    del self._streams[output.id]
                stream.put(output)

    # The engine thread

    def _main(self) -> None:
        try:
            loop = self._open()
        except TreadleError as error:
            self._fail(error.message)
            return
        except Exception as error:
            log.exception("Loading failed.")
            self._fail(f"Loading failed ({type(error).__name__}: {error}).")
            return
        import mlx.core as mx

        try:
            self._run(loop)
            mx.synchronize()  # a step under way must not outlive this thread's stream
        except Exception as error:  # a bug in the loop itself: say so on every stream, and on /health
            log.exception("The engine thread ended.")
            self._fail(f"The engine failed ({type(error).__name__}: {error}).")
            self._send([Output(id, finish=Finish.ERROR, error=self.failure) for id in list(self._streams)])

    def _run(self, loop: Loop) -> None:
        while self._drain(loop):
            self._turn_began = time.monotonic()
            outputs = loop.step()
            self._running = loop.num_running
            self._turn_began = None
            self._send(outputs)

    def _open(self) -> Loop:
        import mlx.core as mx

        from treadle.engine.device import claim
        from treadle.engine.loop import Loop
        from treadle.engine.reuse import Reuse, store_of
        from treadle.grammar.compile import grammars_of
        from treadle.models.capabilities import new_layers

        limit = claim(self.config)
        loaded = self._load()
        used = mx.get_active_memory()
        if used >= limit:
            raise LoadError(
                f"The model alone takes {used / 1e9:.2f} GB, "
                f"but the server may use {limit / 1e9:.2f} GB (memory_limit_gb)."
            )
        self._ledger = Ledger(loaded.caps.footprint, used, limit)
        layers = partial(new_layers, loaded.model, loaded.caps)
        store = store_of(self.config, limit)
        reuse = Reuse(store, loaded.caps, self.config.checkpoint_every, loaded.revision)
        grammars = partial(grammars_of, loaded.tokenizer, loaded.caps.vocab_size, loaded.stop_ids)
        loop = Loop(loaded.model, loaded.caps, self.config, layers, self._ledger, reuse, grammars=grammars)
        self._loaded = loaded
        if self._state == "loading":
            self._state = "ready"
        self._settled.set()
        return loop

    def _fail(self, reason: str) -> None:
        self.failure, self._state = reason, "failed"
        self._settled.set()

    def _drain(self, loop: Loop) -> bool:
        """Run what was sent to the loop; wait for something when it is idle. False at the end."""
        while True:
            try:
                message = self._inbox.get(timeout=None if loop.busy else TIDY_S, block=not loop.busy)
            except queue.Empty:
                if loop.busy:
                    return True
                while self._inbox.empty() and loop.reuse.tidy():
                    pass
                continue
            if message is None:
                loop.reuse.close()
                return False
            message(loop)

    def _send(self, outputs: list[Output]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[Output]] = {}
        for output in outputs:
            stream = self._streams.get(output.id)
            if stream is not None:
                by_loop.setdefault(stream.loop, []).append(output)
        for loop, batch in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._deliver, batch)


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
