"""Anthropic's routes: messages, and counting their tokens."""

from __future__ import annotations

import asyncio
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from treadle.api.anthropic_convert import chat_body, client_name, served_model
from treadle.api.anthropic_fields import CountBody, MessagesBody
from treadle.api.anthropic_reply import ANTHROPIC, MessageCollector, MessageHead, MessageWriter
from treadle.api.body import checked, json_object, read, renamed
from treadle.api.context import Context, context
from treadle.api.errors import json_response
from treadle.api.exchange import Streamed, Whole
from treadle.api.fields import ChatBody
from treadle.api.openai import prepared, start
from treadle.api.ports import ModelPort, ResidentPort
from treadle.api.prompts import chat_prompts
from treadle.api.schema import body_schema
from treadle.api.waiting import answer
from treadle.errors import ContextLengthExceeded

router = APIRouter()


@router.post("/v1/messages", openapi_extra=body_schema(MessagesBody))
async def messages(http: Request) -> Response:
    """A reply to a conversation."""
    here = context(http)
    body = checked(json_object(await read(http, here.max_body)), MessagesBody)
    reply = partial(message_reply, here, body, chat_body(body))
    return await answer(here, served_model(here, body.model), body.stream, reply, ANTHROPIC.fault)


async def message_reply(here: Context, body: MessagesBody, chat: ChatBody, resident: ResidentPort) -> Response:
    with renamed(client_name):
        job, prompts = await start(here, resident, chat, "msg_", chat_prompts)
    omitted = body.thinking is not None and body.thinking.omitted
    head = MessageHead(job.id, resident.model.name, sum(len(prompt.ids) for prompt in prompts), omitted)
    if body.stream:
        return Streamed(job, MessageWriter(head), here.config.keepalive_s, ANTHROPIC)
    return Whole(job, MessageCollector(head), ANTHROPIC)


@router.post("/v1/messages/count_tokens", openapi_extra=body_schema(CountBody))
async def count_tokens(http: Request) -> Response:
    """How many tokens the prompt of such a request has, also when it is over the context."""
    here = context(http)
    body = checked(json_object(await read(http, here.max_body)), CountBody)
    chat = chat_body(body)
    async with served_model(here, body.model).use() as resident:
        with renamed(client_name):
            return json_response({"input_tokens": await counted(here, resident.model, chat)})


async def counted(here: Context, model: ModelPort, chat: ChatBody) -> int:
    """The length of the prompt. Far over the context, what was seen when the count was given up."""
    try:
        prompts = await asyncio.get_running_loop().run_in_executor(
            here.threads(chat.shows_images), prepared, model, chat, chat_prompts
        )
    except ContextLengthExceeded as error:
        return error.num_tokens
    return sum(len(prompt.ids) for prompt in prompts)
