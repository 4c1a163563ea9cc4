"""Calls in the manner of programs: Python calls (LFM2) and Gemma's `call:name{key:value}`."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.output.tape import MAX_NAME, Broken, Ends, Parse, Sink, Tape
from treadle.output.tools.base import Format
from treadle.output.tools.calls import Calls
from treadle.output.tools.schema import dump, literal, retyped, typed
from treadle.output.tools.values import escaped

QUOTES = ('"', "'")
NAME = Ends("(", ")", "[", "]", "{", "}", "\n", " ")  # of which only the first may come next
DEEP = Ends('"', "'", ",", "(", ")", "[", "]", "{", "}")
OPENERS, CLOSERS = "([{", ")]}"
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0"}
HEX = {"x": 2, "u": 4, "U": 8}


def copy_python_string(tape: Tape, sink: Sink) -> Parse[None]:
    """A Python string literal as the inside of a JSON string, as it comes. Raises Broken at the end of the text."""
    quote = yield from tape.read(1)
    ends = Ends(quote, "\\")
    while True:
        end = yield from tape.copy(ends, lambda text: sink(escaped(text)))
        if end is None:
            raise Broken
        yield from tape.read(1)
        if end == quote:
            return
        sink(escaped((yield from _escape(tape))))


def _escape(tape: Tape) -> Parse[str]:
    """The character behind a backslash; an unknown escape stays as it is written, as in Python."""
    code = yield from tape.read(1)
    if code in HEX:
        digits = yield from tape.peek(HEX[code])
        try:
            char = chr(int(digits, 16))
        except (ValueError, OverflowError):
            return "\\" + code
        yield from tape.read(HEX[code])
        return char
    if code == "":
        raise Broken
    return ESCAPES.get(code, code if code in "\\'\"" else "\\" + code)


def _expression(tape: Tape) -> Parse[str]:
    """Source text of a value, up to the comma or bracket that ends it."""
    parts: list[str] = []
    depth = 0
    while True:
        mark = yield from tape.copy(DEEP, parts.append)
        if mark is None:
            raise Broken
        if depth == 0 and mark in (",", ")"):
            return "".join(parts)
        if mark in QUOTES:
            inner: list[str] = []
            yield from copy_python_string(tape, inner.append)
            parts.append('"' + "".join(inner) + '"')
            continue
        depth += (mark in OPENERS) - (mark in CLOSERS)
        parts.append((yield from tape.read(1)))


def read_python_list(tape: Tape, calls: Calls) -> Parse[None]:
    """`[name(key=value, ...), ...]`. Raises Broken."""
    yield from tape.expect("[")
    while True:
        yield from read_python_call(tape, calls)
        yield from tape.space()
        if not (yield from tape.take(",")):
            break
    yield from tape.expect("]")


def read_python_call(tape: Tape, calls: Calls) -> Parse[None]:
    """`name(key=value, ...)`. Raises Broken."""
    yield from tape.space()
    name = yield from tape.until(NAME, MAX_NAME)
    if name not in calls.tools:
        raise Broken
    yield from tape.expect("(")
    calls.begin(name)
    calls.add("{")
    separator = ""
    while (yield from tape.space()) != ")":
        if separator:
            yield from tape.expect(",")
            if (yield from tape.space()) == ")":
                break
        key = (yield from tape.until(Ends("="), MAX_NAME)).strip()
        yield from tape.expect("=")
        calls.add(f"{separator}{dump(key)}: ")
        yield from _value(tape, calls.types(key), calls.add)
        separator = ", "
    yield from tape.expect(")")
    calls.add("}")


def _value(tape: Tape, types: frozenset[str], sink: Sink) -> Parse[None]:
    if (yield from tape.space()) in QUOTES and (not types or "string" in types):
        sink('"')
        yield from copy_python_string(tape, sink)
        sink('"')
        return
    source = yield from _expression(tape)
    sink(retyped(dump(literal(source)), types))


@dataclass(frozen=True, slots=True)
class PythonFormat(Format):
    """`start` `[name(key=value, ...), ...]` `end`. Arguments without a name are not read.

    lines: the calls stand on lines of their own instead of in a list.
    """

    lines: bool = False

    def calls(self, tape: Tape, calls: Calls) -> Parse[None]:
        yield from tape.take(self.start)
        if self.lines:
            yield from self._lines(tape, calls)
        else:
            yield from read_python_list(tape, calls)
        yield from tape.space()
        yield from tape.close(self.end)

    def _lines(self, tape: Tape, calls: Calls) -> Parse[None]:
        while (yield from tape.space()) not in ("", self.end[:1]):
            yield from read_python_call(tape, calls)


@dataclass(frozen=True, slots=True)
class GemmaFormat(Format):
    """`start` `call:name{key:value,...}` `end`: bare keys, and strings between two `quote`s."""

    quote: str

    @property
    def tokens(self) -> tuple[str, ...]:
        return self.start, self.end, self.quote

    def calls(self, tape: Tape, calls: Calls) -> Parse[None]:
        yield from tape.take(self.start)
        while True:
            yield from tape.expect("call:")
            name = (yield from tape.until(Ends("{"), MAX_NAME)).strip()
            if name not in calls.tools:
                raise Broken
            calls.begin(name)
            yield from self._object(tape, calls.add, calls)
            if (yield from tape.space()) != "c":
                break
        yield from tape.close(self.end)

    def _object(self, tape: Tape, sink: Sink, calls: Calls | None = None) -> Parse[None]:
        """An object; of `calls`, its members have the types of the arguments."""
        yield from tape.expect("{")
        sink("{")
        separator = ""
        while (yield from tape.space()) != "}":
            if separator:
                yield from tape.expect(",")
                yield from tape.space()
            key = yield from self._key(tape)
            sink(f"{separator}{dump(key)}: ")
            yield from self._value(tape, calls.types(key) if calls else frozenset(), sink)
            separator = ", "
        yield from tape.expect("}")
        sink("}")

    def _key(self, tape: Tape) -> Parse[str]:
        if (yield from tape.take(self.quote)):
            key = yield from tape.until(Ends(self.quote), MAX_NAME)
            yield from tape.take(self.quote)
        else:
            key = yield from tape.until(Ends(":"), MAX_NAME)
        yield from tape.expect(":")
        return key.strip()

    def _value(self, tape: Tape, types: frozenset[str], sink: Sink) -> Parse[None]:
        first = yield from tape.space()
        if first in ("{", "["):
            yield from (self._object(tape, sink) if first == "{" else self._array(tape, sink))
        elif not (yield from tape.take(self.quote)):
            sink(typed((yield from tape.until(Ends(",", "}", "]"))), types))
        elif types and "string" not in types:
            text = yield from tape.until(Ends(self.quote))
            yield from tape.take(self.quote)
            sink(typed(text, types))
        else:
            sink('"')
            if (yield from tape.copy(Ends(self.quote), lambda text: sink(escaped(text)))) is None:
                raise Broken
            yield from tape.take(self.quote)
            sink('"')

    def _array(self, tape: Tape, sink: Sink) -> Parse[None]:
        yield from tape.expect("[")
        sink("[")
        separator = ""
        while (yield from tape.space()) != "]":
            if separator:
                yield from tape.expect(",")
            sink(separator)
            yield from self._value(tape, frozenset(), sink)
            separator = ", "
        yield from tape.expect("]")
        sink("]")
