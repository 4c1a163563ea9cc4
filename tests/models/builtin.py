"""The known models' files, downloaded once; tests that need one are skipped where it cannot be had."""

from __future__ import annotations

from functools import cache

import pytest

from treadle.errors import LoadError
from treadle.models.sources import ResolvedSource, resolve


@cache
def _found(name: str) -> ResolvedSource | str:
    try:
        return resolve(name)
    except LoadError as error:
        return error.message


def known(name: str) -> ResolvedSource:
    found = _found(name)
    if isinstance(found, str):
        pytest.skip(f"the model {name} is not obtainable: {found}")
    return found


def builtin() -> ResolvedSource:
    return known("smollm2")
