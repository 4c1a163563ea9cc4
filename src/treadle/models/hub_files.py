"""The files of one commit, into the Hub's own cache: continued where an earlier attempt, or process, stopped.

The library's own download begins a file anew in every process. Here its bytes go to `blobs/<digest>.incomplete`, and
the next attempt asks for what is not there yet. An address names a commit, so what it serves does not change from one
attempt to the next; a file gets its final name only when size and digest are those that the Hub lists.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from filelock import Timeout
from httpx2 import NetworkError, RemoteProtocolError, TimeoutException
from huggingface_hub import HfApi, RepoFile, constants, hf_hub_url
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # it exports them lazily
    WeakFileLock,
    build_hf_headers,
    filter_repo_objects,
    hf_raise_for_status,
    http_stream_backoff,
)

from treadle.errors import LoadError
from treadle.models.folders import Progress
from treadle.models.hub_partial import Partial, RemoteFile, Tally

WANTED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
UNWANTED = ["original/*", "onnx/*", "*/onnx/*", "metal/*"]
WORKERS = 4  # files at a time
MOST_FAILURES = 5  # attempts in a row that bring nothing new
PAUSE_S = 1.0  # before an attempt that follows a broken one
PIECE = 4 << 30  # most bytes asked for at once: the network before the Hub refuses answers of over 50 GB
RETRIED = (408, 429, 500, 502, 503, 504)
LOCK_S = 1.0  # how long one try for a file's lock lasts


@dataclass(frozen=True, slots=True)
class Place:
    """Where a commit comes from, and where it goes to in the Hub's cache."""

    repo: str
    commit: str

    @property
    def _name(self) -> str:
        return repo_folder_name(repo_id=self.repo, repo_type="model")

    @property
    def blobs(self) -> Path:
        return Path(constants.HF_HUB_CACHE).expanduser() / self._name / "blobs"

    @property
    def snapshot(self) -> Path:
        return self.blobs.parent / "snapshots" / self.commit

    def lock(self, file: RemoteFile) -> Path:
        """The library locks this one too."""
        return Path(constants.HF_HUB_CACHE).expanduser() / ".locks" / self._name / f"{file.digest}.lock"


class _Stopped(Exception):
    """Another file's download failed, or the user wants no more."""


def listing(repo: str, commit: str) -> list[RemoteFile]:
    """The files that a model is loaded from. Raises what the Hub's library raises."""
    entries = HfApi().list_repo_tree(repo, recursive=True, revision=commit)
    files = filter_repo_objects(
        (entry for entry in entries if isinstance(entry, RepoFile)),
        allow_patterns=WANTED,
        ignore_patterns=UNWANTED,
        key=lambda entry: entry.path,
    )
    return [RemoteFile(f.path, f.size, f.lfs.sha256 if f.lfs is not None else f.blob_id) for f in files]


def download(place: Place, files: Iterable[RemoteFile], progress: Progress) -> None:
    """Get the blobs that are missing. What came before a failure stays for the next call.

    Raises:
        LoadError: no room on the disk, or a file that comes damaged again and again.
        HTTPError, OSError: a transfer that failed for good.
    """
    missing = {f.digest: f for f in files if not (place.snapshot / f.path).exists()}
    missing = {digest: f for digest, f in missing.items() if not (place.blobs / digest).exists()}
    if not missing:
        return
    place.blobs.mkdir(parents=True, exist_ok=True)
    _check_room(place, missing.values())
    tally = Tally(f"downloading {place.repo}", sum(f.size for f in missing.values()), progress)
    stop = threading.Event()
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="hub") as pool:
        jobs = [pool.submit(_fetch, place, file, tally, stop) for file in missing.values()]
        try:
            for job in as_completed(jobs):
                job.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _check_room(place: Place, files: Iterable[RemoteFile]) -> None:
    paths = [(file.size, _incomplete(place, file)) for file in files]
    needed = sum(size - (path.stat().st_size if path.exists() else 0) for size, path in paths)
    free = shutil.disk_usage(place.blobs).free
    if needed > free:
        raise LoadError(
            f"Downloading {place.repo} needs {needed / 1e9:.1f} GB, but only {free / 1e9:.1f} GB are free "
            f"in {place.blobs}; make room, or set HF_HOME to a folder on another disk."
        )


def _incomplete(place: Place, file: RemoteFile) -> Path:
    return place.blobs / f"{file.digest}.incomplete"


def _fetch(place: Place, file: RemoteFile, tally: Tally, stop: threading.Event) -> None:
    """One file under its lock; another process may have it by then."""
    lock = place.lock(file)
    lock.parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            with WeakFileLock(lock, timeout=LOCK_S):
                if not (place.blobs / file.digest).exists():
                    _complete(place, file, tally, stop)
                return
        except Timeout:
            tally.wait(place.repo)
            _go_on(stop)


def _complete(place: Place, file: RemoteFile, tally: Tally, stop: threading.Event) -> None:
    """Bring the rest, and all of it once more if the whole is not what it should be."""
    path = _incomplete(place, file)
    for _ in range(2):
        with Partial(path, file, tally) as part:
            _transfer(hf_hub_url(place.repo, file.path, revision=place.commit), part, stop)
            if part.finish(place.blobs / file.digest):
                return
    path.unlink()
    raise LoadError(
        f"{file.path} of {place.repo} arrived damaged twice: its hash is not the one that Hugging Face lists; "
        "run again later, or pass the path of a folder that you already have."
    )


def _transfer(url: str, part: Partial, stop: threading.Event) -> None:
    """Ask until all is there; give up after several attempts in a row that brought nothing new."""
    most, failures = part.have, 0
    while part.have < part.file.size:
        try:
            _receive(url, part, stop)
        except (NetworkError, RemoteProtocolError, TimeoutException):
            failures = 0 if part.have > most else failures + 1
            if failures > MOST_FAILURES:
                raise
            time.sleep(PAUSE_S)
        most = max(most, part.have)


def _receive(url: str, part: Partial, stop: threading.Event) -> None:
    """One answer: the rest of the file or a piece of it; the whole from a server that knows no ranges."""
    size, start = part.file.size, part.have
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    end = min(size, start + PIECE)
    if start or end < size:
        headers["Range"] = f"bytes={start}-{end - 1}"
    with http_stream_backoff(
        "GET",
        url,
        headers=headers,
        timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        retry_on_exceptions=(),
        retry_on_status_codes=RETRIED,
    ) as response:
        hf_raise_for_status(response)
        if response.status_code != 206:
            part.restart()
        for chunk in response.iter_bytes():
            part.add(chunk)
            _go_on(stop)
    if part.have == start:
        raise RemoteProtocolError("the answer was empty")


def _go_on(stop: threading.Event) -> None:
    if stop.is_set():
        raise _Stopped
