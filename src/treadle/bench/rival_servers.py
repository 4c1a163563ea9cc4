"""Other servers of OpenAI's protocol: how each is started, when it is ready, and how it is surely ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2

from treadle.errors import TreadleError

START_S = 300.0
END_S = 10.0
LOOK_S = 0.1
VERSION = """
import sys
from importlib import metadata, util
try:
    found = util.find_spec(sys.argv[1]) and metadata.version(sys.argv[2])
except metadata.PackageNotFoundError:
    found = None
print(found or "")
"""

Command = Callable[[str, str, int], list[str]]  # of the interpreter, the model's path and a port


@dataclass(frozen=True, slots=True)
class Rival:
    """A server that may be installed. `takes`: the kinds of models, "gguf" and "folder"."""

    name: str
    module: str
    package: str
    takes: tuple[str, ...]
    command: Command
    model: str | None = None  # what to ask for; None: the first that it lists

    def version(self, python: str) -> str | None:
        """Of the package in that interpreter; None where it is not installed."""
        try:
            done = subprocess.run([python, "-c", VERSION, self.module, self.package], capture_output=True, text=True)
        except OSError as error:
            raise TreadleError(f"{python} cannot be run: {error.strerror}.") from error
        return done.stdout.strip() or None


def _treadle(python: str, model: str, port: int) -> list[str]:
    return [python, "-c", "from treadle.cli import console; console()", "serve", model, "--port", str(port)]


def _mlx_lm(python: str, model: str, port: int) -> list[str]:
    return [python, "-m", "mlx_lm", "server", "--model", model, "--port", str(port)]


def _vllm_mlx(python: str, model: str, port: int) -> list[str]:
    command = ["-c", "from vllm_mlx.cli import main; main()", "serve", model, "--continuous-batching"]
    return [python, *command, "--host", "127.0.0.1", "--port", str(port)]


def _llama_cpp(python: str, model: str, port: int) -> list[str]:
    """All cores; by default it takes half of them. A second request must not end the first, as it would by default."""
    chosen = {"n_ctx": 4096, "n_threads": os.cpu_count(), "n_gpu_layers": -1, "interrupt_requests": False}
    options = [word for key, value in chosen.items() for word in (f"--{key}", str(value))]
    return [python, "-m", "llama_cpp.server", "--model", model, "--port", str(port), *options]


RIVALS = (
    Rival("treadle", "treadle", "treadle", ("gguf", "folder"), _treadle),
    Rival("mlx_lm.server", "mlx_lm", "mlx-lm", ("folder",), _mlx_lm, "default_model"),
    Rival("vllm-mlx", "vllm_mlx", "vllm-mlx", ("folder",), _vllm_mlx),
    Rival("llama-cpp-python", "llama_cpp", "llama-cpp-python", ("gguf",), _llama_cpp),
)


@contextmanager
def started(rival: Rival, python: str, model: Path, start_s: float = START_S) -> Iterator[str]:
    """The address of the server, which has answered a first chat; it is ended at the end, with all that it started.

    Raises:
        TreadleError: it ended or did not answer in time; with the last line that it wrote.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            rival.command(python, str(model), port), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            if (reason := _waited(process, url, rival.model, start_s)) is not None:
                log.seek(0)
                last = next((line.strip() for line in reversed(log.readlines()) if line.strip()), "it wrote nothing")
                raise TreadleError(f"{rival.name} {reason}: {last}")
            yield url
        finally:
            _end(process)


def _waited(process: subprocess.Popen[bytes], url: str, model: str | None, start_s: float) -> str | None:
    """Until a chat is answered; why it never was."""
    deadline = time.monotonic() + start_s
    answer = "nothing"
    while process.poll() is None:
        if time.monotonic() > deadline:
            return f"gave no answer to a chat within {start_s:.0f} s (last: {answer})"
        try:
            answer = _chat(url, model, deadline - time.monotonic())
            if answer == "200":
                return None
        except httpx2.HTTPError as error:
            answer = type(error).__name__
        time.sleep(LOOK_S)
    return f"ended with code {process.returncode}"


def _chat(url: str, model: str | None, timeout_s: float) -> str:
    """Status of a chat of one token."""
    with httpx2.Client(timeout=max(timeout_s, 1.0), trust_env=False) as client:
        if model is None:
            listed = client.get(f"{url}/v1/models")
            if not listed.is_success or not listed.json()["data"]:
                return str(listed.status_code)
            model = listed.json()["data"][0]["id"]
        body = {"model": model, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 1}
        return str(client.post(f"{url}/v1/chat/completions", json=body).status_code)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the whole session to end, then force it."""
    for asked in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, asked)
        except ProcessLookupError:
            break
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def versions(rivals: Sequence[Rival], pythons: Mapping[str, str], default: str) -> dict[str, str | None]:
    """By name, what is installed; `pythons` names interpreters other than `default`."""
    return {rival.name: rival.version(pythons.get(rival.name, default)) for rival in rivals}
