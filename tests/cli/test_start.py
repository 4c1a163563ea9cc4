"""What a server does before its model is loaded: it answers, and nothing heavy is imported for that."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from tests.fresh import run
from tests.live import until
from tests.test_blas import needs_openblas

HEAVY = ("mlx", "mlx_lm", "mlx_vlm", "transformers", "huggingface_hub", "rich.progress")
# `treadle serve` whose engine waits for a line; what is imported by then is told. Its port: the last argument.
HELD = f"""
import json, sys
from treadle import cli
from treadle.engine.thread import EngineThread
began = EngineThread._main
def held(thread):
    sys.stdin.readline()
    print(json.dumps([name for name in {HEAVY} if name in sys.modules]), flush=True)
    began(thread)
EngineThread._main = held
sys.argv = ["treadle", "serve", "--port", sys.argv[1]]
cli.main()
"""


def test_health_is_answered_before_anything_heavy_is_imported() -> None:
    port = _free_port()
    url = f"http://127.0.0.1:{port}/health"
    command = [sys.executable, "-c", HELD, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            until(lambda: _answers(url), within_s=60)
            answer = httpx.get(url, timeout=20)
            assert (answer.status_code, answer.json()["status"]) == (503, "loading")
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline()) == []
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


def _answers(url: str) -> bool:
    try:
        httpx.get(url, timeout=20)
    except httpx.TransportError:
        return False
    return True


# What `treadle serve` does up to a claimed device; told: what was the case when NumPy and MLX were looked for.
WATCHED = """
import json, os, sys
from treadle import cli, runtime
seen = {}
class Watch:
    def find_spec(self, name, path, target=None):
        if name == "numpy":
            seen.setdefault(name, "OPENBLAS_NUM_THREADS" in os.environ)
        if name == "mlx.core":
            seen.setdefault(name, runtime._asked_compiler)
sys.meta_path.insert(0, Watch())
def until_claimed(config, listener, logs):
    from treadle.engine.thread import EngineThread
    from treadle.metrics.recorder import Recorder
    EngineThread(config, Recorder())._claim()
    print(json.dumps(seen))
prepare_ahead = runtime.prepare_ahead
def ahead():
    prepare_ahead()
    from treadle.cli import server
    server.run = until_claimed
runtime.prepare_ahead = ahead
sys.argv = ["treadle", "serve", "--port", os.environ["FREE_PORT"]]
cli.main()
"""


@needs_openblas
def test_the_threads_of_blas_are_set_before_numpy_and_the_compiler_is_tried_before_mlx() -> None:
    """NumPy's own OpenBLAS reads their number when it is loaded, and MLX whether it may compile."""
    assert run(WATCHED, FREE_PORT=str(_free_port())) == {"numpy": True, "mlx.core": True}


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--version"], 0), (["nonsense"], 2), (["generate", "/nowhere/x", "-p", "x"], 1)]
)
@pytest.mark.parametrize("loaded", [False, True])
def test_the_process_ends_with_its_code_and_all_it_had_to_say(arguments: list[str], code: int, loaded: bool) -> None:
    """`loaded`: with MLX in the process, which then leaves without taking the interpreter down."""
    first = "import treadle.runtime; treadle.runtime.prepare(); import mlx.core; " if loaded else ""
    source = (
        first + "import atexit; atexit.register(lambda: print('the end')); import treadle.cli; treadle.cli.console()"
    )
    done = subprocess.run([sys.executable, "-c", source, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    assert ("the end" in done.stdout) != loaded, "handlers from before `console` are not called then"
    assert "treadle 0." in done.stdout if code == 0 else done.stderr


def test_what_is_registered_while_the_command_runs_is_called_at_the_end() -> None:
    source = """
import atexit, sys, treadle.cli
def main():
    import treadle.runtime
    treadle.runtime.prepare()
    import mlx.core
    atexit.register(lambda: print("cleaned"))
    sys.exit(3)
treadle.cli.main = main
treadle.cli.console()
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (3, "cleaned\n")
