"""Replies of messages with headers (gpt-oss, Muse), each on a channel, some of them calls."""

from __future__ import annotations

import re
from collections.abc import Sequence

from treadle.output.dialect import Dialect
from treadle.output.marked import read_call
from treadle.output.reader import Reader
from treadle.output.stream import Kind
from treadle.output.tape import MAX_NAME, Broken, Ends, Parse, Tape
from treadle.output.tools.base import guarded
from treadle.output.tools.values import copy_arguments

RECIPIENT = re.compile(r"to=(?:functions\.)?(?P<name>[^\s<]+)")


def read_channels(reader: Reader, dialect: Dialect) -> Parse[None]:
    """The whole reply: the channel tells reasoning and calls of known functions from text.

    Text without a header is text.
    """
    tape = reader.tape
    while (yield from tape.peek()):
        start = tape.offset
        if (yield from tape.take_one(dialect.openings)):
            reader.cut(reader.kind, start)
            continue
        header = yield from _header(tape, dialect)
        if header is not None:
            reader.cut(Kind.REASONING if dialect.thinks in header else Kind.TEXT, start)
        if header is None or not (yield from _addressed(reader, dialect, header)):
            yield from _body(reader, dialect)
        tape.forget()


def _header(tape: Tape, dialect: Dialect) -> Parse[str | None]:
    """Read the header that comes next; None if there is none. One that the end cuts off is dropped.

    Calls may follow a header that has no end.
    """
    start = tape.offset
    calls = dialect.format.starts if dialect.format else ()
    try:
        header = yield from tape.until(Ends(dialect.message, dialect.openings[0], *calls), MAX_NAME)
        if dialect.named in header:
            ended = yield from tape.take(dialect.message)
            if ended or (re.fullmatch(dialect.begun, header) and (yield from _ahead(tape, calls))):
                return header
    except Broken:
        if tape.ended and re.fullmatch(dialect.begun, (yield from _rest(tape, start))):
            return None
    tape.rewind(start)
    return None


def _rest(tape: Tape, start: int) -> Parse[str]:
    """Read all text from `start` on, after the end came."""
    tape.rewind(start)
    parts: list[str] = []
    yield from tape.copy(Ends(), parts.append)
    return "".join(parts)


def _ahead(tape: Tape, literals: Sequence[str]) -> Parse[bool]:
    """Whether one of `literals` comes next, which stays unread."""
    start = tape.offset
    found = yield from tape.take_one(literals)
    tape.rewind(start)
    return found is not None


def _body(reader: Reader, dialect: Dialect) -> Parse[None]:
    """A message's text, and calls in it where the dialect has a format of them."""
    format = dialect.format if reader.calls is not None else None
    bounds = dialect.bounds
    ends = Ends(*bounds, *(format.starts if format else ()))
    while True:
        mark = yield from reader.tape.copy(ends, reader.prose)
        if mark is None or mark in bounds or format is None:
            return
        yield from read_call(reader, format, mark)


def _addressed(reader: Reader, dialect: Dialect, header: str) -> Parse[bool]:
    """Whether the message was to a function, whose arguments are read then."""
    found = RECIPIENT.search(header)
    calls = reader.calls
    if dialect.format is not None or found is None or calls is None or found["name"] not in calls.tools:
        return False
    start, ends = reader.tape.offset, Ends(*dialect.bounds)
    parse = copy_arguments(reader.tape, calls, found["name"])
    if not (yield from guarded(parse, reader.tape, calls, ends, keep=dialect.bounds)):
        reader.tape.rewind(start)
        return False
    yield from reader.tape.copy(ends, lambda text: None)
    reader.cut(Kind.TEXT, start)
    return True
