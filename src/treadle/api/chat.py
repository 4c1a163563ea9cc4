"""The answers of `/v1/chat/completions`: chunks of a stream, or one object."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from treadle.api.logprobs import ChatLogprobs
from treadle.api.progress import PromptProgress
from treadle.api.reply import Head, usage_object
from treadle.api.sse import DONE, Frame, encode
from treadle.output.stream import Event, Kind, ToolDelta
from treadle.types import Finish, Usage

CHUNK = "chat.completion.chunk"


class ChatWriter:
    """Server-sent chunks. `logprobs` is None when none were asked for.

    With `usage` every ordinary chunk says `usage: null`, and one more chunk without choices carries the
    counts; without it neither exists. With `progress` a chunk with an empty delta tells how far a prompt is.
    """

    def __init__(
        self,
        head: Head,
        num_choices: int,
        usage: bool,
        logprobs: ChatLogprobs | None,
        progress: PromptProgress | None = None,
    ) -> None:
        self._head = head
        self._usage = usage
        self._logprobs = logprobs
        self._progress = progress
        self._frames = [self._frame(index, "content") for index in range(num_choices)]
        self._reasoning = [self._frame(index, "reasoning_content") for index in range(num_choices)]
        self._calls: set[int] = set()  # choices with a tool call
        self._reasoning_tokens = 0

    def _frame(self, index: int, key: str) -> Frame:
        return Frame(lambda text: self._chunk(index, {key: text}))

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: Any = None, finish: str | None = None, **more: Any
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        rest = {"usage": None} if self._usage else {}
        return self._head.wrap(CHUNK, [choice], **rest, **more)

    def opening(self) -> bytes:
        """The role of each choice, once."""
        role = {"role": "assistant", "content": ""}
        return b"".join(encode(self._chunk(index, role)) for index in range(len(self._frames)))

    def chunk(self, index: int, event: Event) -> bytes:
        data = b""
        if event.kind is Kind.PROGRESS:
            if self._progress is not None:
                data = encode(self._chunk(index, {}, prompt_progress=self._progress.of(index, event)))
        elif self._logprobs is not None and event.logprobs:
            entries = {"content": self._logprobs.entries(event.logprobs), "refusal": None}
            data = encode(self._chunk(index, {"content": event.text}, entries))
        elif event.tool is not None:
            self._calls.add(index)
            data = encode(self._chunk(index, {"tool_calls": [call_delta(event.tool)]}))
        elif event.text:
            frames = self._reasoning if event.kind is Kind.REASONING else self._frames
            data = frames[index](event.text)
        if event.finish is not None:
            self._reasoning_tokens += event.reasoning_tokens
            data += encode(self._chunk(index, {}, finish=finish_reason(event.finish, index in self._calls)))
        return data

    def closing(self, usage: Usage) -> bytes:
        if not self._usage:
            return DONE
        return encode(self._head.wrap(CHUNK, [], usage=usage_object(usage, self._reasoning_tokens))) + DONE


def finish_reason(finish: Finish, called: bool) -> str:
    """A reply that ends with calls stopped for them; one that was cut off says so first of all."""
    return "tool_calls" if called and finish is Finish.STOP else finish.value


def call_delta(delta: ToolDelta) -> dict[str, Any]:
    """A piece of a call; what is said once per call is in its first piece only."""
    if delta.id is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"index": delta.index, "id": delta.id, "type": "function", "function": function}


@dataclass(slots=True)
class Parts:
    """What one choice has said so far."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    entries: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None

    def add(self, event: Event) -> None:
        if event.tool is not None:
            self._call(event.tool)
        elif event.kind is Kind.REASONING:
            self.reasoning.append(event.text)
        else:
            self.texts.append(event.text)
        if event.finish is not None:
            self.finish = finish_reason(event.finish, bool(self.calls))

    def _call(self, delta: ToolDelta) -> None:
        if delta.id is None:
            self.calls[delta.index]["function"]["arguments"] += delta.arguments
        else:
            function = {"name": delta.name, "arguments": delta.arguments}
            self.calls.append({"id": delta.id, "type": "function", "function": function})

    def message(self) -> dict[str, Any]:
        """The assistant's message. Content is null for a reply without text that has calls or reasoning."""
        text = "".join(self.texts)
        bare = not text and (self.calls or self.reasoning)
        message: dict[str, Any] = {"role": "assistant", "content": None if bare else text, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class ChatCollector:
    """One `chat.completion` object."""

    def __init__(self, head: Head, num_choices: int, logprobs: ChatLogprobs | None) -> None:
        self._head = head
        self._logprobs = logprobs
        self._parts = [Parts() for _ in range(num_choices)]
        self._reasoning_tokens = 0

    def add(self, index: int, event: Event) -> None:
        self._parts[index].add(event)
        self._reasoning_tokens += event.reasoning_tokens
        if self._logprobs is not None:
            self._parts[index].entries += self._logprobs.entries(event.logprobs)

    def reply(self, usage: Usage) -> dict[str, Any]:
        choices = [self._choice(index, parts) for index, parts in enumerate(self._parts)]
        return self._head.wrap("chat.completion", choices, usage=usage_object(usage, self._reasoning_tokens))

    def _choice(self, index: int, parts: Parts) -> dict[str, Any]:
        asked = self._logprobs is not None
        return {
            "index": index,
            "message": parts.message(),
            "logprobs": {"content": parts.entries, "refusal": None} if asked else None,
            "finish_reason": parts.finish,
        }
