"""The engine thread: it owns MLX, and runs the loops of all loaded models, turn by turn.

Everything public may be called on the asyncio thread and never waits, but for the coroutines. Results of one turn
reach asyncio in one hand-over for all streams.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from treadle.config import Config
from treadle.engine.memory import Ledger
from treadle.engine.resident import Resident
from treadle.engine.stream import Stream
from treadle.engine.turns import Turns
from treadle.errors import LoadError, NotReady, TreadleError
from treadle.metrics.recorder import Recorder
from treadle.runtime import device_facts, prepare
from treadle.system import free_memory
from treadle.types import CacheReport, Finish, Output, Request

if TYPE_CHECKING:
    from treadle.cache.store import Store
    from treadle.engine.pressure import Pressure
    from treadle.models.load import LoadedModel
    from treadle.speculate.telemetry import SpeculationCounters

log = logging.getLogger("treadle.engine")

T = TypeVar("T")
ENGINE_THREAD = "treadle-engine"
TIDY_S = 1.0  # an idle engine looks after its cache this often
STUCK_S = 120.0  # a turn of a loop that takes longer counts as a stuck device


class EngineThread:
    """See the module. `failure`: why it has ended before its time."""

    def __init__(self, config: Config, recorder: Recorder) -> None:
        self.failure: str | None = None
        self.closing = False  # set by the asyncio side: no request is taken any more
        self.streams: dict[str, Stream] = {}
        self.ledgers: list[Ledger] = []  # of the loaded models
        self.limit = 0  # bytes, once it runs
        self._config = config
        self._recorder = recorder
        self._store: Store | None = None
        self._pressure: Pressure  # once it runs
        self._residents: list[Resident] = []
        self._speculation: dict[str, SpeculationCounters] = {}  # by model; they outlive an unload
        self._inbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._asked: set[concurrent.futures.Future[Any]] = set()  # those whom the thread owes an answer
        self._ended: str | None = None  # what they are told who ask after its end
        self._running = 0
        self._turn_began: float | None = None
        self._turns: Turns[Resident] = Turns()
        self._thread = threading.Thread(target=self._main, name=ENGINE_THREAD, daemon=True)

    # The asyncio side

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def stuck(self) -> bool:
        """Whether the device does not come back from a turn."""
        began = self._turn_began
        return began is not None and time.monotonic() - began > STUCK_S

    def check(self) -> None:
        """Raises NotReady when it takes no requests any more."""
        if self.failure is not None or self.closing:
            raise NotReady(self.failure or "The server is shutting down.")

    def counts(self) -> tuple[int, int]:
        """(running, waiting) requests of all models."""
        running = min(self._running, len(self.streams))
        return running, len(self.streams) - running

    def submit(self, stream: Stream, request: Request) -> None:
        """Hand a checked request to its model's loop."""
        self.streams[stream.id] = stream
        self._recorder.submitted(request, stream.resident.model.name)
        self._inbox.put(lambda: stream.resident.loop.submit(request))

    def abort(self, id: str, finish: Finish = Finish.ABORT) -> bool:
        """End a request within one step or one prefill chunk. False when the id is unknown."""
        stream = self.streams.get(id)
        if stream is not None:
            resident = stream.resident
            self._inbox.put(lambda: resident in self._residents and resident.loop.abort(id, finish))
        return stream is not None

    @property
    def room(self) -> int:
        """Bytes beside all weights and what running requests were promised; the prefix cache gives way."""
        return self.limit - sum(ledger.taken for ledger in tuple(self.ledgers))

    async def claimed(self) -> int:
        """The memory limit, in bytes, once the thread has the device. Raises NotReady when it cannot have it."""
        return await self.ask(lambda: self.limit)

    async def open(self, load: Callable[[], LoadedModel], config: Config, num_bytes: int) -> Resident:
        """Load a model that takes about `num_bytes`. Raises LoadError with one sentence."""
        return await self.ask(lambda: self._open(load, config, num_bytes))

    async def close(self, resident: Resident) -> None:
        """Unload a model that is not busy; its memory is free when this returns."""
        await self.ask(lambda: self._close(resident))

    async def cache_report(self) -> CacheReport:
        return await self.ask(self._report)

    async def cache_clear(self) -> int:
        return await self.ask(lambda: 0 if self._store is None else self._store.clear())

    async def ask(self, question: Callable[[], T]) -> T:
        """Have the engine thread answer between two turns. Raises NotReady when it has ended."""
        asked: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._asked.add(asked)
        if self._ended is not None:
            self._asked.discard(asked)
            raise NotReady(self._ended)

        def answer() -> None:
            self._asked.discard(asked)
            if asked.set_running_or_notify_cancel():
                try:
                    asked.set_result(question())
                except Exception as error:  # it belongs to whoever asked
                    asked.set_exception(error)

        self._inbox.put(answer)
        return await asyncio.wrap_future(asked)

    async def end(self, within_s: float) -> None:
        """Let the thread end and wait for it, but not longer than `within_s`."""
        self._inbox.put(None)
        if self.alive:
            await asyncio.to_thread(self._thread.join, within_s)

    def _deliver(self, outputs: list[Output]) -> None:
        """On the asyncio thread: hand outputs to their streams."""
        for output in outputs:
            stream = self.streams.get(output.id)
            if stream is not None:
                if output.finish is not None:
                    del self.streams[output.id]
                    stream.resident.ended(output.id)
                stream.put(output)

    # The engine thread

    def _main(self) -> None:
        try:
            self._claim()
            self._run()
        except TreadleError as error:
            self._fail(error.message)
        except Exception as error:  # a bug in a loop itself: say so on every stream, and on /health
            log.exception("The engine thread ended.")
            self._recorder.fault()
            self._fail(f"The engine failed ({type(error).__name__}: {error}).")
        self._ended = self.failure or "The engine has stopped."
        for asked in list(self._asked):
            if asked.set_running_or_notify_cancel():
                asked.set_exception(NotReady(self._ended))

    def _claim(self) -> None:
        prepare()  # before the first import of MLX, which the next line brings
        from treadle.engine.device import claim, reserve_of
        from treadle.engine.pressure import Pressure
        from treadle.engine.reuse import store_of

        self.limit = claim(self._config)
        self._store = store_of(self._config, self.limit)
        facts, free = device_facts(), free_memory()
        self._pressure = Pressure(
            self.limit,
            self._store,
            lambda: [one.loop for one in self._residents],
            reserve=reserve_of(facts, free),
            available=None if facts.backend == "cuda" else free_memory,
        )

    def _run(self) -> None:
        import mlx.core as mx

        while self._drain():
            resident = self._turns.next([one for one in self._residents if one.loop.busy])
            self._turn_began = began = time.monotonic()
            outputs = resident.loop.step()
            took = time.monotonic() - began
            self._pressure.relieve()
            self._turn_began = None
            self._turns.took(resident, took)
            self._running = sum(one.loop.num_running for one in self._residents)
            self._recorder.turn(outputs, took)
            self._send(outputs)
        mx.synchronize()  # a step under way must not outlive this thread's stream
        for resident in self._residents:
            _keep_costs(resident)
        if self._store is not None and self._store.spill is not None:
            self._store.save()  # what was computed last would have been written in the next idle moment
            self._store.spill.tier.stop()

    def _fail(self, reason: str) -> None:
        """Every stream ends with the reason."""
        self.failure = reason
        self._send([Output(id, finish=Finish.ERROR, error=reason) for id in list(self.streams)])

    @property
    def _busy(self) -> bool:
        return any(one.loop.busy for one in self._residents)

    def _drain(self) -> bool:
        """Do what was sent; wait for something when all loops are idle. False at the end."""
        while True:
            self._measure()
            busy = self._busy
            try:
                message = self._inbox.get(timeout=None if busy else TIDY_S, block=not busy)
            except queue.Empty:
                if busy:
                    return True
                self._tidy()
                self._pressure.relieve()
                continue
            if message is None:
                return False
            message()

    def _tidy(self) -> None:
        for resident in self._residents:
            while self._inbox.empty() and resident.loop.reuse.tidy():
                pass

    def _measure(self) -> None:
        if self._recorder.due:
            from treadle.engine.observe import observe

            loops = [one.loop for one in self._residents]
            self._recorder.measured(observe(self.limit, self._store, loops, self._pressure, self._speculation))

    def _open(self, load: Callable[[], LoadedModel], config: Config, num_bytes: int) -> Resident:
        """The traceback of a failure would keep what was loaded: only its sentence goes on."""
        import mlx.core as mx

        reason = ""
        try:
            return self._loaded(load, config, num_bytes)
        except TreadleError as error:
            reason = error.message
        except Exception as error:
            log.exception("Loading failed.")
            reason = f"Loading failed ({type(error).__name__}: {error})."
        gc.collect()
        mx.clear_cache()
        raise LoadError(reason)

    def _loaded(self, load: Callable[[], LoadedModel], config: Config, num_bytes: int) -> Resident:
        import mlx.core as mx

        from treadle.engine.build import build_loop, drafting
        from treadle.engine.kv import formatted

        if self._store is not None:
            self._store.make_room(max(self.room - num_bytes, 0))
        mx.synchronize()  # steps under way would be counted, and so would rubbish
        gc.collect()
        mx.clear_cache()
        before = mx.get_active_memory()
        loaded = formatted(load(), config)
        gc.collect()
        used = mx.get_active_memory() - before
        if used >= self.room:
            raise LoadError(_too_large(used, self.room, self.limit))
        ledger = Ledger(loaded.footprint, used, self.limit, self.ledgers, loaded.footprints)
        try:
            loop = build_loop(loaded, config, ledger, self._store, self._speculation.get(loaded.name))
        except BaseException:
            ledger.close()
            raise
        revisions = {one.revision for one in (loaded, *loaded.helpers)}
        if loop.speculation is not None:
            self._speculation[loaded.name] = loop.speculation.counters
        self._pressure.attach(loop)
        drafts = drafting(loaded, config)
        resident = Resident(loaded.card, config, ledger, loop, self, revisions, drafts, loaded.calibration)
        self._residents.append(resident)
        return resident

    def _close(self, resident: Resident) -> None:
        import mlx.core as mx

        self._residents.remove(resident)
        _keep_costs(resident)
        resident.ledger.close()
        for revision in resident.revisions.difference(*(one.revisions for one in self._residents)):
            resident.loop.reuse.leave(revision)
        mx.synchronize()
        del resident.loop
        gc.collect()
        mx.clear_cache()

    def _report(self) -> CacheReport:
        from treadle.cache.report import cache_report

        notes = " ".join(dict.fromkeys(one.loop.reuse.note for one in self._residents if one.loop.reuse.note))
        unused = self._residents and all(one.loop.reuse.store is None for one in self._residents)
        if self._store is None or unused:
            return CacheReport(note=notes)
        return cache_report(self._store, notes)

    def _send(self, outputs: list[Output]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[Output]] = {}
        for output in outputs:
            stream = self.streams.get(output.id)
            if stream is not None:
                by_loop.setdefault(stream.loop, []).append(output)
        for loop, batch in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._deliver, batch)


def _keep_costs(resident: Resident) -> None:
    from treadle.engine.build import keep_costs

    keep_costs(resident.calibration, resident.loop)


def _too_large(used: int, room: int, limit: int) -> str:
    left = "" if room == limit else f" ({max(room, 0) / 1e9:.2f} GB are left beside other models)"
    return (
        f"The model alone takes {used / 1e9:.2f} GB, "
        f"but the server may use {limit / 1e9:.2f} GB{left} (memory_limit_gb)."
    )
