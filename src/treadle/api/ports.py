"""What the HTTP side needs of the engine, as types: the engine is handed in, never imported.

`treadle.engine.engine.Engine` satisfies `EnginePort`, `Slot` and `Resident` of its neighbours `SlotPort` and
`ResidentPort`; and so does any scripted engine of the tests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from treadle.metrics.recorder import Recorder
from treadle.types import CacheReport, Caps, Drafting, Finish, Ids, Output, Request, Skimming, Span


class ReaderPort(Protocol):
    """What reads the pictures of requests; it decodes, resizes and may wait, so not on the asyncio thread."""

    @property
    def marker(self) -> str:
        """What the chat template writes in the place of a picture."""
        ...

    def read(self, url: str, param: str, low: bool = False) -> Any:
        """A picture with the `text` that stands for it in a prompt. Raises BadRequest."""
        ...

    def spans(self, ids: Ids, shown: Sequence[Any]) -> tuple[Span, ...]:
        """Where they lie in a prompt. Raises BadRequest."""
        ...


class ModelPort(Protocol):
    """The parts of a loaded model that may be read on the asyncio thread."""

    @property
    def name(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def revision(self) -> str: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def caps(self) -> Caps: ...
    @property
    def stop_ids(self) -> frozenset[int]: ...
    @property
    def defaults(self) -> Mapping[str, Any]: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def reader(self) -> ReaderPort | None:
        """None for a model that sees nothing."""
        ...


class StreamPort(Protocol):
    """The outputs of one sequence; ends after the one with `finish`."""

    @property
    def id(self) -> str: ...
    def abort(self, finish: Finish = Finish.ABORT) -> None: ...
    def __aiter__(self) -> AsyncIterator[Output]: ...


class ResidentPort(Protocol):
    """A model in memory. `submit` is called on the asyncio thread and raises at once."""

    @property
    def model(self) -> ModelPort: ...
    def submit(self, request: Request) -> StreamPort: ...


class FactsPort(Protocol):
    """What stays known of a model that was loaded once."""

    @property
    def source(self) -> str: ...
    @property
    def revision(self) -> str: ...
    @property
    def caps(self) -> Caps: ...
    @property
    def chat_template(self) -> bool: ...


class SlotPort(Protocol):
    """One model by its name, loaded or not."""

    @property
    def name(self) -> str: ...
    @property
    def aliases(self) -> Sequence[str]: ...
    @property
    def pinned(self) -> bool: ...
    @property
    def state(self) -> str:
        """unloaded | loading | ready | failed"""
        ...

    @property
    def failure(self) -> str | None: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def facts(self) -> FactsPort | None: ...
    @property
    def resident(self) -> ResidentPort | None: ...
    @property
    def drafting(self) -> Drafting | None:
        """What speculation is in force while it is loaded."""
        ...

    @property
    def skimming(self) -> Skimming | None:
        """What sparse prefill is in force while it is loaded."""
        ...

    def use(self) -> AbstractAsyncContextManager[ResidentPort]:
        """The loaded model, which stays so while inside; waits for a load. Raises NotReady with the reason."""
        ...

    async def load(self) -> None:
        """Raises NotReady with the reason."""
        ...

    async def unload(self) -> bool:
        """Wait for what runs, then unload; whether it was loaded. Raises ModelInUse."""
        ...


class EnginePort(Protocol):
    """The engine as the API sees it."""

    @property
    def state(self) -> str: ...
    @property
    def failure(self) -> str | None: ...
    @property
    def recorder(self) -> Recorder: ...
    @property
    def slots(self) -> Sequence[SlotPort]:
        """All models; the first is the default."""
        ...

    def find(self, name: str | None) -> SlotPort:
        """The model of that name, or that a rule gives it; the default one without a name. Raises ModelNotFound."""
        ...

    def start(self) -> None: ...
    def counts(self) -> tuple[int, int]: ...
    async def cache_report(self) -> CacheReport:
        """The prefix cache between two steps of the loop. Raises NotReady when no loop runs."""
        ...

    async def cache_clear(self) -> int:
        """Drop every prefix that no request uses; the bytes freed. Raises NotReady when no loop runs."""
        ...

    async def stop(self) -> None: ...


class OneModelPort(EnginePort, ResidentPort, Protocol):
    """An engine whose first model is asked without a server."""
