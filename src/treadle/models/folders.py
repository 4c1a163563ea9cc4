"""Where downloaded models live, and the lock that keeps two processes from writing there at once."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Progress = Callable[[str, int, int | None], None]
"""Called with (what is happening, units done, units in all or None), from the thread that does the work."""


def cache_folder() -> Path:
    """The user's cache folder for Treadle; not created here.

    `TREADLE_CACHE` wins, then the platform's convention: `~/Library/Caches` on macOS, `XDG_CACHE_HOME`
    or `~/.cache` elsewhere.
    """
    override = os.environ.get("TREADLE_CACHE")
    if override:
        return Path(override).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "treadle"
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "treadle"


@contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold an exclusive lock on `path` (created if absent); the system frees it if the process dies.

    `waiting` is called once when another process holds the lock, before blocking for it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
