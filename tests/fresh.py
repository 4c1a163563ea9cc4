"""Code run in an interpreter of its own, for what happens once in a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


def run(code: str, limit: int | None = None, **environment: str) -> Any:
    """Run code in a fresh interpreter, with a limit of open files, and read the JSON that it prints last."""
    kept = {key: value for key, value in os.environ.items() if not key.endswith("_NUM_THREADS")}
    command = [sys.executable, "-c", code]
    if limit is not None:
        command = ["bash", "-c", f'ulimit -n {limit} && exec "$@"', "bash", *command]
    done = subprocess.run(command, env={**kept, **environment}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
