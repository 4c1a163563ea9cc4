"""A request's body from the wire to a checked model: size, JSON, types, ranges, unknown names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from treadle.api.fields import GenerationBody
from treadle.api.unsupported import refuse_unsupported
from treadle.errors import BadRequest, BodyTooLarge
from treadle.prompt.conversation import deeper

Body = TypeVar("Body", bound=GenerationBody)
Checked = TypeVar("Checked", bound=BaseModel)

MAX_DEPTH = 200  # levels of lists and objects; orjson writes 254, and what is made of a body adds a few
STALL_S = 60.0  # a client that sends nothing of its body for so long has lost it


async def read(request: Request, limit: int) -> bytes:
    """The whole body of at most `limit` bytes; a declared length over it is refused before anything is read.

    Raises BodyTooLarge; BadRequest for a compressed body, and for one that does not go on.
    """
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise BadRequest(f"Bodies are not read in the content encoding {coding[:100]!r}.", param="content-encoding")
    too_large = BodyTooLarge(f"The request body is larger than {limit / 2**20:g} MB.")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    clock = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(STALL_S) as patience:
            async for chunk in request.stream():
                patience.reschedule(clock() + STALL_S)
                size += len(chunk)
                if size > limit:
                    raise too_large
                chunks.append(chunk)
    except TimeoutError as error:
        raise BadRequest(f"Nothing of the request body came for {STALL_S:g} s.", code="body_incomplete") from error
    return b"".join(chunks)


def parse(data: bytes, model: type[Body]) -> Body:
    """Check one JSON object against `model`; a top-level null counts as absent. Raises BadRequest."""
    return generation(json_object(data), model)


def generation(values: Mapping[str, Any], model: type[Body]) -> Body:
    """`values` as the body of a generation route; what is unknown or not built is refused. Raises BadRequest."""
    body = checked(values, model)
    refuse_unsupported(body.model_extra or {}, body.n)
    return body


def json_object(data: bytes) -> dict[str, Any]:
    """The JSON object without its top-level nulls. Raises BadRequest."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"The request body is not valid JSON: {error}.", code="invalid_json") from error
    if not isinstance(value, dict):
        raise BadRequest("The request body must be a JSON object.", code="invalid_json")
    if deeper(value, MAX_DEPTH):
        raise BadRequest(f"The request body is nested more than {MAX_DEPTH} levels deep.", code="invalid_json")
    return {key: item for key, item in value.items() if item is not None}


def checked(values: Mapping[str, Any], model: type[Checked]) -> Checked:
    """`values` as a `model`. Raises BadRequest naming the first bad field."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise bad_field(error) from error


def bad_field(error: ValidationError) -> BadRequest:
    """The first complaint, as one sentence that begins with the field's path."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = path(first["loc"])
    reason = first["msg"].removeprefix("Value error, ")
    if not field:
        return BadRequest(f"{reason}.", param=reason.split(" ", 1)[0])
    return BadRequest(f"{field}: {reason}.", param=field)


@contextmanager
def renamed(name: Callable[[str], str]) -> Iterator[None]:
    """Errors about a chat request's fields, told with the names that the client used."""
    try:
        yield
    except BadRequest as error:
        if error.param is not None:
            known = name(error.param)
            if error.message.startswith(error.param):
                error.message = known + error.message[len(error.param) :]
            error.param = known
        raise


def path(location: Sequence[Any]) -> str:
    """`("messages", 0, "role")` as `messages[0].role`."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
