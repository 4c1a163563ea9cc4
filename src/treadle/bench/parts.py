"""Several benchmarks in one run: each prints what it prints alone, a failing one is told and the others go on."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from io import TextIOBase
from typing import Any, TextIO

from treadle.bench import summary
from treadle.bench.report import report

KILLED = "it took longer than {:.0f} s and was ended"


@dataclass(frozen=True, slots=True)
class Part:
    """A benchmark by its module, with its options."""

    name: str
    options: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return " ".join((self.name, *self.options))


@dataclass
class Run:
    """What was found so far."""

    name: str
    reports: list[dict[str, Any]] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)  # by the title of the part
    left_out: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def part(self, part: Part, run: Callable[[Part, Callable[[str], None]], str | None]) -> None:
        """Run one by `run`, which is told where lines go and returns the sentence why it failed."""
        print(f"\n== {part.title}", flush=True)
        began = time.perf_counter()
        before = len(self.reports)
        failure = run(part, self._read)
        self.seconds[part.title] = time.perf_counter() - began
        if failure is None and len(self.reports) == before:
            failure = "it ended without a result"
        if failure is not None:
            self.failures[part.title] = failure
            print(f"FAILED {part.title}: {failure}")
        print(f"{self.seconds[part.title]:.0f} s", flush=True)

    def _read(self, line: str) -> None:
        """Keep a line that is a benchmark's JSON."""
        if line.startswith("{"):
            try:
                told = json.loads(line)
            except ValueError:
                return
            if "bench" in told:
                self.reports.append(told)

    def end(self) -> int:
        """Print the table, what failed and the JSON of all; returns the exit code."""
        told = [one for one in self.reports if "rows" in one]
        rows = summary.lines(told) or [{"what": "nothing was measured"}]
        facts = {"seconds": self.seconds, "failed": self.failures, "left_out": self.left_out}
        for title in self.left_out:
            print(f"LEFT OUT {title}: the time was over")
        for title, failure in self.failures.items():
            print(f"FAILED {title}: {failure}")
        report(self.name, rows, **facts)
        return 1 if self.failures else 0


def apart(part: Part, told: Callable[[str], None], limit_s: float = 600.0) -> str | None:
    """Run it in a process of its own, for `limit_s` at most; returns why it failed. Nothing that it started stays."""
    command = [sys.executable, "-m", "treadle.bench", part.name, *part.options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        late = threading.Event()
        watch = threading.Timer(limit_s, _end, (process, late))
        errors: list[str] = []
        reader = threading.Thread(target=_copy, args=(process.stderr, errors))
        watch.start()
        reader.start()
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                told(line)
        except BaseException:
            _kill(process)
            raise
        finally:
            watch.cancel()
            reader.join()
    if late.is_set():
        return KILLED.format(limit_s)
    if process.returncode == 0:
        return None
    return errors[-1] if errors else f"it ended with code {process.returncode}"


def _end(process: subprocess.Popen[str], late: threading.Event) -> None:
    late.set()
    _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    """With its own processes: they share its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def end_on_sigterm() -> None:
    """Let SIGTERM leave through every `finally`, so that what was started is ended too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def _copy(errors: TextIO, kept: list[str]) -> None:
    for line in errors:
        print(line, end="", file=sys.stderr, flush=True)
        kept[:] = [line.strip()] if line.strip() else kept


def inside(part: Part, told: Callable[[str], None]) -> str | None:
    """Run it in this process, with the models that are here already; returns why it failed."""
    with _heard(told):
        try:
            importlib.import_module(f"treadle.bench.{part.name}").main(list(part.options))
        except (Exception, SystemExit) as error:  # whatever one part raises, the others are to be measured
            if isinstance(error, SystemExit) and not error.code:
                return None
            traceback.print_exc()
            return f"{type(error).__name__}: {error}"
    return None


@contextmanager
def _heard(told: Callable[[str], None]) -> Iterator[None]:
    """While inside, `told` gets every line that is printed."""
    ear = _Ear(sys.stdout, told)
    with redirect_stdout(ear):
        yield


class _Ear(TextIOBase):
    def __init__(self, out: TextIO, told: Callable[[str], None]) -> None:
        self._out = out
        self._told = told
        self._begun = ""

    def write(self, text: str) -> int:
        self._out.write(text)
        *whole, self._begun = (self._begun + text).split("\n")
        for line in whole:
            self._told(line)
        return len(text)

    def flush(self) -> None:
        self._out.flush()


def chosen(parts: Sequence[Part], names: Sequence[str] | None) -> list[Part]:
    """Those with one of `names`; None: all."""
    return [part for part in parts if names is None or part.name in names]
