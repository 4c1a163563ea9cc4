"""Models of the Hugging Face Hub, by id: downloaded whole, or refused with one sentence."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from treadle.errors import LoadError
from treadle.models.folders import Progress

HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
WANTED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
UNWANTED = ["original/*", "onnx/*", "*/onnx/*", "metal/*"]
HAVE_LOCALLY = "or pass the path of a folder that you already have"


def is_hub_id(name: str) -> bool:
    """Whether `name` reads `org/name` or `org/name@revision`."""
    return HUB_ID.fullmatch(name) is not None


def fetch(name: str, progress: Progress) -> tuple[Path, str]:
    """The snapshot's folder and its commit, downloading what is missing.

    A dropped connection is resumed where it broke; after an interruption finished files are kept. Without a
    connection a complete earlier download serves.

    Raises:
        LoadError: unknown id or revision, gated, unreachable and not downloaded before, or a failed transfer.
    """
    match = HUB_ID.fullmatch(name)
    if match is None:
        raise LoadError(f"{name!r} is not an id of the form org/name or org/name@revision.")
    # Imported here: `treadle --help` need not pay for it.
    from httpx2 import HTTPError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        path = snapshot_download(
            match["repo"],
            revision=match["revision"],
            allow_patterns=WANTED,
            ignore_patterns=UNWANTED,
            tqdm_class=_bar(match["repo"], progress),
        )
    except (HTTPError, OSError, HFValidationError, RuntimeError) as error:
        raise LoadError(_explain(match["repo"], match["revision"], error)) from error
    return Path(path), Path(path).name


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
    if isinstance(error, errors.LocalEntryNotFoundError):
        return (
            f"Hugging Face is unreachable and {repo}{at} is not completely downloaded; "
            f"check the network, {HAVE_LOCALLY}."
        )
    reason = " ".join(str(error).split()).rstrip(".")[:200] or type(error).__name__
    if isinstance(error, OSError) and error.filename:
        reason = f"{error.strerror}: {os.fspath(error.filename)}"
    return f"Downloading {repo}{at} failed ({reason}); run again (finished files are kept), {HAVE_LOCALLY}."
