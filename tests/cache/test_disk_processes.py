"""Processes that share one folder never read anything wrong and keep to the limit together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from treadle.cache.disk import DiskTier
from treadle.cache.disk_keys import BLOCK, block_keys

LIMIT = 200_000
ROUNDS = 150
KEYS = block_keys(b"shared", np.zeros(40 * BLOCK, np.int64))


def tensors_of(key: bytes):
    from treadle.cache.disk_format import Tensor

    return [Tensor("x", "U8", (10_000,), np.resize(np.frombuffer(key, np.uint8), 10_000))]


def work(folder: Path, seed: int) -> None:
    """Put, read, clear and restart at random; every answer is checked. Run in a process of its own."""
    random = np.random.default_rng(seed)
    tier = DiskTier(folder, LIMIT, free_floor_bytes=0)
    tier.start()
    for _ in range(ROUNDS):
        key = KEYS[int(random.integers(len(KEYS)))]
        found = tier.get(key)
        assert found is None or bytes(found[0].raw) == bytes(tensors_of(key)[0].raw)
        tier.put(key, tensors_of(key))
        if random.random() < 0.05:
            tier.stop()
            tier.start()
        if random.random() < 0.02:
            tier.clear()
    tier.stop()
    assert tier.snapshot().damaged == 0
    print(tier.snapshot().hits)


def test_processes_share_a_folder(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from tests.cache.test_disk_processes import work; "
    code += "work(Path(sys.argv[1]), int(sys.argv[2]))"
    root = Path(__file__).parents[2]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), str(seed)],
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in range(3)
    ]
    for process in running:
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert int(output) > 0
    after = DiskTier(tmp_path, LIMIT, free_floor_bytes=0)
    after.start()
    after.stop()
    files = list(after.folder.iterdir())
    assert after.snapshot().bytes == sum(path.stat().st_size for path in files) <= LIMIT
    assert 0 < len(files) == after.snapshot().files
