"""What `treadle serve` runs: loads the model while `/health` already answers, then serves until a signal."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from types import FrameType

from treadle import __version__
from treadle.api import server as http
from treadle.cli.progress import bars
from treadle.cli.session import settled
from treadle.config import Config
from treadle.engine.engine import Engine
from treadle.models.load import LoadedModel, load_model
from treadle.models.sources import resolve

log = logging.getLogger(__name__)


def run(config: Config, listener: socket.socket) -> None:
    """Serve on `listener` until SIGINT or SIGTERM, then drain; a second Ctrl-C does not wait for that.

    Raises:
        LoadError: the model cannot be loaded.
    """
    _log_to_stderr()
    engine = Engine(lambda: _load(config), config)
    server = Server(engine, config)
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(_serve(server, engine, listener))


class Server(http.Server):
    """The HTTP server as the process's main job: a signal is a request to end, not a failure."""

    serving: asyncio.Task[None]

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn would remember the signal and raise it again at the end.
        if self.should_exit and sig == signal.SIGINT:
            self.serving.cancel()
        self.should_exit = True


def _load(config: Config) -> LoadedModel:
    """Download and load; runs on the engine thread."""
    with bars() as report:
        source = resolve(config.model, report)
    log.info("Loading %s from %s.", source.name, source.path)
    return load_model(source, config.context_length)


async def _serve(server: Server, engine: Engine, listener: socket.socket) -> None:
    """Run the server to its end; a model that cannot be loaded ends it."""
    serving = server.serving = asyncio.create_task(server.serve(sockets=[listener]))
    loading = asyncio.create_task(settled(engine))
    await asyncio.wait((serving, loading), return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        loading.cancel()
    elif loading.exception() is not None:
        server.should_exit = True
    elif not server.should_exit:
        _announce(engine, *listener.getsockname()[:2])
    await asyncio.wait((serving, loading))
    for task in (loading, serving):
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


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("treadle").setLevel(logging.INFO)
