"""What the disk tier holds, kept in memory, and the order in which it goes. Pure; any thread.

The last use of a key counts as earlier the deeper it lies. So a chain of blocks, which is used and written within a
moment, loses its end first: without its beginning the rest could not be reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import Lock

from treadle.cache.disk_folder import Stored
from treadle.cache.disk_keys import depth_of

DEPTH_S = 0.1  # how much earlier each block counts
SLACK = 0.02  # share of the limit that is freed beyond what is needed, so that the order is rarely computed


@dataclass(slots=True)
class _Entry:
    nbytes: int
    used: float


class DiskIndex:
    """Keys with their sizes and last uses, and the total in bytes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = Lock()
        self._entries: dict[bytes, _Entry] = {}
        self._touched: set[bytes] = set()
        self._nbytes = 0
        self._generation = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def generation(self) -> int:
        """Changes with every `clear`."""
        return self._generation

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many keys from the first on are held. That is a use of them."""
        with self._lock:
            count = next((i for i, key in enumerate(keys) if key not in self._entries), len(keys))
            self._touch(keys[:count])
        return count

    def touch(self, keys: Iterable[bytes]) -> None:
        """Count a use of those of the keys that are held."""
        with self._lock:
            self._touch(keys)

    def stamp(self, key: bytes) -> float:
        """What a use of `key` at this moment counts as, in seconds of the clock."""
        return self._clock() - DEPTH_S * depth_of(key)

    def add(self, stored: Stored, generation: int) -> bool:
        """Enter a file; False if everything was cleared since `generation`."""
        with self._lock:
            if generation != self._generation:
                return False
            self._drop(stored.key)
            self._enter(stored)
        return True

    def drop(self, key: bytes) -> None:
        with self._lock:
            self._drop(key)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._touched.clear()
            self._nbytes = 0
            self._generation += 1

    def merge(self, found: Iterable[Stored], generation: int) -> None:
        """Agree with a scan of the folder begun at `generation`, keeping the uses that files do not show yet."""
        now = self._clock()
        with self._lock:
            if generation != self._generation:
                return
            known, self._entries, self._nbytes = self._entries, {}, 0
            for stored in found:
                used = min(stored.used, now)  # a time in the future would never be the oldest
                if (before := known.get(stored.key)) is not None:
                    used = max(used, before.used)
                self._enter(Stored(stored.key, stored.nbytes, used))

    def victims(self, most: int) -> list[Stored]:
        """What has to go, in order, so that at most `most` bytes stay; none if that holds already."""
        with self._lock:
            left = self._nbytes
            if left <= most:
                return []
            plan = []
            for key, entry in sorted(self._entries.items(), key=lambda item: item[1].used):
                if left <= most and left - entry.nbytes < most * (1 - SLACK):
                    break
                plan.append(Stored(key, entry.nbytes, entry.used))
                left -= entry.nbytes
            return plan

    def take_touched(self) -> list[tuple[bytes, float]]:
        """The keys used since the last call, with their last use."""
        with self._lock:
            taken = [(key, self._entries[key].used) for key in self._touched if key in self._entries]
            self._touched.clear()
        return taken

    def _touch(self, keys: Iterable[bytes]) -> None:
        now = self._clock()
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None:
                entry.used = max(entry.used, now - DEPTH_S * depth_of(key))
                self._touched.add(key)

    def _enter(self, stored: Stored) -> None:
        self._entries[stored.key] = _Entry(stored.nbytes, stored.used)
        self._nbytes += stored.nbytes

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._nbytes -= entry.nbytes
