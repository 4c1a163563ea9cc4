"""uvicorn, set up for long streams."""

from __future__ import annotations

import math

import uvicorn
from fastapi import FastAPI

from treadle.config import Config

KEEP_ALIVE_S = 75  # idle connections of clients that pool them


def make_server(app: FastAPI, config: Config) -> uvicorn.Server:
    """A server for `config.host:config.port`. On a signal it stops accepting, lets running requests finish for
    `drain_s`, cancels the rest, and ends."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, math.ceil(config.drain_s)),
        )
    )
