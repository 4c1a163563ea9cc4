"""`python -m treadle.bench [NAME [options]]`: one module per measured goal; the last line printed is JSON.

Without a name the whole suite runs with its defaults, each benchmark in a process of its own (some minutes on a CPU).
"""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

from treadle import bench, runtime

SUITE = ("tree", "decode", "batch", "pace", "prefix", "http")
SUPPORT = {"__main__", "report", "shapes", "drive", "schemas", "serve_load", "serve_report", "serve_workloads"}
SUPPORT |= {"speculate_script", "speculate_steps", "speculate_text", "quality", "needles"}


def main() -> None:
    names = sorted(m.name for m in pkgutil.iter_modules(bench.__path__) if m.name not in SUPPORT)
    if len(sys.argv) < 2:
        for name in SUITE:
            subprocess.run([sys.executable, "-m", "treadle.bench", name], check=True)
        return
    if sys.argv[1] not in names:
        sys.exit(f"usage: python -m treadle.bench {{{','.join(names)}}} [options]")
    runtime.prepare()
    importlib.import_module(f"treadle.bench.{sys.argv[1]}").main(sys.argv[2:])


if __name__ == "__main__":
    main()
