"""Which models are in memory: loads on demand, one at a time, and room for them. asyncio thread only.

Room is made by unloading what is idle, least recently used first, then what is busy, once its requests have ended.
What runs is never cut off: a model in use takes no new requests while it drains (they wait and have it loaded again),
and where draining takes longer than `model_wait_s` the load is given up instead.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from treadle.config import Config
from treadle.engine.slot import Slot
from treadle.engine.thread import EngineThread
from treadle.errors import ConfigError, LoadError, ModelInUse, NotReady, TreadleError
from treadle.models.recipe import Prepared, Recipe

log = logging.getLogger("treadle.engine")

T = TypeVar("T")
FILES_THREAD = "treadle-files"
LOOK_S = 0.01  # how often a load that waits for others looks at them
IDLE_LOOKS = 10  # looks at idle models within their idle time
SPARE_SHARE = 1 / 16  # of the memory limit that is left for requests where unloading can do that


class Fleet:
    """The slots of all models, in the order of `recipes`; the first is the default."""

    def __init__(self, recipes: Sequence[Recipe], config: Config, thread: EngineThread) -> None:
        self.slots = [Slot(recipe, self) for recipe in recipes]
        self._config = config
        self._thread = thread
        self._turn = asyncio.Lock()  # one load or unload at a time
        self._idle: asyncio.Task[None] | None = None

    def check(self) -> None:
        """Raises NotReady when the engine has failed or is about to stop."""
        self._thread.check()

    def start(self) -> None:
        """Look after idle models, if that is wanted."""
        if self._config.model_idle_s is not None:
            self._idle = asyncio.create_task(self._unload_idle(self._config.model_idle_s))

    def stop(self) -> None:
        """Nothing is loaded or unloaded any more."""
        if self._idle is not None:
            self._idle.cancel()
        for slot in self.slots:
            slot.cancel()

    async def load(self, slot: Slot) -> None:
        """Get the files, make room, load. Raises NotReady with the reason, for all who wait."""
        try:
            async with self._turn:
                await self._thread.claimed()
                if slot.resident is None:
                    await self._load(slot, await apart(slot.recipe.prepare))
        except (LoadError, ConfigError) as error:
            log.warning("Loading %s failed: %s", slot.name, error.message)
            slot.failed(error.message, error.code)
            raise NotReady(error.message, code=error.code) from error
        except TreadleError:
            raise  # no fault of the model's
        except Exception as error:
            log.exception("Loading %s failed.", slot.name)
            reason = f"Loading failed ({type(error).__name__}: {error})."
            slot.failed(reason, LoadError.code)
            raise NotReady(reason, code=LoadError.code) from error

    async def _load(self, slot: Slot, prepared: Prepared) -> None:
        if prepared.lighter is not None and prepared.num_bytes > self._most:
            prepared = prepared.lighter
        await self._make_room(prepared.num_bytes, slot)
        began = time.monotonic()
        slot.became(await self._thread.open(prepared.load, slot.recipe.config, prepared.num_bytes))
        log.info("Loaded %s: %.2f GB in %.1f s.", slot.name, slot.num_bytes / 1e9, time.monotonic() - began)

    @property
    def _most(self) -> int:
        """Bytes of weights that one model may have at all."""
        return self._thread.limit - sum(other.num_bytes for other in self.slots if other.pinned)

    async def _make_room(self, num_bytes: int, slot: Slot) -> None:
        """Unload until `num_bytes` of weights fit. Raises NotReady when they do not in time, or cannot."""
        limit, most = self._thread.limit, self._most
        if num_bytes > most:
            raise LoadError(
                f"The model {slot.name!r} needs about {num_bytes / 1e9:.2f} GB, but the server may use "
                f"{most / 1e9:.2f} GB for it (memory_limit_gb)."
            )
        deadline = time.monotonic() + self._config.model_wait_s
        while (room := self._thread.room) < num_bytes + limit * SPARE_SHARE:
            victim = self._victim()
            if victim is not None:
                await self._leave(victim, slot, deadline)
            elif room >= num_bytes:
                return
            elif time.monotonic() > deadline:
                raise NotReady(f"Running requests need the memory that the model {slot.name!r} would take.")
            else:
                await asyncio.sleep(LOOK_S)

    async def _leave(self, victim: Slot, slot: Slot, deadline: float) -> None:
        try:
            await self._drain(victim, deadline)
        except ModelInUse as error:
            raise NotReady(f"There is no room for the model {slot.name!r}. {error.message}") from error

    def _victim(self) -> Slot | None:
        """The model to unload next: an idle one before a busy one, and the least recently used before others."""

        def order(slot: Slot) -> tuple[bool, float]:
            assert slot.resident is not None
            return slot.busy, slot.resident.used

        return min((s for s in self.slots if s.resident is not None and not s.pinned), key=order, default=None)

    async def _drain(self, slot: Slot, deadline: float) -> None:
        """Unload one as soon as its requests have ended. Raises ModelInUse when they have not by `deadline`."""
        resident = slot.resident
        assert resident is not None
        slot.leaving = True
        try:
            while slot.busy:
                if time.monotonic() > deadline:
                    raise ModelInUse(f"The model {slot.name!r} was in use for all of {self._config.model_wait_s:g} s.")
                await asyncio.sleep(LOOK_S)
            slot.resident = None  # from here on its loop may be gone
            await self._thread.close(resident)
            log.info("Unloaded %s.", slot.name)
        finally:
            slot.leaving = False

    async def unload(self, slot: Slot) -> bool:
        """Unload `slot`; whether there was anything to unload. Raises ModelInUse, NotReady."""
        async with self._turn:
            if slot.resident is None:
                return False
            await self._drain(slot, time.monotonic() + self._config.model_wait_s)
            return True

    async def _unload_idle(self, idle_s: float) -> None:
        """As long as there is an engine: unload what nobody has used for `idle_s`."""
        while self._thread.failure is None:
            await asyncio.sleep(idle_s / IDLE_LOOKS)
            for slot in self.slots:
                if self._idle_for(slot) >= idle_s:
                    await self._unload_if_idle(slot, idle_s)

    async def _unload_if_idle(self, slot: Slot, idle_s: float) -> None:
        async with self._turn:
            if self._idle_for(slot) >= idle_s:
                await self._drain(slot, time.monotonic())

    def _idle_for(self, slot: Slot) -> float:
        """Seconds since an idle, unpinned model was used; negative for any other."""
        resident = slot.resident
        if resident is None or slot.pinned or slot.busy:
            return -1.0
        return time.monotonic() - resident.used


async def apart(work: Callable[[], T]) -> T:
    """What `work` gives, from a thread that keeps no process from ending: a download may take hours."""
    done: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        if done.set_running_or_notify_cancel():
            try:
                done.set_result(work())
            except BaseException as error:  # it belongs to whoever waits
                done.set_exception(error)

    threading.Thread(target=run, name=FILES_THREAD, daemon=True).start()
    return await asyncio.wrap_future(done)
