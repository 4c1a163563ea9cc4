"""The disk tier of the prefix cache: blocks of rows that survive a restart.

It knows neither the tree nor MLX: keys (`cache/disk_keys.py`) go in with raw tensors, and come out with them.
Reading happens on the calling thread, writing on one I/O thread. No failure of the disk reaches a request: it is a
miss or a write that did not happen, counted, and logged once per kind.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from treadle.cache.disk_folder import DiskFolder, Stored
from treadle.cache.disk_format import Damaged, Tensor, decode, encode, require_names
from treadle.cache.disk_index import DiskIndex
from treadle.cache.disk_keys import KEY_BYTES
from treadle.cache.disk_writer import DiskWriter, Job

log = logging.getLogger(__name__)

RESCAN_S = 60.0  # how often an active tier looks for what other processes did to the folder


@dataclass(frozen=True, slots=True)
class DiskSnapshot:
    """The state of the tier, and what happened since it was made."""

    bytes: int  # stored
    files: int  # stored
    queued: int  # files that wait to be written
    hits: int  # files read
    misses: int  # files asked for in vain
    written: int
    skipped: int  # not written: queue full, no room on the disk, larger than the tier, or stopped
    failed: int  # not written: the disk refused
    damaged: int  # found unsound and removed
    evicted: int


class DiskTier:
    """See the module. Any thread may call any method but `start` and `stop`, which belong to the owner.

    `folder` gets a private folder inside it; `clock` gives seconds since the epoch. What waits to be written is held
    in memory: at most `queue_files` files and `queue_bytes` bytes.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        *,
        free_floor_bytes: int,
        clock: Callable[[], float] = time.time,
        queue_files: int = 256,
        queue_bytes: int = 1 << 30,
    ) -> None:
        self._folder = DiskFolder(folder)
        self._max_bytes = max_bytes
        self._free_floor_bytes = free_floor_bytes
        self._clock = clock
        self._index = DiskIndex(clock)
        self._writer = DiskWriter(self._store, self._tidy, max_jobs=queue_files, max_bytes=queue_bytes)
        self._scanned = 0.0
        self._counts: Counter[str] = Counter()
        self._logged: set[str] = set()
        self._lock = Lock()  # of the counts

    @property
    def folder(self) -> Path:
        """Where the files lie."""
        return self._folder.path

    def start(self) -> None:
        """Take over what an earlier process left. Raises ConfigError if there can be no private folder."""
        self._folder.prepare()
        try:
            self._rescan()
            self._folder.remove_leftovers()
        except OSError as error:
            self._report("start", error)
        self._writer.start()
        self._writer.wake()  # the limit may have become smaller

    def stop(self) -> None:
        """Write what waits and end the thread. What is stored can still be read."""
        self._writer.stop()

    # -- looking up

    def longest(self, keys: Sequence[bytes]) -> int:
        """How many leading keys are stored; no disk access. Counts as a use of them."""
        count = self._index.leading(keys)
        if count:
            self._writer.wake()
        return count

    def missing(self, keys: Sequence[bytes]) -> list[bytes]:
        """The keys that are neither stored nor waiting to be written. Counts as a use of the others."""
        # In this order: a job enters the index before it leaves the writer.
        absent = [key for key in keys if key not in self._writer and key not in self._index]
        self._index.touch(keys)
        self._writer.wake()
        return absent

    def get(self, key: bytes) -> list[Tensor] | None:
        """Read and verify one file; None if there is none that is sound. The data are views of one buffer."""
        tensors = self._read(key) if key in self._index else None
        if tensors is None:
            self._count("misses")
            return None
        self._index.touch((key,))
        self._writer.wake()  # to note the use on the file
        self._count("hits")
        return tensors

    # -- storing

    def put(self, key: bytes, tensors: Sequence[Tensor]) -> bool:
        """Have a file written soon; False if that will not happen (then blocks after it are of no use either).

        The data of the tensors must never change. Raises ValueError for a foreign key or names that clash.
        """
        if len(key) != KEY_BYTES:
            raise ValueError(f"A key has {KEY_BYTES} bytes, not {len(key)}.")
        require_names(tensors)
        if key in self._writer or key in self._index:
            return True
        accepted = self._writer.offer(Job(key, tuple(tensors), self._index.generation))
        if not accepted:
            self._count("skipped")
        return accepted

    def clear(self) -> int:
        """Remove everything, also what waits to be written. Returns how many files were removed."""
        self._writer.forget()
        self._index.clear()  # before the files: a write that ends meanwhile finds itself outdated
        removed = 0
        try:
            for stored in self._folder.scan():
                self._folder.remove(stored.key)
                removed += 1
        except OSError as error:
            self._report("remove", error)
        return removed

    def snapshot(self) -> DiskSnapshot:
        with self._lock:
            counts = self._counts.copy()
        return DiskSnapshot(
            bytes=self._index.nbytes,
            files=len(self._index),
            queued=len(self._writer),
            hits=counts["hits"],
            misses=counts["misses"],
            written=counts["written"],
            skipped=counts["skipped"],
            failed=counts["failed"],
            damaged=counts["damaged"],
            evicted=counts["evicted"],
        )

    # -- the calling thread

    def _read(self, key: bytes) -> list[Tensor] | None:
        try:
            return decode(key, self._folder.read(key))
        except FileNotFoundError:
            pass  # evicted by another process
        except Damaged as error:
            self._count("damaged")
            self._report("damaged", error)
            self._discard(key)
        except OSError as error:
            self._report("read", error)
        self._index.drop(key)
        return None

    def _discard(self, key: bytes) -> None:
        try:
            self._folder.remove(key)
        except OSError as error:
            self._report("remove", error)

    # -- the I/O thread

    def _store(self, job: Job) -> None:
        pieces = encode(job.key, job.tensors)
        stored = Stored(job.key, sum(map(len, pieces)), self._index.stamp(job.key))
        try:
            if not self._make_room(stored.nbytes):
                self._count("skipped")
                return
            self._folder.write(job.key, pieces, stored.used)
        except OSError as error:
            self._count("failed")
            self._report("write", error)
            return
        if self._index.add(stored, job.generation):
            self._count("written")
        else:
            self._count("skipped")
            self._discard(job.key)

    def _make_room(self, nbytes: int) -> bool:
        """Evict what `nbytes` more need; False if the tier or the disk is too small."""
        if nbytes > self._max_bytes:
            return False
        victims = self._index.victims(self._max_bytes - nbytes)
        free = self._folder.free_bytes() + sum(stored.nbytes for stored in victims)
        if free - nbytes < self._free_floor_bytes:
            return False
        self._evict(victims)
        return True

    def _evict(self, victims: Sequence[Stored]) -> None:
        for stored in victims:
            self._folder.remove(stored.key)
            self._index.drop(stored.key)
            self._count("evicted")

    def _tidy(self) -> None:
        """Keep to the limit whatever others wrote, and note the uses on the files."""
        try:
            if self._clock() - self._scanned >= RESCAN_S:
                self._rescan()
            self._evict(self._index.victims(self._max_bytes))
            for key, used in self._index.take_touched():
                self._folder.stamp(key, used)
        except OSError as error:
            self._report("tidy", error)

    def _rescan(self) -> None:
        self._scanned = self._clock()
        generation = self._index.generation
        self._index.merge(self._folder.scan(), generation)

    # -- either

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    def _report(self, kind: str, error: Exception) -> None:
        with self._lock:
            first = kind not in self._logged
            self._logged.add(kind)
        if first:
            log.warning("Disk cache in %s (%s, reported once): %s", self.folder, kind, error)
