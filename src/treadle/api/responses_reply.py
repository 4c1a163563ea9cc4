"""The answers of `/v1/responses`: the events of a stream, or one response object, made by the same steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from treadle.api.logprobs import ChatLogprobs
from treadle.api.reply import usage_object
from treadle.api.responses_output import CallItem, MessageItem, OutputItem, Payload, ReasoningItem
from treadle.api.sse import named
from treadle.errors import QueueFull, TreadleError
from treadle.output.stream import Event, Kind
from treadle.types import Finish, Usage

Keep = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What is known of a response before it is made; `echo` has the request's settings."""

    id: str
    created: int
    model: str
    echo: dict[str, Any] = field(default_factory=dict)

    def response(self, status: str, output: list[dict[str, Any]], **rest: Any) -> dict[str, Any]:
        """The object; `rest` replaces what is null otherwise."""
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            **self.echo,
            "output": output,
            "usage": None,
            **rest,
        }


class Making:
    """A response being made: events in, the stream's payloads out."""

    def __init__(self, head: ResponseHead, logprobs: ChatLogprobs | None) -> None:
        self._head = head
        self._logprobs = logprobs
        self._done: list[dict[str, Any]] = []
        self._open: OutputItem | None = None
        self._finish: Finish | None = None

    def opening(self) -> list[Payload]:
        return [self.state("response.created"), self.state("response.in_progress")]

    def add(self, event: Event) -> list[Payload]:
        """The payloads of one event."""
        made: list[Payload] = []
        if event.kind is Kind.TOOL or event.text or (event.logprobs and self._logprobs is not None):
            if self._open is None or not self._open.goes_on(event):
                made += self._end("completed")
                self._open = self._begun(event)
                made += self._open.start()
            made += self._open.push(event)
        if event.finish is not None:
            self._finish = event.finish
            made += self._settle()
        return made

    def closing(self, usage: Usage) -> Payload:
        """The last payload; its `response` is the whole answer."""
        status, rest = "completed", {}
        if self._cut:
            status, rest = "incomplete", {"incomplete_details": {"reason": "max_output_tokens"}}
        whole = self._head.response(
            status, self._done, completed_at=int(time.time()), usage=response_usage(usage), **rest
        )
        return {"type": f"response.{status}", "response": whole}

    def failed(self, error: TreadleError) -> Payload:
        """The last payload of an answer that something ended."""
        output = self._done if self._open is None else [*self._done, self._open.item("incomplete")]
        return failed(self._head, error, output)

    def state(self, type: str) -> Payload:
        """An event about the response as a whole, as far as it is made."""
        return {"type": type, "response": self._head.response("in_progress", list(self._done))}

    @property
    def _cut(self) -> bool:
        return self._finish is Finish.LENGTH

    def _begun(self, event: Event) -> OutputItem:
        index = len(self._done)
        if event.tool is not None:
            return CallItem(index, event.tool)
        return ReasoningItem(index) if event.kind is Kind.REASONING else MessageItem(index, self._logprobs)

    def _end(self, status: str) -> list[Payload]:
        """Finish the open item."""
        if self._open is None:
            return []
        ended, self._open = self._open, None
        self._done.append(ended.item(status))
        return ended.end(status)

    def _settle(self) -> list[Payload]:
        """Finish the answer; one without anything in it is an empty message."""
        made: list[Payload] = []
        if self._open is None and not self._done:
            self._open = MessageItem(0, self._logprobs)
            made += self._open.start()
        return made + self._end("incomplete" if self._cut else "completed")


class ResponseWriter:
    """Named server-sent events with rising numbers. `keep` gets the finished response."""

    def __init__(self, head: ResponseHead, logprobs: ChatLogprobs | None, keep: Keep) -> None:
        self._making = Making(head, logprobs)
        self._numbers = Numbers()
        self._keep = keep

    def opening(self) -> bytes:
        return self._numbers.encode(self._making.opening())

    def chunk(self, index: int, event: Event) -> bytes:
        return self._numbers.encode(self._making.add(event))

    def closing(self, usage: Usage) -> bytes:
        last = self._making.closing(usage)
        self._keep(last["response"])
        return self._numbers.encode([last])

    def silence(self) -> bytes:
        """A real event: some clients time out although comments come."""
        return self._numbers.encode([self._making.state("response.in_progress")])

    def fault(self, error: TreadleError) -> bytes:
        return self._numbers.encode([self._making.failed(error)])


class ResponseCollector:
    """One response object. `keep` gets it too."""

    def __init__(self, head: ResponseHead, logprobs: ChatLogprobs | None, keep: Keep) -> None:
        self._making = Making(head, logprobs)
        self._keep = keep

    def add(self, index: int, event: Event) -> None:
        self._making.add(event)

    def reply(self, usage: Usage) -> dict[str, Any]:
        whole: dict[str, Any] = self._making.closing(usage)["response"]
        self._keep(whole)
        return whole


class Numbers:
    """Counts the events of one stream."""

    def __init__(self) -> None:
        self._next = 0

    def encode(self, payloads: Iterable[Payload]) -> bytes:
        data = b""
        for payload in payloads:
            data += named({**payload, "sequence_number": self._next})
            self._next += 1
        return data


def refused(head: ResponseHead, error: TreadleError) -> bytes:
    """A whole stream about a request that cannot be answered."""
    making = Making(head, None)
    return Numbers().encode([*making.opening(), making.failed(error)])


def fault(error: TreadleError) -> bytes:
    """The whole of a stream whose response could not even be begun."""
    return Numbers().encode([{"type": "error", "code": error.code, "message": error.message, "param": error.param}])


def failed(head: ResponseHead, error: TreadleError, output: list[dict[str, Any]]) -> Payload:
    """`response.failed` with the error's code; clients compact on a context error and repeat most others."""
    code = "rate_limit_exceeded" if isinstance(error, QueueFull) else error.code or "server_error"
    detail = {"code": code, "message": error.message}
    return {"type": "response.failed", "response": head.response("failed", output, error=detail)}


def response_usage(usage: Usage) -> dict[str, Any]:
    """The chat counts under the names of this API; every detail is required there."""
    counts = usage_object(usage)
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": counts["completion_tokens_details"],
        "total_tokens": counts["total_tokens"],
    }
