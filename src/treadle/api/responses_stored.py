"""The routes of the Responses API beside the one that makes them: what is stored, and how long a prompt would be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from treadle.api.anthropic import counted
from treadle.api.body import checked, json_object, read, renamed
from treadle.api.context import context
from treadle.api.errors import json_response
from treadle.api.responses_body import ResponsesBody, chat_request, conversation, names_of, refuse_unknown
from treadle.api.responses_items import Item
from treadle.api.responses_store import ResponseStore
from treadle.api.schema import body_schema
from treadle.errors import BadRequest

router = APIRouter()

PREFIXES = {"function_call": "fc", "function_call_output": "fco", "message": "msg", "reasoning": "rs"}


class Page(BaseModel):
    """The query of a list. `include` asks for parts of items that are there anyway."""

    model_config = ConfigDict(extra="ignore")

    after: str | None = None
    limit: int = Field(default=20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"


@router.post("/v1/responses/input_tokens", openapi_extra=body_schema(ResponsesBody))
async def input_tokens(http: Request) -> Response:
    """How many tokens the prompt of such a request has, also when it is over the context."""
    here = context(http)
    body = checked(json_object(await read(http, here.max_body)), ResponsesBody)
    refuse_unknown(body)
    history = store_of(http).history(body.previous_response_id)
    turns = conversation(body, history)
    chat = chat_request(body, turns)
    async with here.engine.find(body.model).use() as resident:
        with renamed(names_of(turns)):
            count = await counted(here, resident.model, chat)
    return json_response({"object": "response.input_tokens", "input_tokens": count})


@router.get("/v1/responses/{id}")
async def response(http: Request, id: str) -> Response:
    """A finished response that was stored."""
    found = store_of(http).get(id)
    if http.query_params.get("stream") == "true":
        raise BadRequest("A stored response cannot be streamed again.", param="stream", code="unsupported_parameter")
    return json_response(found)


@router.get("/v1/responses/{id}/input_items")
async def input_items(http: Request, id: str) -> Response:
    """The conversation that a stored response answered, in pages."""
    items = store_of(http).before(id)
    page = checked(dict(http.query_params), Page)
    numbered = [input_item(item, f"{index:04d}{id.removeprefix('resp_')}") for index, item in enumerate(items)]
    return json_response(page_of(numbered, page))


@router.post("/v1/responses/{id}/cancel")
async def cancel(http: Request, id: str) -> Response:
    """Refused: only what runs in the background could be cancelled; other responses end with their connection."""
    store_of(http).get(id)
    raise BadRequest("Only responses that run in the background can be cancelled; none do here.", param="id")


@router.delete("/v1/responses/{id}")
async def delete(http: Request, id: str) -> Response:
    """Forget a response; those that continue it stay."""
    store_of(http).delete(id)
    return json_response({"id": id, "object": "response", "deleted": True})


def store_of(http: Request) -> ResponseStore:
    """The store of the application that got `http`."""
    found = http.app.state.responses
    assert isinstance(found, ResponseStore)
    return found


def input_item(item: Item, id: str) -> dict[str, Any]:
    """An item as the list shows it: with an id, and a message's text as a part. `id` is used where it has none."""
    kind = item.get("type") or "message"
    shown: dict[str, Any] = {"id": f"{PREFIXES.get(kind, 'item')}_{id}", "status": "completed"}
    shown |= {name: value for name, value in item.items() if value is not None}
    shown["type"] = kind
    if kind == "message" and isinstance(item.get("content"), str):
        shown["content"] = [text_part(str(item.get("role")), item["content"])]
    return shown


def text_part(role: str, text: str) -> dict[str, Any]:
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": []}
    return {"type": "input_text", "text": text}


def page_of(items: Sequence[dict[str, Any]], page: Page) -> dict[str, Any]:
    """One page of a list, which follows the item `after`. Raises BadRequest where that is not in it."""
    ordered = list(items if page.order == "asc" else reversed(items))
    ids = [item["id"] for item in ordered]
    if page.after is not None and page.after not in ids:
        raise BadRequest(f"No item has the id {page.after[:100]!r}.", param="after")
    begin = 0 if page.after is None else ids.index(page.after) + 1
    data = ordered[begin : begin + page.limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": begin + page.limit < len(ordered),
    }
