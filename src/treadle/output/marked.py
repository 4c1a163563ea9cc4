"""Replies in which markers divide prose, reasoning and calls."""

from __future__ import annotations

import re
from functools import partial

from treadle.output.form import Form
from treadle.output.reader import Reader
from treadle.output.stream import Kind
from treadle.output.tape import Ends, Parse
from treadle.output.tools.base import Format

TOKEN = re.compile(r"<\|\w+\|>")  # of the tokens that marks are made of, one that stands for itself


def read_marked(reader: Reader, form: Form) -> Parse[None]:
    """The whole reply: prose in parts that markers of reasoning and calls divide."""
    tape = reader.tape
    markers = [form.markers.opener, form.markers.closer] if form.markers else []
    ends = Ends(*markers, *form.frames, *(form.format.starts if form.format else ()))
    while True:
        if form.format is not None and form.format.bare and reader.fresh and reader.kind is Kind.TEXT:
            yield from _bare_calls(reader, form.format)
        mark = yield from tape.copy(ends, reader.prose, partial(_torn, reader))
        if mark is None:
            return
        if mark in markers:
            yield from _marker(reader, mark, opens=mark == markers[0])
        elif mark in form.frames:
            yield from _frame(reader, mark)
        elif form.format is not None:
            yield from read_call(reader, form.format, mark)
        tape.forget()


def _torn(reader: Reader, rest: str) -> None:
    """The beginning of a mark, where the reply was cut off: nobody's text if a special token has come of it."""
    if reader.tape.truncated and TOKEN.match(rest) and not reader.code.inside:
        reader.cut(reader.kind, reader.tape.offset - len(rest))
    else:
        reader.prose(rest)


def _marker(reader: Reader, mark: str, *, opens: bool) -> Parse[None]:
    """An opener counts where a part begins; a closer counts anywhere but in code of the answer."""
    start = reader.tape.offset
    yield from reader.tape.read(len(mark))
    meant = reader.fresh if opens else reader.kind is Kind.REASONING or not reader.code.inside
    if meant:
        reader.cut(Kind.REASONING if opens else Kind.TEXT, start)
    else:
        reader.prose(mark)


def _frame(reader: Reader, mark: str) -> Parse[None]:
    """What stands around an answer, also around one that follows reasoning without its closer."""
    start = reader.tape.offset
    yield from reader.tape.read(len(mark))
    reader.cut(Kind.TEXT, start)


def read_call(reader: Reader, format: Format, mark: str) -> Parse[None]:
    """A call that begins with `mark`, which comes next, or prose that begins like one."""
    start = reader.tape.offset
    assert reader.calls is not None
    if not reader.code.inside and (yield from format.read(reader.tape, reader.calls)):
        reader.cut(reader.kind, start)
        yield from _bare_calls(reader, format)
        return
    reader.tape.rewind(start)
    yield from reader.tape.read(len(mark))
    reader.prose(mark)


def _bare_calls(reader: Reader, format: Format) -> Parse[None]:
    """Calls without a marker, where a part begins; in reasoning only behind one that has it."""
    assert reader.calls is not None
    start = reader.tape.offset
    while (first := (yield from reader.tape.space())) and first in format.bare:
        if not (yield from format.read(reader.tape, reader.calls)):
            break
        reader.cut(reader.kind, start)
        reader.tape.forget()
        start = reader.tape.offset
    reader.tape.rewind(start)
