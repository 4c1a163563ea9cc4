"""One client request as engine requests: its choices, their merged events, its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from treadle.api.ports import EnginePort, StreamPort
from treadle.errors import Cancelled, EngineFault, Preempted, ShuttingDown, TimedOut, TreadleError
from treadle.output.stream import Event
from treadle.types import Finish, Usage

Sink = Callable[[int, Event], None]


@dataclass(frozen=True, slots=True)
class Choice:
    """One reply being made: its place in the answer, and whether its prompt is counted in the usage."""

    index: int
    stream: StreamPort
    events: AsyncIterator[Event]
    counts_prompt: bool


class Running:
    """A client request while engine requests of it run: in `jobs` from here to `close`."""

    def __init__(self, id: str, jobs: Jobs) -> None:
        self.id = id
        self.created = int(time.time())
        self._jobs = jobs
        self._cancelled = False
        jobs.add(self)

    def cancel(self) -> None:
        """End it while its client still listens."""
        self._cancelled = True
        self.end()

    def close(self) -> None:
        """Leave the running jobs; sequences that have not finished are aborted. May be called twice."""
        self._jobs.remove(self.id)
        self.end()

    def end(self) -> None:
        """Abort what has not finished; the engine says why."""
        raise NotImplementedError

    def fault(self, finish: Finish, error: str | None) -> TreadleError:
        """Why it ended without a reply. The engine gives a sentence with an abort only for the time limit."""
        if finish is Finish.ERROR:
            return EngineFault(error or "The engine failed on this request.")
        if self._cancelled:
            return Cancelled("The request was cancelled.")
        if error is not None:
            return TimedOut(error, param="timeout")
        if self._jobs.stopping:
            return ShuttingDown("The server is shutting down.")
        return Preempted("A newer request took the place of this one.")


class Job(Running):
    """All choices of one client request. Run once, on one event loop."""

    def __init__(self, id: str, jobs: Jobs) -> None:
        super().__init__(id, jobs)
        self._choices: list[Choice] = []
        self._usages: dict[int, Usage] = {}

    def add(self, choice: Choice) -> None:
        """One more reply; before `run`."""
        self._choices.append(choice)

    async def run(self, sink: Sink) -> None:
        """Hand every event to `sink` as it comes. Raises the error of the first choice that fails."""
        if len(self._choices) == 1:
            await self._follow(self._choices[0], sink)
            return
        tasks = [asyncio.create_task(self._follow(choice, sink)) for choice in self._choices]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, choice: Choice, sink: Sink) -> None:
        async for event in choice.events:
            if event.usage is not None:
                self._usages[choice.index] = event.usage
            if event.finish in (Finish.ABORT, Finish.ERROR):
                raise self.fault(event.finish, event.error)
            sink(choice.index, event)

    def end(self) -> None:
        """Abort what has not finished; the engine says why."""
        for choice in self._choices:
            if choice.index not in self._usages:
                choice.stream.abort()

    @property
    def usage(self) -> Usage:
        """Counts over all choices; each prompt counts once, however many choices it has."""
        done = [(choice, self._usages[choice.index]) for choice in self._choices if choice.index in self._usages]
        prompts = [usage for choice, usage in done if choice.counts_prompt]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in prompts),
            completion_tokens=sum(usage.completion_tokens for _, usage in done),
            cached_tokens=sum(usage.cached_tokens for usage in prompts),
            drafted_tokens=sum(usage.drafted_tokens for _, usage in done),
            accepted_tokens=sum(usage.accepted_tokens for _, usage in done),
            vision_s=sum(usage.vision_s for _, usage in done),
            sparse=next((usage.sparse for usage in prompts), None),
        )


class Jobs:
    """The running jobs by the id that clients see."""

    def __init__(self, engine: EnginePort) -> None:
        self._engine = engine
        self._running: dict[str, Running] = {}
        self._ended = False

    @property
    def stopping(self) -> bool:
        """Whether the engine ends, and everything with it."""
        return self._ended or self._engine.state in ("stopping", "stopped")

    def add(self, job: Running) -> None:
        self._running[job.id] = job

    def remove(self, id: str) -> None:
        self._running.pop(id, None)

    def cancel(self, id: str) -> bool:
        """Whether there was such a job."""
        job = self._running.get(id)
        if job is not None:
            job.cancel()
        return job is not None

    def end(self) -> None:
        """Stop all of them, for good: the server shuts down, whether or not the engine knows by now."""
        self._ended = True
        for job in list(self._running.values()):
            job.end()

    def __len__(self) -> int:
        return len(self._running)
