"""`/metrics` and `/v1/stats`, and the clock that writes their history."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, FastAPI, Query
from starlette.requests import Request
from starlette.responses import Response

from treadle.api.context import Context, context
from treadle.api.errors import json_response
from treadle.api.ports import EnginePort, SlotPort
from treadle.api.traffic import Traffic
from treadle.metrics.prometheus import Exporter
from treadle.metrics.snapshot import ModelFacts
from treadle.metrics.stats import EngineFacts, reading, stats

TICK_S = 1.0


async def keep_history(engine: EnginePort) -> None:
    """A point a second, on the second's own beat, until cancelled."""
    clock = asyncio.get_running_loop()
    due = clock.time()
    while True:
        due = max(due + TICK_S, clock.time())
        await asyncio.sleep(due - clock.time())
        engine.recorder.tick(*engine.counts())


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    here: Context = app.state.context
    clock = asyncio.create_task(keep_history(here.engine))
    yield
    clock.cancel()


router = APIRouter(lifespan=lifespan)


def install(app: FastAPI, engine: EnginePort) -> None:
    """Add the routes, and count what `app` answers. After every other middleware, to see what those refuse."""
    app.state.exporter = Exporter(lambda: reading(engine.recorder, facts(engine)))
    app.include_router(router)
    app.add_middleware(Traffic, recorder=engine.recorder)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Counters, gauges and histograms for Prometheus."""
    exporter: Exporter = request.app.state.exporter
    body, content_type = exporter.text(request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})


@router.get("/v1/stats")
async def snapshot(request: Request, since: Annotated[float, Query(ge=0, allow_inf_nan=False)] = 0.0) -> Response:
    """Everything at once, for people and pages; with `since` only the newer part of the history."""
    engine = context(request).engine
    return json_response(stats(engine.recorder, facts(engine), since))


def facts(engine: EnginePort) -> EngineFacts:
    """What the engine says of itself, in any state."""
    running, waiting = engine.counts()
    return EngineFacts(engine.state, engine.failure, running, waiting, models_of(engine))


def models_of(engine: EnginePort) -> list[ModelFacts]:
    """The served models."""
    return [facts_of(slot) for slot in engine.slots]


def facts_of(slot: SlotPort) -> ModelFacts:
    """Its state, and what is known of it since it was loaded first."""
    known = ModelFacts(slot.name, slot.state, slot.failure, slot.pinned, slot.num_bytes)
    if slot.facts is None:
        return known
    caps = slot.facts.caps
    known = replace(known, context_length=caps.context_length, batching=caps.batching.value)
    return replace(known, kv_bits=str(caps.kv), kv_why=caps.kv_why, kv_losses=dict(caps.kv_losses))
