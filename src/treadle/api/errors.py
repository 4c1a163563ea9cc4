"""Every error leaves in OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`, or in Anthropic's on
its routes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from treadle.api.anthropic_errors import anthropic_error_body, speaks_anthropic
from treadle.errors import BadRequest, Cancelled, ContextLengthExceeded, Preempted, TimedOut, TreadleError

log = logging.getLogger(__name__)

HTTP_CODES = {404: "unknown_url", 405: "method_not_allowed"}


def error_body(error: TreadleError) -> dict[str, Any]:
    """The JSON object of an error. A context error also carries both numbers for agents that compact."""
    detail: dict[str, Any] = {
        "message": error.message,
        "type": error.type,
        "param": error.param,
        "code": error.code,
    }
    if isinstance(error, ContextLengthExceeded):
        detail |= {"n_prompt_tokens": error.num_tokens, "n_ctx": error.context_length}
    return {"error": detail}


def error_headers(error: TreadleError) -> dict[str, str]:
    """`Retry-After` where waiting helps; the SDKs are told not to repeat what was ended on purpose."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if isinstance(error, TimedOut | Cancelled | Preempted):
        headers["x-should-retry"] = "false"
    return headers


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON body by the one encoder that the streams use too."""
    return Response(
        orjson.dumps(content), status_code=status, headers=dict(headers or {}), media_type="application/json"
    )


def error_response(error: TreadleError) -> Response:
    return json_response(error_body(error), error.status, error_headers(error))


def anthropic_error_response(error: TreadleError) -> Response:
    return json_response(anthropic_error_body(error), error.status, error_headers(error))


def response_to(request: Request, error: TreadleError) -> Response:
    """The error in the shape of the route that was asked for."""
    if speaks_anthropic(request.url.path):
        return anthropic_error_response(error)
    return error_response(error)


def internal_error() -> TreadleError:
    """What a client is told about a bug: nothing of its inside, which goes to the log."""
    return TreadleError("Internal error; the server's log has the details.", code="internal_error")


async def on_treadle_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TreadleError)
    return response_to(request, error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Unknown routes and wrong methods."""
    assert isinstance(error, HTTPException)
    status = error.status_code
    messages = {
        404: f"Unknown route: {request.method} {request.url.path}.",
        405: f"Method {request.method} is not allowed on {request.url.path}.",
    }
    failure = BadRequest(messages.get(status, str(error.detail)), code=HTTP_CODES.get(status))
    anthropic = speaks_anthropic(request.url.path)
    body = anthropic_error_body(failure, status) if anthropic else error_body(failure)
    return json_response(body, status, error.headers)


async def on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return response_to(request, BadRequest(f"Invalid request: {error}."))


async def on_disconnect(request: Request, error: Exception) -> Response:
    """The client left while its body was read; nobody sees this answer."""
    return Response(status_code=499)


async def on_bug(request: Request, error: Exception) -> Response:
    """Starlette re-raises after this answer is sent, so the server's log gets the traceback."""
    return response_to(request, internal_error())


def install(app: FastAPI) -> None:
    """Register the handlers above."""
    app.add_exception_handler(TreadleError, on_treadle_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(ClientDisconnect, on_disconnect)
    app.add_exception_handler(Exception, on_bug)
