"""Progress bars on stderr for what `folders.Progress` reports, and a spinner beside what is waited for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from treadle.models.folders import Progress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID


def stderr() -> Console:
    """A console on stderr: stdout belongs to the text that was asked for."""
    from rich.console import Console

    return Console(stderr=True)


@contextmanager
def bars() -> Iterator[Progress]:
    """One bar per reported activity, drawn only on a terminal; may be reported to from any thread."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = stderr()
    tasks: dict[str, TaskID] = {}
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as drawn:

        def report(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = drawn.add_task(what, total=total)
            drawn.update(tasks[what], completed=done, total=total)

        yield report


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A spinner with `what` beside it while inside, on a terminal only."""
    with stderr().status(what):
        yield
