"""`treadle models`: what is known and what is on the disk."""

from __future__ import annotations

from treadle.models.sources import KnownModel, known_models


def models() -> None:
    """List the known models and the downloaded ones, with sizes and paths.

    treadle models
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("NAME", "STATE", "SIZE", "ABOUT", "PATH"):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("NAME", "STATE", "SIZE"))
    for model in known_models():
        table.add_row(model.name, *_state(model), model.about, str(model.path or "-"))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 400  # never fold a line that another program reads
    console.print(table)


def _state(model: KnownModel) -> tuple[str, str]:
    state = "downloaded" if model.downloaded else "not downloaded"
    return state, f"{model.num_bytes / 1e6:.0f} MB"
