"""From the command to the first answers of a server: `/health`, and the whole reply of the first chat.

    python -m treadle.bench start [--model smollm2] [--runs 3]

Each run is a process of its own, by turns without a calibration file and with the one that the run before has written.
The model's files are in the system's memory after the first run, which is not counted. Processor seconds are those of
the server until then: unlike the time on the clock they say little of what else runs on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from treadle.bench.report import report
from treadle.bench.values import positive
from treadle.models import calibration
from treadle.models.folders import cache_folder

COMMAND = (sys.executable, "-c", "from treadle.cli import console; console()")
LOOK_S = 0.01
LONGEST_S = 300.0  # for the start and for the reply
BODY = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 16,
    "temperature": 0,
}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="treadle.bench start", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--runs", type=positive, default=3, help="of each kind")
    args = parser.parse_args(argv)
    cold, known = [], []
    with _own_cache() as place:
        start(args.model, place)
        for _ in range(args.runs):
            forget(place)
            cold.append(start(args.model, place))
            known.append(start(args.model, place))
    rows = [_row("without calibration", cold), _row("with it", known)]
    report("start", rows, model=args.model, runs=args.runs)


def _row(name: str, runs: list[dict[str, float]]) -> Mapping[str, Any]:
    return {"start": name, **{key: median(run[key] for run in runs) for key in runs[0]}}


@contextmanager
def _own_cache() -> Iterator[Path]:
    """A cache folder without calibrations, with everything else of the user's own."""
    own = cache_folder()
    own.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        for found in own.iterdir():
            if found.name != calibration.FOLDER:
                (Path(place) / found.name).symlink_to(found)
        yield Path(place)


def forget(place: Path) -> None:
    """Remove the calibrations in the cache folder `place`."""
    for path in (place / calibration.FOLDER).glob("*.json"):
        path.unlink()


def start(model: str, place: Path) -> dict[str, float]:
    """Start a server of `model` with the cache folder `place`, ask it, end it. Seconds since the command, and its
    processor seconds until then where the system tells them.

    Raises:
        RuntimeError: the server ended or did not answer in time.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [*COMMAND, "serve", model, "--port", str(port)]
    began = time.monotonic()
    with subprocess.Popen(
        command, env={**os.environ, "TREADLE_CACHE": str(place)}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            found: dict[str, float] = {}
            for name, path, body in (("/health", "/health", None), ("first chat", "/v1/chat/completions", BODY)):
                _answer(process, url + path, body, began + LONGEST_S)
                found[f"{name} s"] = time.monotonic() - began
                if (used := _processor_seconds(process.pid)) is not None:
                    found[f"{name} cpu s"] = used
            return found
        finally:
            process.terminate()


def _answer(process: subprocess.Popen[bytes], url: str, body: Any, deadline: float) -> None:
    """Ask until there is an answer; a server that loads says so on `/health` with 503, and lets a chat wait."""
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(asked, timeout=LONGEST_S) as answer:
                answer.read()
            return
        except urllib.error.HTTPError as error:
            error.close()
            if body is None:
                return
            raise RuntimeError(f"The server answered {error.code} to the chat.") from error
        except OSError:
            time.sleep(LOOK_S)
    raise RuntimeError(f"The server did not answer at {url}.")


def _processor_seconds(pid: int) -> float | None:
    """Of the process and its threads so far; None where there is no /proc."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")
