"""What the operating system says of this machine: cores and memory, within a container's limits."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def physical_cores() -> int:
    """Cores this process may use: hyper-threads count once; affinity and a CPU quota are honoured."""
    if not sys.platform.startswith("linux"):
        return os.cpu_count() or 1
    allowed = os.sched_getaffinity(0)
    cores = {_read(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in allowed}
    num = len(cores) if "" not in cores else len(allowed)
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        num = min(num, -(-int(quota) // int(period)))
    return max(num, 1)


def total_memory() -> int:
    """The machine's memory in bytes, or the container's limit where that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read("/sys/fs/cgroup/memory.max")
    return min(total, int(limit)) if limit.isdigit() else total


def free_memory() -> int:
    """Bytes that can be allocated now without swapping; the total where the system does not tell."""
    lines = (line.split() for line in _read("/proc/meminfo").splitlines())
    free = next((int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:"), total_memory())
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    return max(min(free, int(limit) - int(used)), 0) if limit.isdigit() and used.isdigit() else free


def _read(path: str) -> str:
    """The text of a small system file, "" where the system has no such file."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
