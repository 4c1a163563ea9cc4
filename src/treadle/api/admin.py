"""Routes about the server itself: what it is, what it serves, how it is, and ending a request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from treadle.api.context import context
from treadle.api.errors import json_response
from treadle.api.ports import FactsPort, ModelPort, SlotPort
from treadle.api.prompts import has_native_tools
from treadle.errors import NotFound, NotReady
from treadle.output.reasoning import markers_of
from treadle.types import CacheReport, Embedding

ANSWER_S = 30.0  # the engine answers between two steps; one that needs longer hangs

router = APIRouter()
T = TypeVar("T")


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(request: Request) -> Response:
    """200 only when requests can be answered now; else 503 and why."""
    engine = context(request).engine
    running, waiting = engine.counts()
    state = engine.state
    body: dict[str, Any] = {"status": state, "running": running, "waiting": waiting}
    if state == "ready":
        slot = engine.find(None)
        kv = {} if slot.facts is None else {"kv": described(slot.facts)["kv"]}
        pressure = engine.recorder.gauges.pressure
        memory = {} if pressure is None else {"memory": {"level": pressure.level, "holding": pressure.holding}}
        return json_response(body | {"model": slot.name} | kv | memory | {"speculation": speculation_of(slot)})
    body["reason"] = engine.failure or f"The engine is {state}."
    headers = {"retry-after": str(NotReady.retry_after_s)} if state == "loading" else {}
    return json_response(body, 503, headers)


@router.get("/v1/models/", include_in_schema=False)
@router.get("/v1/models")
async def models(request: Request) -> Response:
    """Every model that may be asked for, the default one first."""
    here = context(request)
    return json_response({"object": "list", "data": [model_entry(slot, here.started) for slot in here.engine.slots]})


@router.get("/v1/models/{id:path}")
async def model(request: Request, id: str) -> Response:
    """One model by any of its names, which may contain slashes."""
    here = context(request)
    return json_response(model_entry(here.engine.find(id), here.started))


@router.post("/v1/models/{id:path}/load")
async def load(request: Request, id: str) -> Response:
    """Load a model now; answers when it is loaded."""
    here = context(request)
    slot = here.engine.find(id)
    await slot.load()
    return json_response(model_entry(slot, here.started))


@router.post("/v1/models/{id:path}/unload")
async def unload(request: Request, id: str) -> Response:
    """Unload a model when its running requests have ended; answers when its memory is free."""
    here = context(request)
    slot = here.engine.find(id)
    await slot.unload()
    return json_response(model_entry(slot, here.started))


@router.post("/v1/requests/{id}/cancel")
async def cancel(request: Request, id: str) -> Response:
    """End a running request by the id that its client saw."""
    if not context(request).jobs.cancel(id):
        raise NotFound(f"No request {id[:100]!r} is running.", param="id", code="request_not_found")
    return json_response({"id": id, "object": "request", "cancelled": True})


@router.get("/v1/cache")
async def cache(request: Request) -> Response:
    """What the prefix cache holds and what it has saved; a cache that is off is empty."""
    return json_response(cache_object(await answered(context(request).engine.cache_report())))


@router.delete("/v1/cache")
async def clear_cache(request: Request) -> Response:
    """Drop every prefix that no running request uses, from memory and from disk."""
    freed = await answered(context(request).engine.cache_clear())
    return json_response({"object": "cache", "cleared": True, "freed_bytes": freed})


async def answered(question: Awaitable[T]) -> T:
    """What the engine says. Raises NotReady when it does not say it in time."""
    try:
        async with asyncio.timeout(ANSWER_S):
            return await question
    except TimeoutError as error:
        raise NotReady(f"The engine has not answered for {ANSWER_S:g} seconds.") from error


def cache_object(report: CacheReport) -> dict[str, Any]:
    """The report as it is, and its totals."""
    return {
        "object": "cache",
        "enabled": report.enabled,
        "note": report.note,
        "budget_bytes": report.budget_bytes,
        "used_bytes": report.used_bytes,
        "totals": {
            "entries": len(report.entries),
            "tokens": sum(entry.tokens for entry in report.entries),
            "bytes": sum(entry.bytes for entry in report.entries),
            "lookups": sum(report.hits.values()),
        },
        "hits": named(report.hits),
        "reused_tokens": report.reused_tokens,
        "computed_tokens": report.computed_tokens,
        "evictions": named(report.evictions),
        "freed_bytes": named(report.freed_bytes),
        "bytes_by_tier": named(report.bytes_by_tier),
        "disk": None if report.disk is None else named(report.disk),
        "entries": report.entries,  # dataclasses are JSON objects to the encoder
    }


def named(counts: Mapping[str, int]) -> dict[str, int]:
    """Plain strings as keys: the encoder takes no enumerations for them."""
    return {str(name): count for name, count in counts.items()}


def model_entry(slot: SlotPort, created: int) -> dict[str, Any]:
    """OpenAI's model object, the state of this model, and what it can do as far as that is known."""
    entry = {
        "id": slot.name,
        "object": "model",
        "created": created,
        "owned_by": "treadle",
        "aliases": list(slot.aliases),
        "state": slot.state,
        "failure": slot.failure,
        "pinned": slot.pinned,
        "bytes": slot.num_bytes,
        "capabilities": None if slot.resident is None else capabilities(slot.resident.model),
        "speculation": speculation_of(slot),
        "specprefill": None if slot.skimming is None else asdict(slot.skimming),
    }
    return entry if slot.facts is None else entry | described(slot.facts)


def speculation_of(slot: SlotPort) -> dict[str, Any] | None:
    """Where a loaded model's drafts come from; no sources: there are none, and why."""
    force = slot.drafting
    if force is None:
        return None
    return {"sources": list(force.sources), "draft_model": force.draft_model, "why": force.why}


def described(facts: FactsPort) -> dict[str, Any]:
    """What was found when the model was loaded."""
    caps = facts.caps
    return {
        "revision": facts.revision,
        "context_length": caps.context_length,
        "max_model_len": caps.context_length,
        "vocab_size": caps.vocab_size,
        "layers": {kind.value: caps.layers.count(kind) for kind in dict.fromkeys(caps.layers)},
        "window": caps.window,
        "batching": {"mode": caps.batching.value, "why": caps.why},
        "vision": None if caps.vision is None else asdict(caps.vision),
        "embedding": None if caps.embedding is None else embedding_of(caps.embedding),
        "kv": {
            "bits": str(caps.kv),
            "why": caps.kv_why,
            "layers": dict(caps.kv_layers),
            "delta_percent": caps.kv_losses.get(str(caps.kv)),
            "losses": dict(caps.kv_losses),
        },
        "chat_template": facts.chat_template,
    }


def embedding_of(embedding: Embedding) -> dict[str, Any]:
    """How a model that was made to embed does it; without a pooling it does not, and `why`."""
    return {
        "pooling": embedding.pooling,
        "why": embedding.why,
        "dimensions": embedding.size,
        "least_dimensions": embedding.least_size,
        "allowed_dimensions": list(embedding.sizes),
        "max_tokens": embedding.context_length,
        "generates": embedding.generates,
    }


def capabilities(model: ModelPort) -> list[str]:
    """What requests may ask of a loaded model. Tools work everywhere; "tools" are those of its own template."""
    embedding = model.caps.embedding
    writes = embedding is None or embedding.generates
    chat = writes and model.chat_template is not None
    has = {
        "completions": writes,
        "chat": chat,
        "tools": chat and has_native_tools(model.tokenizer),
        "reasoning": chat and markers_of(model.tokenizer) is not None,
        "images": chat and model.reader is not None,
        "embeddings": embedding is not None and embedding.pooling is not None,
    }
    return [name for name, there in has.items() if there]
