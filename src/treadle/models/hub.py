"""Models of the Hugging Face Hub, by id: downloaded whole, or refused with one sentence."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from treadle.errors import LoadError
from treadle.models.folders import Progress

HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
HAVE_LOCALLY = "or pass the path of a folder that you already have"


def is_hub_id(name: str) -> bool:
    """Whether `name` reads `org/name` or `org/name@revision`."""
    return HUB_ID.fullmatch(name) is not None


def fetch(name: str, progress: Progress) -> tuple[Path, str]:
    """The snapshot's folder and its commit, downloading what is missing into the Hub's own cache.

    An interrupted download goes on where it stopped, also in a new process. Without a connection, or without
    permission any more, a complete earlier download serves.

    Raises:
        LoadError: unknown id or revision, gated, unreachable and not downloaded before, or a failed transfer.
    """
    match = HUB_ID.fullmatch(name)
    if match is None:
        raise LoadError(f"{name!r} is not an id of the form org/name or org/name@revision.")
    # Imported here: `treadle --help` need not pay for it.
    from httpx2 import HTTPError
    from huggingface_hub.errors import HFValidationError, RevisionResolutionError

    try:
        path = _snapshot(match["repo"], match["revision"], progress)
    except (HTTPError, OSError, HFValidationError, RevisionResolutionError, RuntimeError) as error:
        raise LoadError(_explain(match["repo"], match["revision"], error)) from error
    return path, path.name


def _snapshot(repo: str, revision: str | None, progress: Progress) -> Path:
    """Bring the blobs; the library then puts them in their places, and judges what an earlier download is worth."""
    from httpx2 import TransportError
    from huggingface_hub import HfApi, get_cached_repo_tree
    from huggingface_hub.errors import (
        CachedRepoTreeNotFoundError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RevisionNotFoundError,
    )

    from treadle.models.hub_files import Place, download, listing

    try:
        commit = HfApi().resolve_revision(repo, revision=revision).resolved
    except RevisionNotFoundError:
        raise
    except HfHubHTTPError as denied:
        try:
            return _placed(repo, revision, progress, locally=True)
        except LocalEntryNotFoundError:
            raise denied from None
    try:
        get_cached_repo_tree(repo, revision=commit)  # without it nobody can tell whether a folder is complete
        return _placed(repo, commit, progress, locally=True)
    except (CachedRepoTreeNotFoundError, LocalEntryNotFoundError):
        pass
    try:
        files = listing(repo, commit)
    except (TransportError, OfflineModeIsEnabled):
        files = []
    download(Place(repo, commit), files, progress)
    return _placed(repo, commit, progress, locally=False)


def _placed(repo: str, revision: str | None, progress: Progress, *, locally: bool) -> Path:
    """The folder of a snapshot, every wanted file in it. Raises LocalEntryNotFoundError where one is missing."""
    from huggingface_hub import snapshot_download

    from treadle.models.hub_files import UNWANTED, WANTED

    path = snapshot_download(
        repo,
        revision=revision,
        allow_patterns=WANTED,
        ignore_patterns=UNWANTED,
        tqdm_class=_bar(repo, progress),
        local_files_only=locally,
    )
    return Path(path)


def downloads() -> list[tuple[str, int, Path]]:
    """The models in the Hub's own cache that have weights Treadle can read: (id, bytes, folder)."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return []
    found = []
    for repo in repos:
        if repo.repo_type != "model" or not repo.revisions:
            continue
        newest = max(repo.revisions, key=lambda revision: revision.last_modified)
        names = {file.file_name for file in newest.files}
        if "config.json" in names and any(name.endswith(".safetensors") for name in names):
            found.append((repo.repo_id, newest.size_on_disk, newest.snapshot_path))
    return sorted(found)


def _bar(repo: str, progress: Progress) -> type[Any]:
    """A tqdm class that draws nothing and reports bytes to `progress`."""
    from tqdm.std import tqdm  # type: ignore[import-untyped]

    class Bar(tqdm):  # type: ignore[misc]
        def display(self, *_: Any, **__: Any) -> None:
            # Hub shows files and bytes in separate bars; two byte bars where it deduplicates.
            if self.unit == "B" and self.n:
                total = int(self.total) if self.total and self.total >= self.n else None
                progress(f"downloading {repo}", int(self.n), total)

    return Bar


def _explain(repo: str, revision: str | None, error: Exception) -> str:
    from huggingface_hub import constants, errors

    at = f" at revision {revision}" if revision else ""
    if isinstance(error, errors.GatedRepoError):
        return f"{repo} is gated: accept its terms on its Hugging Face page and set HF_TOKEN, {HAVE_LOCALLY}."
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo} has no revision {revision!r}; leave it out for the newest."
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"Hugging Face has no model {repo} that you may read; check the spelling, or set HF_TOKEN if it is private."
        )
    if constants.is_offline_mode():
        return (
            f"{repo}{at} is not completely downloaded and offline mode is on; "
            f"unset HF_HUB_OFFLINE to download it, {HAVE_LOCALLY}."
        )
    if isinstance(error, errors.LocalEntryNotFoundError | errors.RevisionResolutionError):
        return (
            f"Hugging Face is unreachable and {repo}{at} is not completely downloaded; "
            f"check the network, {HAVE_LOCALLY}."
        )
    reason = " ".join(str(error).split()).rstrip(".")[:200] or type(error).__name__
    if isinstance(error, OSError) and error.filename:
        reason = f"{error.strerror}: {os.fspath(error.filename)}"
    return f"Downloading {repo}{at} failed ({reason}); run again (what has arrived is kept), {HAVE_LOCALLY}."
