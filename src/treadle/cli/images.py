"""Image files of this machine for a message typed here: the terminal may read what HTTP clients must send."""

from __future__ import annotations

import base64
import shlex
from pathlib import Path
from typing import Any

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")


def image_part(file: Path) -> dict[str, Any]:
    """A file as a part of a chat message. Raises OSError."""
    data = base64.b64encode(file.expanduser().read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:;base64,{data}"}}


def split_files(line: str) -> tuple[str, list[Path]]:
    """The words of a line, and the image files among them: what terminals insert when a file is dragged in.

    Quoted and escaped as in a shell, or a `file://` URL. A line without any such file stays as it is.
    """
    try:
        words = shlex.split(line, posix=True)
    except ValueError:  # an apostrophe is no quote
        return line, []
    files = [file for word in words if (file := _file(word)) is not None]
    if not files:
        return line, []
    return " ".join(word for word in words if _file(word) is None), files


def _file(word: str) -> Path | None:
    path = Path(word.removeprefix("file://")).expanduser()
    return path if path.suffix.lower() in SUFFIXES and path.is_file() else None
