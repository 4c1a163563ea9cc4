"""The output pipeline of one sequence: ids -> text -> stop strings -> events. Pure but for `events` and
`collect`.

Reasoning and tool calls are read behind it, in `reply.py`, and speak the same `Event`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from treadle.output.detokenise import Detokeniser
from treadle.output.stops import StopMatcher
from treadle.types import Finish, Output, TokenLogprob, Usage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Kind(StrEnum):
    """What an event carries."""

    TEXT = "text"
    REASONING = "reasoning"
    TOOL = "tool"
    PROGRESS = "progress"  # prompt tokens that need no more work; the first has those from the cache
    DONE = "done"  # last, and exactly one


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """A piece of one tool call. The first of an `index` carries `id` and `name`; `arguments` concatenate to JSON."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Event(NamedTuple):
    """One piece of an answer. A named tuple, as `Output` is and for its reason.

    Text events: `text` (never empty, except for one just before `done` when the last tokens have no text of
    their own), and the tokens whose text ends in it: `ids`, `logprobs` (one per id if asked for), `offsets`
    (characters of the answer before each id). Reasoning events: `text`. Tool events: `tool`. Progress:
    `prefilled`, `prompt_logprobs` of the next prompt tokens, or both; before them perhaps `skimmed`. Done: `finish`,
    and `stop_string` or `stop_id`, `usage`, `error`, `reasoning_tokens`.
    """

    kind: Kind
    text: str = ""
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    offsets: tuple[int, ...] = ()
    tool: ToolDelta | None = None  # of a tool event
    prefilled: int | None = None
    skimmed: int | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    stop_string: str | None = None
    stop_id: int | None = None
    usage: Usage | None = None
    error: str | None = None
    reasoning_tokens: int = 0  # of the done event: tokens of the reply that are reasoning


class _Token(NamedTuple):
    """An emitted token and the characters [start, end) of the text that it has a part in."""

    id: int
    logprob: TokenLogprob | None
    start: int
    end: int


class TextStream:
    """Turns the outputs of one sequence into events; any number of tokens per output.

    Joined over all outputs, texts, ids and logprobs do not depend on how the tokens were grouped. When a
    stop string matches, `stopped` turns true: the caller should abort the sequence and go on pushing until
    the output with `finish`, which gives the `done` event. Tokens after the match are dropped.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_strings: Sequence[str] = (),
        *,
        keep_special: bool = False,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._detokeniser = Detokeniser(tokenizer, keep_special=keep_special, shown=shown)
        self._stops = StopMatcher(stop_strings)
        self._waiting: deque[_Token] = deque()
        self._decoded = 0  # characters out of the detokeniser
        self._emitted = 0  # characters in events
        self._used = 0  # tokens up to and including the one that completed a stop string
        self._done = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string has matched."""
        return self._stops.matched is not None

    def push(self, output: Output) -> list[Event]:
        """The events that this output makes certain; with `finish`, the last of them is `done`."""
        assert not self._done, "an output after the one with finish"
        told = output.prefilled is not None or output.skimmed is not None
        progress = told and output.finish is None and not output.tokens
        if progress or output.prompt_logprobs:
            event = Event(
                Kind.PROGRESS,
                prefilled=output.prefilled,
                skimmed=output.skimmed,
                prompt_logprobs=output.prompt_logprobs,
            )
            return [event] if progress else [event, *self._made(output)]
        return self._made(output)

    def _made(self, output: Output) -> list[Event]:
        text = self._text_of(output)
        if output.finish is None:
            return self._release(text) if text else []
        text += self._rest()
        events = self._release(text) if text or self._waiting else []
        self._done = True
        return [*events, self._done_event(output)]

    def _text_of(self, output: Output) -> str:
        parts: list[str] = []
        for index, token in enumerate(output.tokens):
            if self.stopped:
                break
            start = self._decoded
            text = self._detokeniser.push((token,))
            self._decoded += len(text)
            end = self._decoded + self._detokeniser.pending
            logprob = output.logprobs[index] if output.logprobs else None
            self._waiting.append(_Token(token, logprob, start, end))
            self._used += 1
            parts.append(self._stops.push(text)[0])
        return "".join(parts)

    def _rest(self) -> str:
        """What was held back, now that nothing can follow."""
        if self.stopped:
            return ""
        text = self._stops.push(self._detokeniser.finish())[0]
        return text + self._stops.finish()

    def _release(self, text: str) -> list[Event]:
        """One text event with the tokens whose text is out, also the one that a stop string's cut splits."""
        self._emitted += len(text)
        out: list[_Token] = []
        while self._waiting and self._waiting[0].end <= self._emitted:
            out.append(self._waiting.popleft())
        if self.stopped:
            out += [token for token in self._waiting if token.start < self._emitted]
            self._waiting.clear()
        if not text and not out:
            return []
        logprobs = tuple(token.logprob for token in out if token.logprob is not None)
        ids, offsets = tuple(token.id for token in out), tuple(token.start for token in out)
        return [Event(Kind.TEXT, text, ids, logprobs, offsets)]

    def _done_event(self, output: Output) -> Event:
        """A stop string wins over how the engine ended; its usage counts the tokens up to the match."""
        if not self.stopped:
            return Event(
                Kind.DONE,
                finish=output.finish,
                stop_id=output.stop_id,
                usage=output.usage,
                error=output.error,
            )
        usage = output.usage and _until(output.usage, self._used)
        return Event(Kind.DONE, finish=Finish.STOP, stop_string=self._stops.matched, usage=usage)


def _until(usage: Usage, tokens: int) -> Usage:
    """Of a reply of which only so many tokens are in: drafts behind them are none of its own either."""
    behind = max(0, usage.accepted_tokens - tokens)
    drafted, accepted = usage.drafted_tokens - behind, usage.accepted_tokens - behind
    return replace(usage, completion_tokens=tokens, drafted_tokens=drafted, accepted_tokens=accepted)


class Abort(Protocol):
    """Stops the work for one sequence, which then counts as `finish`."""

    def __call__(self, finish: Finish = Finish.ABORT) -> None: ...


class Pipeline(Protocol):
    """Outputs to events, as `TextStream` and `ReplyStream` do it."""

    @property
    def stopped(self) -> bool: ...
    def push(self, output: Output) -> list[Event]: ...


async def events(outputs: AsyncIterator[Output], pipeline: Pipeline, abort: Abort) -> AsyncIterator[Event]:
    """The events of one sequence, ending with exactly one `done`.

    `abort` is called at most once: as soon as a stop string matches, or when the consumer leaves early (or
    is cancelled) while the sequence still runs. After a stop string the text is out at once and `done`
    follows when the engine has let go.
    """
    running = True
    try:
        async for output in outputs:
            made = pipeline.push(output)
            if output.finish is not None:
                running = False
            elif pipeline.stopped and running:
                running = False
                abort(Finish.STOP)
            for event in made:
                yield event
            if output.finish is not None:
                return
    finally:
        if running:
            abort()
    yield Event(Kind.DONE, finish=Finish.ERROR, error="The engine's stream ended without a result.")


@dataclass(frozen=True, slots=True)
class Collected:
    """A whole answer: the same events, joined."""

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    offsets: tuple[int, ...]
    finish: Finish
    stop_string: str | None
    stop_id: int | None
    usage: Usage | None
    error: str | None


def gather(made: Iterable[Event]) -> Collected:
    """Join the events of one finished sequence, `done` last."""
    *body, done = made
    assert done.kind is Kind.DONE and done.finish is not None
    texts = [event for event in body if event.kind is Kind.TEXT]
    return Collected(
        text="".join(event.text for event in texts),
        ids=tuple(i for event in texts for i in event.ids),
        logprobs=tuple(logprob for event in texts for logprob in event.logprobs),
        offsets=tuple(offset for event in texts for offset in event.offsets),
        finish=done.finish,
        stop_string=done.stop_string,
        stop_id=done.stop_id,
        usage=done.usage,
        error=done.error,
    )


async def collect(made: AsyncIterator[Event]) -> Collected:
    """The answer as one object: non-streaming is "collect the stream"."""
    return gather([event async for event in made])
