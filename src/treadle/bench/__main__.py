"""`python -m treadle.bench [NAME [options]]`: one module per measured goal; the last line printed is JSON.

Without a name the suite for a CPU runs (`suite.py`); `gpu` is the one for a machine with CUDA or Metal.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import sys
from pathlib import Path

from treadle import bench, runtime
from treadle.errors import TreadleError

SUPPORT = {"__main__", "report", "shapes", "drive", "schemas", "serve_load", "serve_report", "serve_workloads"}
SUPPORT |= {"speculate_script", "speculate_steps", "speculate_text", "quality", "needles"}
SUPPORT |= {"parts", "summary", "roofline", "rival", "rival_servers", "values"}


def main() -> None:
    names = sorted(m.name for m in pkgutil.iter_modules(bench.__path__) if m.name not in SUPPORT)
    name, *options = sys.argv[1:] or ["suite"]
    if name in ("-h", "--help"):
        print(_overview(names))
        return
    if name not in names:
        sys.exit(f"usage: python -m treadle.bench {{{','.join(names)}}} [options]")
    runtime.prepare()
    try:
        importlib.import_module(f"treadle.bench.{name}").main(options)
    except TreadleError as error:
        sys.exit(f"{name}: {error}")


def _overview(names: list[str]) -> str:
    """What there is to measure, by the first line of each module."""
    places = {name: Path(bench.__path__[0], f"{name}.py") for name in names}
    tells = {name: ast.get_docstring(ast.parse(place.read_text("utf-8"))) or "" for name, place in places.items()}
    lines = [f"  {name:<12}{told.splitlines()[0]}" for name, told in tells.items()]
    return "\n".join([f"{(__doc__ or '').strip()}\n\nNAME, each with options of its own (NAME --help):", *lines])


if __name__ == "__main__":
    main()
