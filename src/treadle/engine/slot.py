"""One model by its name, loaded or not. asyncio thread only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from treadle.engine.resident import Resident
from treadle.errors import NotReady, QueueFull, ShuttingDown
from treadle.models.recipe import Recipe
from treadle.types import Caps, Drafting, Skimming

if TYPE_CHECKING:
    from treadle.engine.fleet import Fleet

FAILED_S = 10.0  # a load that failed is not tried again for so long, unless somebody asks for just that


@dataclass(frozen=True, slots=True)
class Facts:
    """What stays known of a model that was loaded once."""

    name: str
    source: str
    revision: str
    caps: Caps
    chat_template: bool


class Slot:
    """The model's state, and the way to use it: whoever does waits until it is loaded."""

    def __init__(self, recipe: Recipe, fleet: Fleet) -> None:
        self.recipe = recipe
        self.resident: Resident | None = None
        self.leaving = False  # to be unloaded as soon as nothing of it runs
        self.failure: str | None = None
        self.failed_at = 0.0
        self.failure_code: str | None = None
        self.facts: Facts | None = None
        self._waiting: set[object] = set()
        self._owed: set[object] = set()  # those of them for whom it was loaded and who have not taken it up yet
        self._fleet = fleet
        self._loading: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.recipe.name if self.facts is None else self.facts.name

    @property
    def aliases(self) -> tuple[str, ...]:
        return tuple(name for name in self.recipe.aliases if name != self.name)

    @property
    def pinned(self) -> bool:
        return self.recipe.pinned

    @property
    def caps(self) -> Caps | None:
        """None until it was loaded once."""
        return None if self.facts is None else self.facts.caps

    @property
    def drafting(self) -> Drafting | None:
        """What speculation is in force while it is loaded."""
        return None if self.resident is None else self.resident.drafting

    @property
    def skimming(self) -> Skimming | None:
        """What sparse prefill is in force while it is loaded."""
        return None if self.resident is None else self.resident.skimming

    @property
    def num_bytes(self) -> int:
        """Of its weights in memory; 0 while it is not loaded."""
        return 0 if self.resident is None else self.resident.ledger.base

    @property
    def busy(self) -> bool:
        """Whether unloading it would take it from somebody."""
        return bool(self._owed) or (self.resident is not None and self.resident.busy)

    @property
    def state(self) -> str:
        """unloaded | loading | ready | failed"""
        if self.resident is not None and not self.leaving:
            return "ready"
        if self._loading is not None:
            return "loading"
        return "failed" if self.failure is not None else "unloaded"

    def answers_to(self, name: str) -> bool:
        """Whether that is its name or an alias."""
        return name in (self.name, self.recipe.name, *self.recipe.aliases)

    def comes_from(self, source: str) -> bool:
        """Whether that is its source, as it was written or, once it was loaded, as a path."""
        return source in (self.recipe.source, "" if self.facts is None else self.facts.source)

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Resident]:
        """The loaded model, which stays loaded while inside; it is loaded first if it has to be.

        Raises NotReady with the reason when that fails, QueueFull when too many wait already.
        """
        resident = self.resident if not self.leaving else None
        resident = resident or await self.loaded()
        with resident.held():
            yield resident

    async def loaded(self, again: bool = False) -> Resident:
        """Wait until it is loaded. `again`: try it even if that failed a moment ago. Raises as `use`."""
        if not again and self.failure is not None and time.monotonic() - self.failed_at < FAILED_S:
            raise NotReady(self.failure, code=self.failure_code)
        if len(self._waiting) >= self.recipe.config.max_waiting:
            raise QueueFull(f"{len(self._waiting)} requests wait for {self.name!r} already; try again shortly.")
        one = object()
        self._waiting.add(one)
        try:
            while self.resident is None or (self.leaving and one not in self._owed):
                await self._load()
            return self.resident
        finally:
            self._waiting.discard(one)
            self._owed.discard(one)

    async def _load(self) -> None:
        """Join the load that is under way, or begin one. It goes on when whoever waits for it leaves."""
        self._fleet.check()
        if self._loading is None:
            self._loading = asyncio.create_task(self._fleet.load(self))
            self._loading.add_done_callback(self._settled)
        task = self._loading
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise ShuttingDown("The server is shutting down.") from None
            raise

    def _settled(self, task: asyncio.Task[None]) -> None:
        self._loading = None
        if not task.cancelled():
            task.exception()  # it was told to those who waited, if any did

    def cancel(self) -> None:
        """The server stops: those who wait learn so."""
        if self._loading is not None:
            self._loading.cancel()

    def became(self, resident: Resident) -> None:
        """It is loaded."""
        model = resident.model
        self.resident, self.failure = resident, None
        self._owed = set(self._waiting)
        self.facts = Facts(model.name, model.source, model.revision, model.caps, model.chat_template is not None)

    def failed(self, reason: str, code: str | None) -> None:
        """A load of it failed. `code` is for clients."""
        self.failure, self.failure_code, self.failed_at = reason, code, time.monotonic()

    async def load(self) -> None:
        """Load it by hand. Raises NotReady with the reason when that fails."""
        await self.loaded(again=True)

    async def unload(self) -> bool:
        """Unload it by hand, when what runs has ended; whether it was loaded. Raises ModelInUse."""
        return await self._fleet.unload(self)
