"""On which line of a TOML text a key stands; the standard parser does not tell."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any


def line_of(text: str, path: Sequence[str]) -> int:
    """The line, from 1, on which the key at `path` begins; that of the nearest table around it if it has none.

    A beginning of the text that parses and has the key ends with its value. The key begins after the longest
    shorter one that parses.
    """
    lines = text.splitlines()
    for depth in range(len(path), 0, -1):
        whole = 0  # lines that parse without the key
        for number in range(len(lines) + 1):
            values = _parsed(lines[:number])
            if values is not None and _has(values, path[:depth]):
                return whole + 1
            if values is not None:
                whole = number
    return 1


def _parsed(lines: Sequence[str]) -> dict[str, Any] | None:
    try:
        return tomllib.loads("\n".join(lines))
    except tomllib.TOMLDecodeError:
        return None


def _has(values: Any, path: Sequence[str]) -> bool:
    for key in path:
        if not isinstance(values, dict) or key not in values:
            return False
        values = values[key]
    return True
