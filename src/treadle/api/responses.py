"""OpenAI's Responses API: a reply as a list of items, kept for a while so that a conversation can go on from it."""

from __future__ import annotations

import time
import uuid
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from treadle.api.body import checked, json_object, read, renamed
from treadle.api.context import context
from treadle.api.errors import error_response
from treadle.api.exchange import Streamed, Whole
from treadle.api.fields import ChatBody
from treadle.api.logprobs import ChatLogprobs
from treadle.api.openai import start
from treadle.api.ports import ModelPort, ResidentPort
from treadle.api.prompts import chat_prompts
from treadle.api.responses_body import ResponsesBody, chat_request, conversation, names_of, refuse_unknown
from treadle.api.responses_items import Item, Turns
from treadle.api.responses_reply import Keep, ResponseCollector, ResponseHead, ResponseWriter, fault, refused
from treadle.api.responses_stored import router as stored
from treadle.api.responses_stored import store_of
from treadle.api.responses_tools import functions, shown
from treadle.api.schema import body_schema
from treadle.api.sse import HEADERS
from treadle.api.waiting import answer
from treadle.api.wire import Wire
from treadle.errors import ContextLengthExceeded

router = APIRouter()
router.include_router(stored)


@router.post("/responses", include_in_schema=False)
@router.post("/v1/responses", openapi_extra=body_schema(ResponsesBody))
async def responses(http: Request) -> Response:
    """A reply to a list of items, or to a stored conversation and further items."""
    here = context(http)
    body = checked(json_object(await read(http, here.max_body)), ResponsesBody)
    refuse_unknown(body)
    slot = here.engine.find(body.model)
    history = store_of(http).history(body.previous_response_id)
    turns = conversation(body, history)
    before = (*history, *(body.input or ()))
    reply = partial(response_reply, http, body, chat_request(body, turns), turns, before)
    return await answer(here, slot, body.stream, reply, fault)


async def response_reply(
    http: Request, body: ResponsesBody, chat: ChatBody, turns: Turns, before: tuple[Item, ...], resident: ResidentPort
) -> Response:
    here, model = context(http), resident.model
    try:
        with renamed(names_of(turns)):
            job, _ = await start(here, resident, chat, "resp_", chat_prompts)
    except ContextLengthExceeded as error:
        if not body.stream:
            raise
        return stream_of(refused(head_of(f"resp_{uuid.uuid4().hex}", int(time.time()), model, body, chat), error))
    head = head_of(job.id, job.created, model, body, chat)
    logprobs = None if chat.alternatives is None else ChatLogprobs(model.tokenizer)
    keep: Keep = partial(store_of(http).keep, before=before) if body.store else forget
    if not body.stream:
        return Whole(job, ResponseCollector(head, logprobs, keep))
    writer = ResponseWriter(head, logprobs, keep)
    return Streamed(job, writer, here.config.keepalive_s, Wire(writer.silence, writer.fault, error_response))


def forget(response: dict[str, Any]) -> None:
    """For a response that its client does not want to be stored."""


def stream_of(data: bytes) -> Response:
    """A whole stream in one piece."""
    return Response(data, headers={name.decode(): value.decode() for name, value in HEADERS})


def head_of(id: str, created: int, model: ModelPort, body: ResponsesBody, chat: ChatBody) -> ResponseHead:
    """The parts of the response that repeat the request, or say what it left open."""
    echo = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata,
        "parallel_tool_calls": body.extra.get("parallel_tool_calls", True),
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.extra.get("prompt_cache_key"),
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "safety_identifier": body.extra.get("safety_identifier"),
        "service_tier": "default",
        "store": body.store,
        "temperature": drawn(model, "temperature", chat.temperature),
        "text": {"format": body.text.format or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": [shown(tool) for tool in functions(body.tools)],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": drawn(model, "top_p", chat.top_p),
        "truncation": "disabled",
        "user": body.extra.get("user"),
    }
    return ResponseHead(id, created, model.name, echo)


def drawn(model: ModelPort, name: str, asked: float | None) -> Any:
    """A sampling setting as it takes effect."""
    return model.defaults.get(name, 1.0) if asked is None else asked
