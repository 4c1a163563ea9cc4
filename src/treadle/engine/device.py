"""How much of the device's memory this process may use, and telling MLX so. Engine thread only."""

from __future__ import annotations

import mlx.core as mx

from treadle.config import Config
from treadle.errors import ConfigError
from treadle.runtime import DeviceFacts, device_facts

LEAST_LEFT = 4 * 10**9  # bytes that stay with the system where it shares the device's memory
LEFT_SHARE = 0.15
SPARE_SHARE = 1 / 16  # of the limit that MLX may keep in freed buffers


def memory_limit(config: Config, facts: DeviceFacts) -> int:
    """Bytes this process may use. Unified memory leaves the system the larger of 4 GB and 15 %.

    Raises ConfigError when `memory_limit_gb` is more than the device has.
    """
    if config.memory_limit_gb is not None:
        limit = int(config.memory_limit_gb * 1e9)
        if limit > facts.memory_bytes:
            raise ConfigError(
                f"memory_limit_gb is {config.memory_limit_gb:g}, but the device has {facts.memory_bytes / 1e9:.1f} GB.",
                param="memory_limit_gb",
            )
        return limit
    if facts.backend == "cuda":
        return facts.working_set_bytes
    left = max(LEAST_LEFT, int(LEFT_SHARE * facts.memory_bytes))
    return max(min(facts.working_set_bytes, facts.memory_bytes - left), facts.memory_bytes // 4)


def reserve_of(facts: DeviceFacts, free: int) -> int:
    """Bytes that the system is to keep free, of `free` that it has now. Less than that is pressure.

    A quarter of what the limit leaves to it: that has to do for other programs, which take a part of it.
    """
    return min(max(LEAST_LEFT, int(LEFT_SHARE * facts.memory_bytes)), free) // 4


def claim(config: Config) -> int:
    """Set MLX's limits for this process and return the memory limit in bytes."""
    facts = device_facts()
    limit = memory_limit(config, facts)
    mx.set_cache_limit(int(SPARE_SHARE * limit))
    if facts.backend == "metal":
        mx.set_wired_limit(min(limit, facts.working_set_bytes))
    return limit
