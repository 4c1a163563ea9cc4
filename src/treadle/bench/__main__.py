"""`python -m treadle.bench [NAME [options]]`: one module per measured goal; the last line printed is JSON.

Without a name the suite for a CPU runs (`suite.py`); `gpu` is the one for a machine with CUDA or Metal.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys

from treadle import bench, runtime

SUPPORT = {"__main__", "report", "shapes", "drive", "schemas", "serve_load", "serve_report", "serve_workloads"}
SUPPORT |= {"speculate_script", "speculate_steps", "speculate_text", "quality", "needles"}
SUPPORT |= {"parts", "summary", "roofline", "rival", "rival_servers"}


def main() -> None:
    names = sorted(m.name for m in pkgutil.iter_modules(bench.__path__) if m.name not in SUPPORT)
    name, *options = sys.argv[1:] or ["suite"]
    if name not in names:
        sys.exit(f"usage: python -m treadle.bench {{{','.join(names)}}} [options]")
    runtime.prepare()
    importlib.import_module(f"treadle.bench.{name}").main(options)


if __name__ == "__main__":
    main()
