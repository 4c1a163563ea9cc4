"""A request's body from the wire to a checked model: size, JSON, types, ranges, unknown names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from treadle.api.fields import GenerationBody
from treadle.api.unsupported import refuse_unsupported
from treadle.errors import BadRequest, BodyTooLarge

Body = TypeVar("Body", bound=GenerationBody)
Checked = TypeVar("Checked", bound=BaseModel)


async def read(request: Request, limit: int) -> bytes:
    """The whole body of at most `limit` bytes; a declared length over it is refused before anything is read.

    Raises BodyTooLarge.
    """
    too_large = BodyTooLarge(f"The request body is larger than {limit / 2**20:g} MB.")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise too_large
        chunks.append(chunk)
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


def path(location: Sequence[Any]) -> str:
    """`("messages", 0, "role")` as `messages[0].role`."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text
