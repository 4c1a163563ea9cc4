"""The answers of the legacy `/v1/completions`: chunks of a stream, or one object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treadle.api.echo import ScoredEchoes
from treadle.api.logprobs import LegacyLogprobs, empty_block
from treadle.api.outbox import KEEP_ALIVE
from treadle.api.progress import PromptProgress
from treadle.api.reply import Head, usage_object
from treadle.api.sse import DONE, Frame, encode
from treadle.output.stream import Event, Kind
from treadle.types import Usage

OBJECT = "text_completion"


def choice(index: int, text: str, logprobs: Any = None, finish: str | None = None) -> dict[str, Any]:
    return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": finish}


class CompletionWriter:
    """Server-sent chunks. `echoes` has each choice's prompt, or an empty string, also where `scored` echoes it.

    `logprobs` is None when none were asked for. Usage and progress chunks are as in chat, the latter with an empty
    text.
    """

    def __init__(
        self,
        head: Head,
        echoes: Sequence[str],
        usage: bool,
        logprobs: LegacyLogprobs | None,
        progress: PromptProgress | None = None,
        scored: ScoredEchoes | None = None,
    ) -> None:
        self._head = head
        self._progress = progress
        self._scored = scored
        self._echoes = echoes
        self._usage = usage
        self._logprobs = logprobs
        self._frames = [self._frame(index) for index in range(len(echoes))]

    def _frame(self, index: int) -> Frame:
        return Frame(lambda text: self._chunk(choice(index, text)))

    def _chunk(self, choice: dict[str, Any], **more: Any) -> dict[str, Any]:
        rest = {"usage": None} if self._usage else {}
        return self._head.wrap(OBJECT, [choice], **rest, **more)

    def opening(self) -> bytes:
        """The prompts to echo, or a comment: the client sees at once that it is served."""
        echoes = [self._frames[index](text) for index, text in enumerate(self._echoes) if text]
        return b"".join(echoes) or KEEP_ALIVE

    def chunk(self, index: int, event: Event) -> bytes:
        if self._scored is None:
            return self._chunks(index, event)
        return b"".join(self._chunks(*item) for item in self._scored.feed(index, event))

    def _chunks(self, index: int, event: Event) -> bytes:
        data = b""
        if event.kind is Kind.PROGRESS:
            if self._progress is not None:
                data = encode(self._chunk(choice(index, ""), prompt_progress=self._progress.of(index, event)))
        elif self._logprobs is not None and event.logprobs:
            block = self._logprobs.block(event, len(self._echoes[index]))
            data = encode(self._chunk(choice(index, event.text, block)))
        elif event.text:
            data = self._frames[index](event.text)
        if event.finish is not None:
            data += encode(self._chunk(choice(index, "", finish=event.finish.value)))
        return data

    def closing(self, usage: Usage) -> bytes:
        if not self._usage:
            return DONE
        return encode(self._head.wrap(OBJECT, [], usage=usage_object(usage))) + DONE


class CompletionCollector:
    """One `text_completion` object."""

    def __init__(
        self,
        head: Head,
        echoes: Sequence[str],
        logprobs: LegacyLogprobs | None,
        scored: ScoredEchoes | None = None,
    ) -> None:
        self._head = head
        self._scored = scored
        self._logprobs = logprobs
        self._texts: list[list[str]] = [[echo] for echo in echoes]
        self._blocks = [empty_block() for _ in echoes]
        self._finish: list[str | None] = [None] * len(echoes)

    def add(self, index: int, event: Event) -> None:
        if self._scored is None:
            self._add(index, event)
        else:
            for item in self._scored.feed(index, event):
                self._add(*item)

    def _add(self, index: int, event: Event) -> None:
        self._texts[index].append(event.text)
        if self._logprobs is not None:
            start = len(self._texts[index][0])
            for name, values in self._logprobs.block(event, start).items():
                self._blocks[index][name] += values
        if event.finish is not None:
            self._finish[index] = event.finish.value

    def reply(self, usage: Usage) -> dict[str, Any]:
        choices = [
            choice(
                index,
                "".join(texts),
                self._blocks[index] if self._logprobs is not None else None,
                self._finish[index],
            )
            for index, texts in enumerate(self._texts)
        ]
        return self._head.wrap(OBJECT, choices, usage=usage_object(usage))
