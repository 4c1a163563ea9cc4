"""What `treadle serve` runs: loads the model while `/health` already answers, then serves until a signal."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from logging.handlers import QueueListener
from types import FrameType

from treadle import __version__
from treadle.api import server as http
from treadle.cli.progress import bars
from treadle.cli.session import settled
from treadle.config import Config
from treadle.engine.engine import Engine
from treadle.engine.fleet import FILES_THREAD
from treadle.engine.thread import ENGINE_THREAD
from treadle.errors import TreadleError
from treadle.metrics.request_log import log_finished
from treadle.models.catalogue import read_catalogue
from treadle.models.prepare import offer

log = logging.getLogger(__name__)

THREADS = (ENGINE_THREAD, FILES_THREAD)


def run(config: Config, listener: socket.socket, logs: QueueListener) -> None:
    """Serve on `listener` until SIGINT or SIGTERM, then drain.

    A second Ctrl-C ends what still runs, a third one the process. `logs` writes the log.

    Raises:
        LoadError: the model cannot be loaded.
    """
    models = offer(config, read_catalogue(config.models_file), bars)
    engine = Engine(models.first, config, models.others, models.rules)
    engine.recorder.listener = log_finished
    server = Server(engine, config)
    failure: TreadleError | None = None
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        try:
            runner.run(_serve(server, engine, listener))
        except TreadleError as error:
            failure = error
    if any(thread.name in THREADS for thread in threading.enumerate()):
        # One downloads, loads or computes still: Python would tear MLX down under it, which ends in a crash.
        logs.stop()
        if failure is not None:
            print(f"treadle: {failure.message}", file=sys.stderr)
        sys.stdout.flush()
        os._exit(0 if failure is None else 1)
    if failure is not None:
        raise failure


class Server(http.Server):
    """The HTTP server as the process's main job: a signal is a request to end, not a failure."""

    def __init__(self, engine: Engine, config: Config) -> None:
        super().__init__(engine, config)
        self.impatient = False
        self.events: asyncio.AbstractEventLoop | None = None  # from the moment it serves

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn would remember the signal and raise it again at the end.
        if self.impatient and sig == signal.SIGINT:
            os._exit(130)
        if self.should_exit and sig == signal.SIGINT and self.events is not None:
            self.impatient = True
            self.events.call_soon_threadsafe(self.jobs.end)
        self.should_exit = True


async def _serve(server: Server, engine: Engine, listener: socket.socket) -> None:
    """Run the server to its end; a model that cannot be loaded ends it."""
    server.events = asyncio.get_running_loop()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    loading = asyncio.create_task(settled(engine))
    await asyncio.wait((serving, loading), return_when=asyncio.FIRST_COMPLETED)
    ending = server.should_exit  # by a signal: a load that was cut short for it is no failure
    if not loading.done():
        loading.cancel()
    elif loading.exception() is not None:
        server.should_exit = True
    elif not ending:
        _announce(engine, *listener.getsockname()[:2])
    await asyncio.wait((serving, loading))
    for task in (serving,) if ending else (loading, serving):
        if not task.cancelled():
            task.result()


def _announce(engine: Engine, host: str, port: int) -> None:
    """Say where to find what. A line for people, and the address for programs that wait for it."""
    shown = f"[{host}]" if ":" in host else host
    caps = engine.model.caps
    print(
        f"Treadle {__version__} serves {engine.model.name} (context {caps.context_length} tokens) "
        f"on http://{shown}:{port}/v1",
        flush=True,
    )
