"""The engine as the asyncio side sees it: models by name, their requests, and one thread that computes.

`submit`, `abort`, `find`, `counts` and `state` are called on the asyncio thread and never wait.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence

from treadle.config import Config
from treadle.engine.fleet import Fleet
from treadle.engine.slot import Slot
from treadle.engine.stream import Stream
from treadle.engine.thread import EngineThread
from treadle.errors import LoadError, ModelNotFound, NotReady, TreadleError
from treadle.metrics.recorder import Recorder
from treadle.models.load import LoadedModel, ModelCard
from treadle.models.recipe import Recipe
from treadle.types import CacheReport, Request

ABORT_S = 10.0  # how long a shutdown waits for the last outputs of aborted requests
JOIN_S = 5.0  # and for the thread


class Engine:
    """The first model is loaded at the start and is the default; `others` when they are asked for, or pinned.

    `rules`: patterns with `*` for names that nobody has, in the order in which they are tried, and whose they are.
    """

    def __init__(
        self,
        first: Callable[[], LoadedModel] | Recipe,
        config: Config,
        others: Sequence[Recipe] = (),
        rules: Mapping[str, str] | None = None,
    ) -> None:
        self.config = config
        self.recorder = Recorder()
        self._rules = [(_matcher(pattern), name) for pattern, name in (rules or {}).items()]
        self._thread = EngineThread(config, self.recorder)
        recipe = first if isinstance(first, Recipe) else Recipe.of(first, config)
        self._fleet = Fleet([recipe, *others], config, self._thread)
        self._state = "loading"
        self._failure: str | None = None
        self._settled = asyncio.Event()  # the first model is loaded or has failed
        self._opening: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the thread and load the first model, then the pinned ones. On the event loop that uses the engine."""
        self._thread.start()
        self._fleet.start()
        self._opening = asyncio.create_task(self._open())

    async def _open(self) -> None:
        try:
            await self.slots[0].load()
        except TreadleError as error:
            self._failure = error.message
        if self._state == "loading":
            self._state = "ready" if self._failure is None else "failed"
        self._settled.set()
        for slot in self.slots[1:]:
            if slot.pinned and self.failure is None:
                await asyncio.gather(slot.load(), return_exceptions=True)  # its slot says why it failed

    async def ready(self) -> ModelCard:
        """Wait for the first model. Raises LoadError with the reason when it cannot be loaded."""
        await self._settled.wait()
        if self.failure is not None:
            raise LoadError(self.failure)
        return self.model

    @property
    def state(self) -> str:
        """loading | ready | stuck | failed | stopping | stopped"""
        if self._state == "ready" and self._thread.failure is not None:
            return "failed"
        return "stuck" if self._state == "ready" and self._thread.stuck else self._state

    @property
    def failure(self) -> str | None:
        return self._thread.failure or self._failure

    @property
    def slots(self) -> Sequence[Slot]:
        """All models, the first one first."""
        return self._fleet.slots

    def find(self, name: str | None) -> Slot:
        """The model of that name, or that a rule gives it; the first one without a name. Raises ModelNotFound."""
        if not name:
            return self.slots[0]
        found = self._named(name)
        if found is None:
            target = next((target for matches, target in self._rules if matches(name)), None)
            found = None if target is None else self._named(target)
        if found is None:
            known = " and ".join(repr(slot.name) for slot in self.slots)
            are = "is" if len(self.slots) == 1 else "are"
            raise ModelNotFound(f"The model {name[:200]!r} is not served here; {known} {are}.", param="model")
        return found

    def _named(self, name: str) -> Slot | None:
        """A name or an alias wins over a source, whatever the order of the models."""
        named = (slot for slot in self.slots if slot.answers_to(name))
        return next(named, None) or next((slot for slot in self.slots if slot.comes_from(name)), None)

    @property
    def model(self) -> ModelCard:
        """The first model. Raises NotReady while it is not loaded."""
        resident = self.slots[0].resident
        if resident is None:
            raise NotReady(self.failure or f"The model is {self.slots[0].state}.")
        return resident.model

    def submit(self, request: Request) -> Stream:
        """Queue a request for the first model; raises as `Resident.submit`."""
        _ = self.model
        resident = self.slots[0].resident
        assert resident is not None
        return resident.submit(request)

    def abort(self, id: str) -> bool:
        """End a request within one step or one prefill chunk. False when the id is unknown."""
        return self._thread.abort(id)

    def counts(self) -> tuple[int, int]:
        """(running, waiting) requests."""
        return self._thread.counts()

    async def cache_report(self) -> CacheReport:
        """The prefix cache now, of all models. Raises NotReady before the first model is loaded."""
        self._check()
        return await self._thread.cache_report()

    async def cache_clear(self) -> int:
        """Drop every cached prefix that is not in use, on disk too; bytes freed. Raises as `cache_report`."""
        self._check()
        return await self._thread.cache_clear()

    def _check(self) -> None:
        if self._state == "loading":
            raise NotReady("The model is still loading.")
        self._thread.check()
        if self._failure is not None:
            raise NotReady(self._failure)

    async def stop(self) -> None:
        """Refuse new requests, let running ones finish for `drain_s`, abort the rest, end the thread."""
        self._thread.closing = True
        if self._state in ("ready", "loading"):
            self._state = "stopping"
        self._fleet.stop()
        streams = self._thread.streams
        deadline = time.monotonic() + self.config.drain_s
        while streams and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for id in list(streams):
            self.abort(id)
        deadline = time.monotonic() + ABORT_S
        while streams and self._thread.alive and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        await self._thread.end(JOIN_S)
        if self._opening is not None:
            await asyncio.wait([self._opening], timeout=JOIN_S)
        self._state = "stopped"


def _matcher(pattern: str) -> Callable[[str], object]:
    """Whether a name fits a pattern, where `*` stands for anything."""
    return re.compile(".*".join(re.escape(part) for part in pattern.split("*")), re.DOTALL).fullmatch
