"""What `treadle serve` runs: takes the port, then loads the model while `/health` already answers."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import signal
import socket
import sys
from types import FrameType

import uvicorn

from treadle import __version__
from treadle.api.app import create_app
from treadle.cli.progress import bars
from treadle.cli.session import settled
from treadle.config import Config
from treadle.engine.engine import Engine
from treadle.errors import TreadleError
from treadle.models.folders import Progress
from treadle.models.load import LoadedModel, load_model
from treadle.models.sources import resolve

BACKLOG = 2048
GRACE_S = 5.0  # after draining, for the last bytes and the connections


def run(config: Config) -> None:
    """Serve until SIGINT or SIGTERM, then drain for at most `drain_s`; a second Ctrl-C does not wait.

    Raises:
        TreadleError: the address cannot be listened on.
        LoadError: the model cannot be loaded.
    """
    _log_to_stderr()
    listener = listen(config.host, config.port)
    try:
        with bars() as report:
            engine = Engine(lambda: _load(config, report), config)
            settings = uvicorn.Config(
                create_app(engine, config),
                loop="uvloop",
                http="httptools",
                lifespan="on",
                log_config=None,
                access_log=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=math.ceil(config.drain_s + GRACE_S),
            )
            server = Server(settings, engine)
            with asyncio.Runner(loop_factory=settings.get_loop_factory()) as runner:
                runner.run(_serve(server, listener))
    finally:
        listener.close()


class Server(uvicorn.Server):
    """Drains the engine while uvicorn waits for its connections, and ends quietly on a signal."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self.engine = engine

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not remembered, so not raised again at the end: a requested stop is no failure.
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        draining = asyncio.create_task(self.engine.stop())
        await super().shutdown(sockets)
        if self.force_exit:
            draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises TreadleError when the address is taken or not to be had."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise TreadleError(f"The host {host!r} is not known: {error.strerror}.", param="host") from error
    family, kind, protocol, _, address = infos[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise TreadleError(_why_not(host, port, error), param="port") from error
    return listener


def _why_not(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} on {host} is in use; stop the other program or choose another with --port."
    if error.errno == errno.EACCES:
        return f"Port {port} may not be used by this user; choose one above 1023 with --port."
    return f"Cannot listen on {host}, port {port}: {error.strerror}."


def _load(config: Config, report: Progress) -> LoadedModel:
    """Download and load; runs on the engine thread."""
    return load_model(resolve(config.model, report), config.context_length)


async def _serve(server: Server, listener: socket.socket) -> None:
    """Run the server to its end; a model that cannot be loaded ends it."""
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    loading = asyncio.create_task(settled(server.engine))
    await asyncio.wait((serving, loading), return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        loading.cancel()
    elif loading.exception() is not None:
        server.should_exit = True
    elif not server.should_exit:
        _announce(server.engine, *listener.getsockname()[:2])
    await serving
    if not loading.cancelled():
        await loading


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
