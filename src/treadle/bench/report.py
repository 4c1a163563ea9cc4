"""How a benchmark tells its result: a table for people, one JSON line last."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table


def report(name: str, rows: Sequence[Mapping[str, Any]], **facts: Any) -> None:
    """Print `rows` (the same keys in each) as a table, then everything as one line of JSON."""
    from treadle.runtime import device_facts

    device = device_facts()
    table = Table(title=f"{name} ({device.name})")
    for key in rows[0]:
        table.add_column(key, justify="right")
    for row in rows:
        table.add_row(*[_cell(value) for value in row.values()])
    Console(width=140).print(table)
    about = {"bench": name, "device": device.name, "backend": device.backend, "machine": platform.machine()}
    when = datetime.now(UTC).date().isoformat()
    print(json.dumps({**about, "date": when, "versions": device.versions, **facts, "rows": list(rows)}))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
