"""The HTTP application around an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from treadle import __version__
from treadle.api import admin, anthropic, errors, metrics, monitor, openai, responses, tokenise
from treadle.api.context import Context
from treadle.api.embeddings import router as embeddings
from treadle.api.job import Jobs
from treadle.api.ports import EnginePort
from treadle.api.responses_store import ResponseStore
from treadle.api.security import Security
from treadle.config import Config


def create_app(engine: EnginePort, config: Config) -> FastAPI:
    """The application. It starts `engine` with itself and stops it (draining) when it ends."""
    here = Context(engine, config, Jobs(engine))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await engine.stop()
        here.pool.shutdown(wait=False, cancel_futures=True)
        here.picture_pool.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(title="Treadle", version=__version__, lifespan=lifespan)
    app.state.context = here
    app.state.responses = ResponseStore()
    errors.install(app)
    app.add_middleware(Security, config=config)
    app.include_router(openai.router)
    app.include_router(anthropic.router)
    app.include_router(responses.router)
    app.include_router(tokenise.router)
    app.include_router(embeddings)
    app.include_router(admin.router)
    app.include_router(monitor.router)
    metrics.install(app, engine)
    return app
