"""Small routes around the tokenizer: texts to ids and back, messages to the prompt's text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from treadle.api.body import checked, generation, json_object, read
from treadle.api.context import Context, context
from treadle.api.errors import json_response
from treadle.api.fields import ChatBody
from treadle.api.ports import ModelPort
from treadle.api.prompts import chat_text, full_text, refuse_hopeless
from treadle.api.schema import body_schema
from treadle.errors import BadRequest
from treadle.output.detokenise import Detokeniser
from treadle.output.pieces import pieces_of
from treadle.prompt.tokenise import encode

router = APIRouter()
T = TypeVar("T")

CHAT_FIELDS = ("model", "messages", "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort")


class TokeniseBody(BaseModel):
    """`POST /v1/tokenize`: a `prompt`, or `messages` with what else of a chat request shapes its prompt."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = Field(default=None, min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_special_tokens: bool | None = None


class DetokeniseBody(BaseModel):
    """`POST /v1/detokenize`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    tokens: list[int]


class TemplateBody(BaseModel):
    """`POST /v1/apply-template`: the fields of a chat request that shape its prompt."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


@router.post("/v1/tokenize", openapi_extra=body_schema(TokeniseBody))
async def tokenize(http: Request) -> Response:
    """The ids of a text, or of the prompt that a chat request with these messages has."""
    here = context(http)
    values = json_object(await read(http, here.max_body))
    body = checked(values, TokeniseBody)
    async with here.engine.find(body.model).use() as resident:
        model, images = resident.model, False
        if body.prompt is not None and body.messages is None:
            special = True if body.add_special_tokens is None else body.add_special_tokens
            work = partial(ids_of, model, body.prompt, "prompt", special)
        elif body.messages is not None and body.prompt is None:
            chat = chat_of(values)
            images = chat.shows_images
            work = partial(chat_ids, model, chat, body.add_special_tokens or False)
        else:
            raise BadRequest("Give either prompt or messages.", param="prompt")
        tokens = await in_pool(here, work, images)
        return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": model.caps.context_length})


@router.post("/v1/detokenize", openapi_extra=body_schema(DetokeniseBody))
async def detokenize(http: Request) -> Response:
    """The text of ids, special tokens included."""
    here = context(http)
    body = checked(json_object(await read(http, here.max_body)), DetokeniseBody)
    async with here.engine.find(body.model).use() as resident:
        return json_response({"text": await in_pool(here, partial(text_of, resident.model, body.tokens))})


@router.post("/v1/apply-template", openapi_extra=body_schema(TemplateBody))
async def apply_template(http: Request) -> Response:
    """The prompt's text of a chat request with these messages."""
    here = context(http)
    values = json_object(await read(http, here.max_body))
    body = checked(values, TemplateBody)
    async with here.engine.find(body.model).use() as resident:
        return json_response({"prompt": await in_pool(here, partial(chat_text, resident.model, chat_of(values)))})


def chat_of(values: Mapping[str, Any]) -> ChatBody:
    """The part of a body that a chat request has too. Raises BadRequest."""
    return generation({name: values[name] for name in CHAT_FIELDS if name in values}, ChatBody)


async def in_pool(here: Context, work: Callable[[], T], images: bool = False) -> T:
    """What `work` gives, from the prompt threads."""
    return await asyncio.get_running_loop().run_in_executor(here.threads(images), work)


def chat_ids(model: ModelPort, body: ChatBody, special: bool) -> list[int]:
    return ids_of(model, full_text(model, body), "messages", special)


def ids_of(model: ModelPort, text: str, param: str, special: bool) -> list[int]:
    """The ids of a text that may be longer than the context, but not hopelessly. Raises ContextLengthExceeded."""
    refuse_hopeless(model, text, param)
    ids: list[int] = encode(model.tokenizer, text, add_special_tokens=special).tolist()
    return ids


def text_of(model: ModelPort, tokens: list[int]) -> str:
    """Raises BadRequest for ids that are none of the model's."""
    if tokens and not (min(tokens) >= 0 and max(tokens) < model.caps.vocab_size):
        raise BadRequest(f"tokens: ids must lie between 0 and {model.caps.vocab_size - 1}.", param="tokens")
    pieces_of(model.tokenizer)
    detokeniser = Detokeniser(model.tokenizer, keep_special=True)
    return detokeniser.push(tokens) + detokeniser.finish()
