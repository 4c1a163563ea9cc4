"""The output items of a response while they are made: each tells the stream of its start, pieces and end.

`Payload`s are the stream's events without their number, in order. An item's `end` repeats it in full: some
clients read nothing else.
"""

from __future__ import annotations

import uuid
from typing import Any, Protocol

from treadle.api.logprobs import ChatLogprobs
from treadle.output.stream import Event, Kind, ToolDelta

Payload = dict[str, Any]

PART_ADDED = "response.content_part.added"
PART_DONE = "response.content_part.done"


class OutputItem(Protocol):
    """One item being made. `status` of a finished one: `completed` or `incomplete`."""

    def goes_on(self, event: Event) -> bool:
        """Whether the event belongs to this item."""
        ...

    def start(self) -> list[Payload]: ...
    def push(self, event: Event) -> list[Payload]: ...
    def end(self, status: str) -> list[Payload]: ...
    def item(self, status: str) -> dict[str, Any]: ...


class Content:
    """What a message and a reasoning item share: one part of text at the place `index` of the output."""

    kind: Kind
    prefix: str
    text_event: str

    def __init__(self, index: int) -> None:
        self.id = f"{self.prefix}_{uuid.uuid4().hex}"
        self._index = index
        self._texts: list[str] = []
        self._place = {"item_id": self.id, "output_index": index, "content_index": 0}

    def goes_on(self, event: Event) -> bool:
        return event.kind is self.kind

    def start(self) -> list[Payload]:
        return [
            added(self._index, self.item("in_progress", started=False)),
            {"type": PART_ADDED, **self._place, "part": self.part()},
        ]

    def push(self, event: Event) -> list[Payload]:
        self._texts.append(event.text)
        return [{"type": f"{self.text_event}.delta", **self._place, "delta": event.text}]

    def end(self, status: str) -> list[Payload]:
        text = "".join(self._texts)
        return [
            {"type": f"{self.text_event}.done", **self._place, "text": text},
            {"type": PART_DONE, **self._place, "part": self.part()},
            done(self._index, self.item(status)),
        ]

    def part(self) -> dict[str, Any]:
        raise NotImplementedError

    def item(self, status: str, *, started: bool = True) -> dict[str, Any]:
        """Before the part is `started` the item has no content."""
        raise NotImplementedError


class MessageItem(Content):
    """A text for the user, with log probabilities where `logprobs` is given."""

    kind = Kind.TEXT
    prefix = "msg"
    text_event = "response.output_text"

    def __init__(self, index: int, logprobs: ChatLogprobs | None) -> None:
        super().__init__(index)
        self._logprobs = logprobs
        self._entries: list[dict[str, Any]] = []

    def push(self, event: Event) -> list[Payload]:
        entries = [] if self._logprobs is None else self._logprobs.entries(event.logprobs)
        self._entries += entries
        return [payload | {"logprobs": entries} for payload in super().push(event)]

    def end(self, status: str) -> list[Payload]:
        text, *rest = super().end(status)
        return [text | {"logprobs": self._entries}, *rest]

    def part(self) -> dict[str, Any]:
        text = "".join(self._texts)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._entries)}

    def item(self, status: str, *, started: bool = True) -> dict[str, Any]:
        content = [self.part()] if started else []
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}


class ReasoningItem(Content):
    """What the model thinks, as it is: no summary is made."""

    kind = Kind.REASONING
    prefix = "rs"
    text_event = "response.reasoning_text"

    def part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": "".join(self._texts)}

    def item(self, status: str, *, started: bool = True) -> dict[str, Any]:
        content = [self.part()] if started else []
        return {"id": self.id, "type": "reasoning", "summary": [], "status": status, "content": content}


class CallItem:
    """A call of one of the client's functions. `first` is the piece with its id and name."""

    def __init__(self, index: int, first: ToolDelta) -> None:
        assert first.id is not None and first.name is not None, "a tool call begins with its id and name"
        self.id = f"fc_{uuid.uuid4().hex}"
        self._index = index
        self._call = first.index
        self._named = {"call_id": first.id, "name": first.name}
        self._arguments: list[str] = []
        self._place = {"item_id": self.id, "output_index": index}

    def goes_on(self, event: Event) -> bool:
        return event.tool is not None and event.tool.index == self._call

    def start(self) -> list[Payload]:
        return [added(self._index, self.item("in_progress"))]

    def push(self, event: Event) -> list[Payload]:
        assert event.tool is not None
        piece = event.tool.arguments
        self._arguments.append(piece)
        return [{"type": "response.function_call_arguments.delta", **self._place, "delta": piece}] if piece else []

    def end(self, status: str) -> list[Payload]:
        whole = {"arguments": "".join(self._arguments), "name": self._named["name"]}
        return [
            {"type": "response.function_call_arguments.done", **self._place, **whole},
            done(self._index, self.item(status)),
        ]

    def item(self, status: str) -> dict[str, Any]:
        arguments = "".join(self._arguments)
        return {"id": self.id, "type": "function_call", "status": status, **self._named, "arguments": arguments}


def added(index: int, item: dict[str, Any]) -> Payload:
    return {"type": "response.output_item.added", "output_index": index, "item": item}


def done(index: int, item: dict[str, Any]) -> Payload:
    return {"type": "response.output_item.done", "output_index": index, "item": item}
