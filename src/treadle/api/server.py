"""uvicorn, set up for long streams and for an engine that drains."""

from __future__ import annotations

import asyncio
import logging
import math
import socket

import uvicorn

from treadle.api.app import create_app
from treadle.api.connection import Connection
from treadle.api.ports import EnginePort
from treadle.api.security import exposed_without_key
from treadle.config import Config

log = logging.getLogger(__name__)

IDLE_S = 75  # idle connections of clients that pool them
GRACE_S = 5  # for the last bytes, after the engine has ended everything


class Server(uvicorn.Server):
    """On a signal the engine stops first: running requests finish for `drain_s`, the rest get their error."""

    def __init__(self, engine: EnginePort, config: Config) -> None:
        self._engine = engine
        if (warning := exposed_without_key(config)) is not None:
            log.warning("%s", warning)
        app = create_app(engine, config)
        self.jobs = app.state.context.jobs
        settings = uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            log_level="warning",
            access_log=False,
            http=Connection,
            server_header=False,
            proxy_headers=False,  # a client's address is never what its headers say
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=math.ceil(config.drain_s) + GRACE_S,
        )
        super().__init__(settings)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await asyncio.gather(self._engine.stop(), super().shutdown(sockets))
