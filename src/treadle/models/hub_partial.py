"""A file that has arrived in part: its bytes so far, and the digest of them."""

from __future__ import annotations

import hashlib
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from treadle.models.folders import Progress

if TYPE_CHECKING:
    from hashlib import _Hash

BLOCK = 1 << 20
SHA256_DIGITS = 64


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as the Hub lists it. `digest` is the SHA-256 of a large one, and git's SHA-1 of a blob otherwise."""

    path: str
    size: int
    digest: str

    def hasher(self) -> _Hash:
        if len(self.digest) == SHA256_DIGITS:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)


class Tally:
    """Adds up the bytes of several threads and reports them, a mebibyte at a time."""

    def __init__(self, what: str, total: int, progress: Progress) -> None:
        self._what = what
        self._total = total
        self._progress = progress
        self._lock = threading.Lock()
        self._done = self._told = 0

    def add(self, num_bytes: int) -> None:
        """`num_bytes` more; negative when a file begins anew."""
        with self._lock:
            self._done += num_bytes
            if abs(self._done - self._told) >= BLOCK or self._done == self._total:
                self._told = self._done
                self._progress(self._what, self._done, self._total)

    def wait(self, repo: str) -> None:
        """Another process is at work on a file."""
        with self._lock:
            self._progress(f"waiting for another download of {repo}", 0, None)


class Partial:
    """An incomplete file, open for more; what it holds already counts as arrived.

    `have` is its size in bytes, never over that of `file`; one that was left larger begins anew.
    """

    def __init__(self, path: Path, file: RemoteFile, tally: Tally) -> None:
        self.file = file
        self.have = 0
        self._path = path
        self._tally = tally
        self._hash = file.hasher()
        self._out = path.open("a+b", buffering=0)  # unbuffered: what came is on the disk when the process is killed
        if os.fstat(self._out.fileno()).st_size > file.size:
            self._out.truncate(0)
        self._out.seek(0)
        while block := self._out.read(BLOCK):
            self._count(block)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._out.close()

    def add(self, data: bytes) -> None:
        """Append `data`, as far as the file goes."""
        data = data[: self.file.size - self.have]
        view = memoryview(data)
        while view:
            view = view[self._out.write(view) :]
        self._count(data)

    def restart(self) -> None:
        """Begin anew."""
        self._out.truncate(0)
        self._tally.add(-self.have)
        self._hash = self.file.hasher()
        self.have = 0

    def finish(self, target: Path) -> bool:
        """Give the file its name if it is whole and right; otherwise begin anew and say False."""
        if self.have != self.file.size or self._hash.hexdigest() != self.file.digest:
            self.restart()
            return False
        os.fsync(self._out.fileno())
        self._path.replace(target)
        return True

    def _count(self, data: bytes) -> None:
        self._hash.update(data)
        self.have += len(data)
        self._tally.add(len(data))
