"""The built-in model's file, downloaded once; tests that need it are skipped where it cannot be had."""

from __future__ import annotations

from functools import cache

import pytest

from treadle.errors import LoadError
from treadle.models.sources import ResolvedSource, resolve


@cache
def _found() -> ResolvedSource | str:
    try:
        return resolve("smollm2")
    except LoadError as error:
        return error.message


def builtin() -> ResolvedSource:
    found = _found()
    if isinstance(found, str):
        pytest.skip(f"the built-in model is not obtainable: {found}")
    return found
