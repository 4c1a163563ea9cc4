"""What packed rows were found to cost a model, kept in the user's cache folder: one JSON file for each revision.

{"<device>": {"date": .., "text": .., "tokens": .., "context": .., "formats": {"8": {"delta_percent": ..}, ..}}}
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from treadle.cache.formats import Measured
from treadle.models.folders import cache_folder

log = logging.getLogger("treadle.models")


@dataclass(frozen=True, slots=True)
class Quality:
    """One run of `treadle bench quality` on one device."""

    date: str
    text: str  # what was read
    tokens: int
    perplexity: float  # over exact rows
    formats: Mapping[str, Measured]  # by format, "16" left out


def path_of(revision: str) -> Path:
    return cache_folder() / "quality" / f"{revision}.json"


def stored(revision: str, device: str) -> Quality | None:
    """What was measured last for a model on a device. A file that cannot be read counts as none, with a warning."""
    path = path_of(revision)
    try:
        return _quality(json.loads(path.read_text())[device])
    except FileNotFoundError:
        return None
    except KeyError as error:
        if error.args == (device,):
            return None
        reason = f"it lacks {error}"
    except (OSError, TypeError, ValueError) as error:
        reason = str(error)
    log.warning("The measured quality in %s is not used: %s.", path, reason)
    return None


def store(revision: str, device: str, quality: Quality) -> Path:
    """Keep it beside those of other devices; replaces an earlier one. Returns the file."""
    path = path_of(revision)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        known = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        known = {}
    known[device] = asdict(quality)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps(known, indent=1))
    draft.replace(path)
    return path


def _quality(found: dict[str, Any]) -> Quality:
    names = [field.name for field in fields(Quality)]
    formats = {name: Measured(**one) for name, one in found["formats"].items()}
    return Quality(**{name: found[name] for name in names} | {"formats": formats})
