"""Errors in Anthropic's shape: `{"type": "error", "error": {"type", "message"}}`."""

from __future__ import annotations

from typing import Any

from treadle.errors import ContextLengthExceeded, TreadleError

PREFIX = "/v1/messages"  # routes whose errors have this shape
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
OTHER = "api_error"


def speaks_anthropic(path: str) -> bool:
    """Whether errors of this path have Anthropic's shape."""
    return path == PREFIX or path.startswith(PREFIX + "/")


def anthropic_error_body(error: TreadleError, status: int | None = None) -> dict[str, Any]:
    """The JSON object of an error; its type follows from `status`, or from the error's own."""
    kind = TYPES.get(error.status if status is None else status, OTHER)
    return {"type": "error", "error": {"type": kind, "message": message_of(error)}}


def message_of(error: TreadleError) -> str:
    """One sentence that names the field, which has no place of its own here.

    Agents compact and retry on "prompt is too long", and read both numbers from it. At least one token of
    the context is left to the reply, so a prompt that fills it exactly is over by one.
    """
    if isinstance(error, ContextLengthExceeded):
        most = min(error.context_length, error.num_tokens - 1)
        return f"prompt is too long: {error.num_tokens} tokens > {most} maximum"
    if error.param is None or error.param in error.message:
        return error.message
    return f"{error.param}: {error.message}"
