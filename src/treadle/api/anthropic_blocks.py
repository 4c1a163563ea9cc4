"""Events as the content blocks of a message: strictly one after the other, each with one kind of pieces."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Any

from pydantic_core import from_json

from treadle.output.stream import Event, Kind
from treadle.types import Finish

KEY = secrets.token_bytes(32)  # signatures are opaque to clients, and nothing here reads them back

Place = tuple[Kind, int]


class Signature:
    """A mark of the text of one thinking block, for clients that want one."""

    def __init__(self) -> None:
        self._mac = hmac.new(KEY, digestmod=hashlib.sha256)

    def add(self, text: str) -> None:
        self._mac.update(text.encode())

    def __str__(self) -> str:
        return self._mac.hexdigest()


def place_of(event: Event) -> Place | None:
    """Which block an event belongs to: neighbours with the same place are one block. None: to no block."""
    if event.tool is not None:
        return Kind.TOOL, event.tool.index
    if event.text and event.kind in (Kind.TEXT, Kind.REASONING):
        return event.kind, 0
    return None


def empty_block(event: Event) -> dict[str, Any]:
    """The block that begins with this event, with nothing in it."""
    if event.tool is not None:
        assert event.tool.id is not None and event.tool.name is not None, "a call begins with its id and name"
        return {"type": "tool_use", "id": event.tool.id, "name": event.tool.name, "input": {}}
    if event.kind is Kind.REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


class Ending:
    """How a reply ended, told by its events."""

    def __init__(self) -> None:
        self._called = False
        self._finish: Finish | None = None
        self._string: str | None = None

    def see(self, event: Event) -> None:
        self._called = self._called or event.tool is not None
        if event.finish is not None:
            self._finish = event.finish
            self._string = event.stop_string

    def fields(self) -> dict[str, str | None]:
        """`stop_reason` and `stop_sequence`. A reply that was cut says so, for its last call may be half a one."""
        if self._finish is Finish.LENGTH:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if self._string is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": self._string}
        if self._called:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        return {"stop_reason": "end_turn", "stop_sequence": None}


def tool_input(arguments: str) -> dict[str, Any]:
    """The arguments of a call as an object; of one that was cut, what is there of it, as clients read it."""
    value = from_json(arguments, allow_partial=True) if arguments.strip() else {}
    return value if isinstance(value, dict) else {"value": value}
