"""The answers of `/v1/chat/completions`: chunks of a stream, or one object."""

from __future__ import annotations

from typing import Any

from treadle.api.logprobs import ChatLogprobs
from treadle.api.reply import Head, usage_object
from treadle.api.sse import DONE, Frame, encode
from treadle.output.stream import Event
from treadle.types import Usage

CHUNK = "chat.completion.chunk"


class ChatWriter:
    """Server-sent chunks. `logprobs` is None when none were asked for.

    With `usage` every ordinary chunk says `usage: null`, and one more chunk without choices carries the
    counts; without it neither exists.
    """

    def __init__(self, head: Head, num_choices: int, usage: bool, logprobs: ChatLogprobs | None) -> None:
        self._head = head
        self._usage = usage
        self._logprobs = logprobs
        self._frames = [self._frame(index) for index in range(num_choices)]

    def _frame(self, index: int) -> Frame:
        return Frame(lambda text: self._chunk(index, {"content": text}))

    def _chunk(
        self, index: int, delta: dict[str, str], logprobs: Any = None, finish: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        rest = {"usage": None} if self._usage else {}
        return self._head.wrap(CHUNK, [choice], **rest)

    def opening(self) -> bytes:
        """The role of each choice, once."""
        role = {"role": "assistant", "content": ""}
        return b"".join(encode(self._chunk(index, role)) for index in range(len(self._frames)))

    def chunk(self, index: int, event: Event) -> bytes:
        data = b""
        if self._logprobs is not None and event.logprobs:
            entries = {"content": self._logprobs.entries(event.logprobs), "refusal": None}
            data = encode(self._chunk(index, {"content": event.text}, entries))
        elif event.text:
            data = self._frames[index](event.text)
        if event.finish is not None:
            data += encode(self._chunk(index, {}, finish=event.finish.value))
        return data

    def closing(self, usage: Usage) -> bytes:
        if not self._usage:
            return DONE
        return encode(self._head.wrap(CHUNK, [], usage=usage_object(usage))) + DONE


class ChatCollector:
    """One `chat.completion` object."""

    def __init__(self, head: Head, num_choices: int, logprobs: ChatLogprobs | None) -> None:
        self._head = head
        self._logprobs = logprobs
        self._texts: list[list[str]] = [[] for _ in range(num_choices)]
        self._entries: list[list[dict[str, Any]]] = [[] for _ in range(num_choices)]
        self._finish: list[str | None] = [None] * num_choices

    def add(self, index: int, event: Event) -> None:
        self._texts[index].append(event.text)
        if self._logprobs is not None:
            self._entries[index] += self._logprobs.entries(event.logprobs)
        if event.finish is not None:
            self._finish[index] = event.finish.value

    def reply(self, usage: Usage) -> dict[str, Any]:
        choices = [self._choice(index) for index in range(len(self._texts))]
        return self._head.wrap("chat.completion", choices, usage=usage_object(usage))

    def _choice(self, index: int) -> dict[str, Any]:
        asked = self._logprobs is not None
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(self._texts[index]), "refusal": None},
            "logprobs": {"content": self._entries[index], "refusal": None} if asked else None,
            "finish_reason": self._finish[index],
        }
