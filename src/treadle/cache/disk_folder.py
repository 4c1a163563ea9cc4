"""The folder of the disk tier: which of its files are ours, and how they are written, read and removed.

Several processes may share it. A file appears whole, by a rename, and may vanish at any time. Only names of our exact
pattern are ever read, counted or removed.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

import numpy as np
from numpy.typing import NDArray

from treadle.cache.disk_keys import KEY_BYTES
from treadle.errors import ConfigError

NAME = "treadle-prefixes"
SUFFIX = ".safetensors"
_HEX = rf"([0-9a-f]{{{2 * KEY_BYTES}}})"
_FILE = re.compile(_HEX + re.escape(SUFFIX))
_TEMPORARY = re.compile(_HEX + r"\.[0-9a-f]{16}\.tmp")


@dataclass(frozen=True, slots=True)
class Stored:
    """What is known of a file without reading it."""

    key: bytes
    nbytes: int
    used: float  # seconds since the epoch; kept as the file's modification time


class DiskFolder:
    """A private folder inside `parent`, which may be the user's own. All but `prepare` may raise OSError."""

    def __init__(self, parent: Path) -> None:
        self.path = parent / NAME

    def prepare(self) -> None:
        """Create the folder, for this user only. Raises ConfigError where that cannot be had."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                raise ConfigError(f"{self.path} must be a folder of this user.", param="cache_dir")
            if stat.S_IMODE(found.st_mode) != 0o700:
                self.path.chmod(0o700)
        except OSError as error:
            raise ConfigError(f"The cache folder cannot be used: {error}.", param="cache_dir") from error

    def file(self, key: bytes) -> Path:
        return self.path / (key.hex() + SUFFIX)

    def scan(self) -> list[Stored]:
        """All files, by name, size and time alone."""
        return [
            Stored(bytes.fromhex(match[1]), found.st_size, found.st_mtime) for match, found in self._matching(_FILE)
        ]

    def remove_leftovers(self) -> None:
        """Remove what writers left half done; a file that another process still writes is locked, and stays."""
        for match, _ in self._matching(_TEMPORARY):
            path = self.path / match[0]
            try:
                with path.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
            except (BlockingIOError, FileNotFoundError):  # being written, or just finished
                continue

    def write(self, key: bytes, pieces: Sequence[memoryview], used: float) -> None:
        """Make the file appear with its whole content, safely on the disk, or not at all."""
        temporary = self.path / f"{key.hex()}.{token_hex(8)}.tmp"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.utime(file.fileno(), (used, used))
                os.fsync(file.fileno())
                temporary.replace(self.file(key))
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def read(self, key: bytes) -> NDArray[np.uint8]:
        """The content of a file [bytes]; shorter than its size says if it was cut meanwhile."""
        with open(self.file(key), "rb", buffering=0, opener=_open_no_link) as file:
            content = np.empty(os.fstat(file.fileno()).st_size, np.uint8)
            done = 0
            while count := file.readinto(content.data[done:]):
                done += count
        return content[:done]

    def stamp(self, key: bytes, used: float) -> None:
        """Remember the last use; nothing if the file is gone."""
        try:
            os.utime(self.file(key), (used, used), follow_symlinks=False)
        except FileNotFoundError:
            return

    def remove(self, key: bytes) -> None:
        self.file(key).unlink(missing_ok=True)

    def free_bytes(self) -> int:
        """What the disk still has room for."""
        return shutil.disk_usage(self.path).free

    def _matching(self, pattern: re.Pattern[str]) -> Iterator[tuple[re.Match[str], os.stat_result]]:
        with os.scandir(self.path) as entries:
            for entry in entries:
                match = pattern.fullmatch(entry.name)
                if match is None or not entry.is_file(follow_symlinks=False):
                    continue
                try:
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # removed by another process since it was listed
                    continue
                yield match, found


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)
