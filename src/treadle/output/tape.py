"""Text that arrives in pieces, read by parsers that are written as if all of it were there.

A parser is a generator. It yields when the text so far does not decide what comes next, and is resumed when
there is more. So its result cannot depend on where the pieces were cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Parse = Generator[None, None, T]
Sink = Callable[[str], None]

MAX_NAME = 256  # characters of a name or header; what is longer is prose


class Broken(Exception):
    """The text is not what the parser reads, or it ended too early."""


class Ends:
    """Strings to look for. None may begin with another, nor start inside another after its first character."""

    def __init__(self, *literals: str) -> None:
        self.regex = re.compile("|".join(map(re.escape, sorted(literals, key=len, reverse=True))) or r"(?!)")
        self._prefixes = frozenset(literal[:size] for literal in literals for size in range(1, len(literal)))
        self._longest = max(map(len, self._prefixes), default=0)

    def held(self, text: str, start: int) -> int:
        """How many of the last characters, from `start` on, may be the beginning of one of the strings."""
        for size in range(min(self._longest, len(text) - start), 0, -1):
            if text[len(text) - size :] in self._prefixes:
                return size
        return 0


class Tape:
    """The text so far and the place where the parser reads. `offset` counts from the start of the reply.

    `text` may be there from the start; `offset` is where it begins then. `truncated`: the text ended because the
    reply was cut off, not because the model was done.
    """

    def __init__(self, text: str = "", *, offset: int = 0, ended: bool = False) -> None:
        self._text = text
        self._at = 0
        self._cut = offset
        self.ended = ended
        self.truncated = False

    @property
    def offset(self) -> int:
        return self._cut + self._at

    def add(self, text: str) -> None:
        self._text += text

    def end(self, *, truncated: bool) -> None:
        """Nothing more will be added."""
        self.ended, self.truncated = True, truncated

    def forget(self) -> None:
        """Drop what was read; `rewind` can no longer go back to it."""
        self._cut += self._at
        self._text, self._at = self._text[self._at :], 0

    def rewind(self, offset: int) -> None:
        """Go back to an earlier `offset`."""
        self._at = offset - self._cut

    def peek(self, size: int = 1) -> Parse[str]:
        """The next characters without reading them; fewer only at the end."""
        while len(self._text) - self._at < size and not self.ended:
            yield
        return self._text[self._at : self._at + size]

    def read(self, size: int) -> Parse[str]:
        """The next characters; fewer only at the end."""
        found = yield from self.peek(size)
        self._at += len(found)
        return found

    def space(self) -> Parse[str]:
        """Read white space, and return the character after it unread ("" at the end)."""
        while True:
            rest = len(self._text) - len(self._text[self._at :].lstrip())
            self._at = rest
            if rest < len(self._text):
                return self._text[rest]
            if self.ended:
                return ""
            yield

    def take(self, literal: str) -> Parse[bool]:
        """Read `literal` if it comes next."""
        while not self.ended and len(self._text) - self._at < len(literal) and literal.startswith(self._rest):
            yield
        if not self._text.startswith(literal, self._at):
            return False
        self._at += len(literal)
        return True

    def close(self, literal: str) -> Parse[bool]:
        """Read `literal`, the end of something, if it comes next; where the reply was cut off in it, what is there."""
        taken = yield from self.take(literal)
        if not taken and self.truncated and literal.startswith(self._rest):
            self._at = len(self._text)
        return taken

    def take_one(self, literals: Sequence[str]) -> Parse[str | None]:
        """Read the first of `literals` that comes next, and say which."""
        for literal in literals:
            if (yield from self.take(literal)):
                return literal
        return None

    def expect(self, literal: str) -> Parse[None]:
        """Skip white space, then read `literal`. Raises Broken."""
        yield from self.space()
        if not (yield from self.take(literal)):
            raise Broken

    def copy(self, ends: Ends, sink: Sink, torn: Sink | None = None) -> Parse[str | None]:
        """Hand text to `sink`, as it comes, up to one of `ends`, which is returned unread; None at the end.

        What the end of the reply leaves of one of `ends` is text too, unless there is `torn` to take it.
        """
        while True:
            match = ends.regex.search(self._text, self._at)
            stop = match.start() if match else len(self._text)
            if match is None and not (self.ended and torn is None):
                stop -= ends.held(self._text, self._at)
            piece, self._at = self._text[self._at : stop], stop
            if piece:
                sink(piece)
            if match is not None:
                return match.group()
            if self.ended:
                rest, self._at = self._rest, len(self._text)
                if torn is not None and rest:
                    torn(rest)
                return None
            yield

    def until(self, ends: Ends, limit: int | None = None) -> Parse[str]:
        """The text up to one of `ends`, which stays unread. Raises Broken without one, or over `limit`."""
        parts: list[str] = []
        size = 0

        def keep(piece: str) -> None:
            nonlocal size
            parts.append(piece)
            size += len(piece)
            if limit is not None and size > limit:
                raise Broken

        if (yield from self.copy(ends, keep)) is None:
            raise Broken
        return "".join(parts)

    @property
    def _rest(self) -> str:
        return self._text[self._at :]


def run(parse: Parse[T]) -> T:
    """The result of a parser whose text is all there."""
    try:
        next(parse)
    except StopIteration as end:
        value: T = end.value
        return value
    raise AssertionError("a parser waits for more of an ended text")
