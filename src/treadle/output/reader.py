"""What the parsers of a reply write to: prose of a kind, cuts between kinds, calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from treadle.output.code import CodeSpans
from treadle.output.form import Form
from treadle.output.stream import Event, Kind, ToolDelta
from treadle.output.tape import Tape
from treadle.output.tools.calls import Calls
from treadle.types import TokenLogprob

Emitted = tuple[int, TokenLogprob | None, int]
"""A token: its id, its log probability if asked for, the characters of the reply before it."""


class Tokens:
    """The tokens of the text events, until the part of the reply that they begin in is known."""

    def __init__(self) -> None:
        self._waiting: deque[Emitted] = deque()

    def add(self, event: Event) -> None:
        logprobs = event.logprobs or (None,) * len(event.ids)
        self._waiting += zip(event.ids, logprobs, event.offsets, strict=True)

    def before(self, offset: int) -> list[Emitted]:
        """Those that begin before a character of the reply."""
        taken = []
        while self._waiting and self._waiting[0][2] < offset:
            taken.append(self._waiting.popleft())
        return taken


class Reader:
    """The state of one reply, and the events that are ready.

    White space around reasoning and calls is nobody's text: it is held until prose follows in the same part.
    Tokens go with the part that they begin in; those of reasoning are counted, those of markers are nobody's.
    """

    def __init__(self, form: Form, new_id: Callable[[], str]) -> None:
        self.tape = Tape()
        self.tokens = Tokens()
        self.code = CodeSpans()
        self.kind = Kind.REASONING if form.opened else Kind.TEXT
        self.fresh = True  # no prose in this part yet
        self.out: list[Event] = []
        self.reasoning_tokens = 0
        self.calls = None if form.tools is None else Calls(form.tools, self._call, single=form.single)
        self._new_id = new_id
        self._first = not form.opened  # the part that the reply begins with keeps its leading white space
        self._held = ""

    def prose(self, text: str) -> None:
        """Text that the tape has just read."""
        self.code.feed(text)
        both = self._held + text
        shown = both.rstrip()
        self._held = both[len(shown) :]
        if self.fresh and not self._first:
            shown = shown.lstrip()
        if shown:
            self.fresh = False
            self._emit(shown, self.tape.offset - len(self._held))

    def cut(self, kind: Kind, start: int) -> None:
        """The part ended at the offset `start`; the next one, of `kind`, begins where the tape is."""
        taken = self.tokens.before(start)
        self.reasoning_tokens += len(taken) if self.kind is Kind.REASONING and not self.fresh else 0
        self.tokens.before(self.tape.offset)
        self.code.reset()
        self.kind, self.fresh, self._first, self._held = kind, True, False, ""

    def close(self) -> None:
        """The end: white space after text is text; tokens without a text of their own come with it."""
        held = self._held if self._first or not self.fresh else ""
        rest = self.kind is Kind.TEXT and (self._first or not self.fresh)
        if self.kind is Kind.TEXT and held:
            self._emit(held, self.tape.offset)
        elif self.kind is Kind.REASONING:
            self.cut(Kind.TEXT, self.tape.offset)
        left = self.tokens.before(self.tape.offset + 1)
        if rest and left:
            self.out.append(_text_event("", left))

    def _emit(self, text: str, end: int) -> None:
        taken = self.tokens.before(end)
        if self.kind is Kind.TEXT:
            self.out.append(_text_event(text, taken))
        else:
            self.reasoning_tokens += len(taken)
            self.out.append(Event(self.kind, text))

    def _call(self, index: int, name: str | None, arguments: str) -> None:
        id = None if name is None else self._new_id()
        self.out.append(Event(Kind.TOOL, tool=ToolDelta(index, id, name, arguments)))


def _text_event(text: str, tokens: Sequence[Emitted]) -> Event:
    logprobs = tuple(logprob for _, logprob, _ in tokens if logprob is not None)
    return Event(Kind.TEXT, text, tuple(i for i, _, _ in tokens), logprobs, tuple(at for _, _, at in tokens))
