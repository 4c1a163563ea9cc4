"""One server with the built-in model for all tests of a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.served import Served, served
from tests.models.builtin import builtin


@pytest.fixture(scope="session")
def server() -> Iterator[Served]:
    builtin()
    with served("--max-rows", "4") as running:
        yield running
