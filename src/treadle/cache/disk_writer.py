"""The one I/O thread of the disk tier and its bounded queue. Whoever offers work never waits for the disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Condition, Thread

from treadle.cache.disk_format import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One file to be written."""

    key: bytes
    tensors: Sequence[Tensor]
    generation: int  # of the index when it was offered

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class DiskWriter:
    """Calls `store` with each job, in the order offered, and `tidy` after each and whenever woken."""

    def __init__(
        self, store: Callable[[Job], None], tidy: Callable[[], None], *, max_jobs: int, max_bytes: int
    ) -> None:
        self._store = store
        self._tidy = tidy
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        self._changed = Condition()
        self._queue: dict[bytes, Job] = {}  # oldest first
        self._current: Job | None = None
        self._nbytes = 0  # of the queue and the current job
        self._woken = False
        self._thread: Thread | None = None

    def start(self) -> None:
        """Raises RuntimeError if it runs already."""
        with self._changed:
            if self._thread is not None:
                raise RuntimeError("The disk writer runs already.")
            self._thread = Thread(target=self._run, name="treadle-disk", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Take no more jobs, do those that wait, and return when the thread has ended. May be repeated."""
        with self._changed:
            thread, self._thread = self._thread, None
            self._changed.notify()
        if thread is not None:
            thread.join()

    def offer(self, job: Job) -> bool:
        """Queue a job, once per key; False if the queue is full or nothing runs."""
        with self._changed:
            if job.key in self._queue:
                return True
            full = len(self._queue) >= self._max_jobs or self._nbytes + job.nbytes > self._max_bytes
            if full or self._thread is None:
                return False
            self._queue[job.key] = job
            self._nbytes += job.nbytes
            self._changed.notify()
        return True

    def wake(self) -> None:
        """Have `tidy` called soon."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def __contains__(self, key: bytes) -> bool:
        """Whether a job for `key` waits or is being done."""
        with self._changed:
            return key in self._queue or (self._current is not None and self._current.key == key)

    def __len__(self) -> int:
        """How many jobs wait."""
        return len(self._queue)

    def forget(self) -> None:
        """Drop the jobs that wait."""
        with self._changed:
            self._nbytes -= sum(job.nbytes for job in self._queue.values())
            self._queue.clear()

    def _run(self) -> None:
        while self._step():
            pass

    def _step(self) -> bool:
        """One job or one tidying; False when there is nothing left to do for good. Its locals die with it."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._woken or self._thread is None)
            going_on = bool(self._queue) or self._thread is not None
            self._woken = False
            if self._queue:
                self._current = self._queue.pop(next(iter(self._queue)))
        if self._current is not None:
            self._store(self._current)
            self._finish(self._current)
        self._tidy()
        return going_on

    def _finish(self, job: Job) -> None:
        with self._changed:
            self._nbytes -= job.nbytes
            self._current = None
