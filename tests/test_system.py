"""What the machine has, as far as this process may use it."""

from __future__ import annotations

import os

from treadle import system


def test_cores_are_at_least_one_and_at_most_what_the_system_counts() -> None:
    assert 1 <= system.physical_cores() <= (os.cpu_count() or 1)


def test_free_memory_is_part_of_all_memory() -> None:
    assert 0 < system.free_memory() <= system.total_memory()
