"""The answers of `/v1/messages`: the events of a stream, or one message object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from treadle.api.anthropic_blocks import Ending, Place, Signature, empty_block, place_of, tool_input
from treadle.api.anthropic_errors import anthropic_error_body
from treadle.api.errors import anthropic_error_response
from treadle.api.reply import specprefill
from treadle.api.sse import Frame, named
from treadle.api.wire import Wire
from treadle.errors import TreadleError
from treadle.output.stream import Event, Kind
from treadle.types import Usage

PING = named({"type": "ping"})
DELTA = "content_block_delta"
DELTA_NAME = f"event: {DELTA}\n".encode()
DELTAS = {  # the type and the one field of each kind's pieces
    Kind.TEXT: ("text_delta", "text"),
    Kind.REASONING: ("thinking_delta", "thinking"),
    Kind.TOOL: ("input_json_delta", "partial_json"),
}


def ping() -> bytes:
    return PING


def fault(error: TreadleError) -> bytes:
    return named(anthropic_error_body(error))


ANTHROPIC = Wire(ping, fault, anthropic_error_response)


@dataclass(frozen=True, slots=True)
class MessageHead:
    """What is known of a message before it is made. `omit_thinking`: only its signature is shown."""

    id: str
    model: str
    prompt_tokens: int
    omit_thinking: bool = False

    def message(self, content: list[dict[str, Any]], ending: dict[str, str | None], usage: Usage) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            **ending,
            "usage": usage_fields(usage),
        }


def usage_fields(usage: Usage) -> dict[str, Any]:
    """Anthropic's `usage`: what came from the cache is not part of `input_tokens`."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        **specprefill(usage),
    }


class MessageWriter:
    """Server-sent events. What is cached is known at the end, so the last counts replace the first."""

    def __init__(self, head: MessageHead) -> None:
        self._head = head
        self._ending = Ending()
        self._index = -1  # of the last block
        self._open: Place | None = None
        self._signature = Signature()
        self._frame = self._frame_of(*DELTAS[Kind.TEXT])

    def opening(self) -> bytes:
        nothing: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}
        message = self._head.message([], nothing, Usage(self._head.prompt_tokens, 0))
        return named({"type": "message_start", "message": message}) + PING

    def chunk(self, index: int, event: Event) -> bytes:
        self._ending.see(event)
        place = place_of(event)
        data = b""
        if place is not None:
            if place != self._open:
                data = self._stop() + self._start(place, event)
            data += self._delta(event)
        return data + self._stop() if event.finish is not None else data

    def closing(self, usage: Usage) -> bytes:
        delta = {"type": "message_delta", "delta": self._ending.fields(), "usage": usage_fields(usage)}
        return named(delta) + named({"type": "message_stop"})

    def _start(self, place: Place, event: Event) -> bytes:
        self._index += 1
        self._open = place
        self._signature = Signature()
        self._frame = self._frame_of(*DELTAS[event.kind])
        start = {"type": "content_block_start", "index": self._index, "content_block": empty_block(event)}
        return named(start)

    def _delta(self, event: Event) -> bytes:
        if event.tool is not None:
            return self._framed(event.tool.arguments) if event.tool.arguments else b""
        if event.kind is Kind.REASONING:
            self._signature.add(event.text)
            if self._head.omit_thinking:
                return b""
        return self._framed(event.text)

    def _framed(self, text: str) -> bytes:
        return DELTA_NAME + self._frame(text)

    def _stop(self) -> bytes:
        """The end of the open block, if one is open; a thinking block is signed first."""
        if self._open is None:
            return b""
        kind, self._open = self._open[0], None
        signed = b""
        if kind is Kind.REASONING:
            delta = {"type": "signature_delta", "signature": str(self._signature)}
            signed = named({"type": DELTA, "index": self._index, "delta": delta})
        return signed + named({"type": "content_block_stop", "index": self._index})

    def _frame_of(self, kind: str, field: str) -> Frame:
        """The bytes around each delta of the block at hand."""
        index = self._index
        return Frame(lambda text: {"type": DELTA, "index": index, "delta": {"type": kind, field: text}})


class MessageCollector:
    """One `message` object."""

    def __init__(self, head: MessageHead) -> None:
        self._head = head
        self._ending = Ending()
        self._open: Place | None = None
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[list[str]] = []

    def add(self, index: int, event: Event) -> None:
        self._ending.see(event)
        place = place_of(event)
        if place is None:
            return
        if place != self._open:
            self._open = place
            self._blocks.append(empty_block(event))
            self._texts.append([])
        self._texts[-1].append(event.text if event.tool is None else event.tool.arguments)

    def reply(self, usage: Usage) -> dict[str, Any]:
        content = [self._filled(block, "".join(texts)) for block, texts in zip(self._blocks, self._texts, strict=True)]
        return self._head.message(content, self._ending.fields(), usage)

    def _filled(self, block: dict[str, Any], text: str) -> dict[str, Any]:
        if block["type"] == "tool_use":
            return block | {"input": tool_input(text)}
        if block["type"] == "text":
            return block | {"text": text}
        signature = Signature()
        signature.add(text)
        return block | {"thinking": "" if self._head.omit_thinking else text, "signature": str(signature)}
