"""The replies of gpt-oss ("harmony"): messages with headers, each on a channel, some of them calls."""

from __future__ import annotations

import re

from treadle.output.reader import Reader
from treadle.output.stream import Kind
from treadle.output.tape import MAX_NAME, Broken, Ends, Parse, Tape
from treadle.output.tools.base import guarded
from treadle.output.tools.values import copy_arguments

HEADER = Ends("<|message|>", "<|end|>")
OPENINGS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
BOUNDS = (*OPENINGS, "<|channel|>")
BODY = Ends(*BOUNDS)
RECIPIENT = re.compile(r"to=(?:functions\.)?(?P<name>[^\s<]+)")


def read_channels(reader: Reader) -> Parse[None]:
    """The whole reply: `analysis` is reasoning, what is addressed to a known function a call, all else text.

    Text without a header is text.
    """
    tape = reader.tape
    while (yield from tape.peek()):
        start = tape.offset
        if (yield from tape.take_one(OPENINGS)):
            reader.cut(reader.kind, start)
            continue
        header = yield from _header(tape)
        if header is not None:
            reader.cut(Kind.REASONING if "<|channel|>analysis" in header else Kind.TEXT, start)
        if header is None or not (yield from _call(reader, header)):
            yield from tape.copy(BODY, reader.prose)
        tape.forget()


def _header(tape: Tape) -> Parse[str | None]:
    """Read the header that comes next; None if there is none. One that the end cuts off is dropped."""
    start = tape.offset
    try:
        header = yield from tape.until(HEADER, MAX_NAME)
        if "<|channel|>" in header and (yield from tape.take("<|message|>")):
            return header
    except Broken:
        pass
    tape.rewind(start)
    if (yield from tape.take("<|channel|>")):
        yield from tape.copy(HEADER, lambda text: None)
    return None


def _call(reader: Reader, header: str) -> Parse[bool]:
    """Whether the body was a call, which is read then."""
    found = RECIPIENT.search(header)
    calls = reader.calls
    if found is None or calls is None or found["name"] not in calls.tools:
        return False
    start = reader.tape.offset
    parse = copy_arguments(reader.tape, calls, found["name"])
    if not (yield from guarded(parse, reader.tape, calls, BODY, keep=BOUNDS)):
        reader.tape.rewind(start)
        return False
    yield from reader.tape.copy(BODY, lambda text: None)
    reader.cut(Kind.TEXT, start)
    return True
