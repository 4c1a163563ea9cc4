"""Progress bars on stderr for what `folders.Progress` reports, and a spinner beside what is waited for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import TYPE_CHECKING

from treadle.models.folders import Progress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import TaskID


def stderr() -> Console:
    """A console on stderr: stdout belongs to the text that was asked for."""
    from rich.console import Console

    return Console(stderr=True)


@contextmanager
def bars() -> Iterator[Progress]:
    """One bar per reported activity, drawn only on a terminal; may be reported to from any thread."""
    lock = Lock()
    tasks: dict[str, TaskID] = {}
    drawn: Bars | None = None
    with ExitStack() as stack:

        def report(what: str, done: int, total: int | None) -> None:
            nonlocal drawn
            with lock:
                if drawn is None:  # mostly nothing is reported, and nothing of this is needed
                    drawn = stack.enter_context(_drawn())
                if what not in tasks:
                    tasks[what] = drawn.add_task(what, total=total)
            drawn.update(tasks[what], completed=done, total=total)

        yield report


def _drawn() -> Bars:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = stderr()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A spinner with `what` beside it while inside, on a terminal only."""
    with stderr().status(what):
        yield
