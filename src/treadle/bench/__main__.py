"""`python -m treadle.bench NAME [options]`: one module per measured goal; the last line printed is JSON."""

from __future__ import annotations

import importlib
import pkgutil
import sys

from treadle import bench, runtime

SUPPORT = {"__main__", "report", "shapes", "drive"}


def main() -> None:
    names = sorted(m.name for m in pkgutil.iter_modules(bench.__path__) if m.name not in SUPPORT)
    if len(sys.argv) < 2 or sys.argv[1] not in names:
        sys.exit(f"usage: python -m treadle.bench {{{','.join(names)}}} [options]")
    runtime.prepare()
    importlib.import_module(f"treadle.bench.{sys.argv[1]}").main(sys.argv[2:])


if __name__ == "__main__":
    main()
