"""Server-sent events: what a chunk looks like on the wire."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"
HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


def encode(chunk: Any) -> bytes:
    """One event by the general JSON encoder. Raises TypeError on lone surrogates, which no decoder makes."""
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def named(chunk: Mapping[str, Any]) -> bytes:
    """One event whose name is its `type`, for clients that look at either."""
    return f"event: {chunk['type']}\n".encode() + encode(chunk)


class Frame:
    """The bytes around the one string that differs between the chunks of a stream.

    `Frame(build)(text) == encode(build(text))` for every text; only `text` is escaped per call.
    """

    __slots__ = ("_prefix", "_suffix")

    def __init__(self, build: Callable[[str], Any]) -> None:
        mark = secrets.token_hex(16)
        self._prefix, self._suffix = encode(build(mark)).split(orjson.dumps(mark))

    def __call__(self, text: str) -> bytes:
        return self._prefix + orjson.dumps(text) + self._suffix
