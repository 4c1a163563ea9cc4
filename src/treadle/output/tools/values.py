"""JSON read from a tape while it is written: strings, values, and the arguments of a call."""

from __future__ import annotations

import json
import re

from treadle.output.tape import Broken, Ends, Parse, Sink, Tape, run
from treadle.output.tools.calls import Calls
from treadle.output.tools.schema import dump, literal, retyped

STRING = Ends('"', "\\")
NESTED = Ends('"', "{", "}", "[", "]")
LITERAL = Ends(",", "}", "]", " ", "\n", "\t", "\r")
CLOSERS = {"{": "}", "[": "]"}
ESCAPES = frozenset('"\\/bfnrtu')
CONTROL = re.compile(r"[\x00-\x1f]")


def escaped(text: str) -> str:
    """The inside of a JSON string."""
    return dump(text)[1:-1]


def _raw(text: str) -> str:
    """Text of a JSON string as the model wrote it, with the control characters escaped that it must not hold."""
    return CONTROL.sub(lambda match: escaped(match.group()), text)


def copy_string(tape: Tape, sink: Sink) -> Parse[None]:
    """A JSON string with its quotes, as it comes. Raises Broken when the text ends before it does."""
    yield from tape.read(1)
    sink('"')
    while True:
        end = yield from tape.copy(STRING, lambda text: sink(_raw(text)))
        if end is None:
            raise Broken
        if end == '"':
            yield from tape.read(1)
            sink('"')
            return
        pair = yield from tape.peek(2)
        if len(pair) < 2:
            raise Broken
        yield from tape.read(2 if pair[1] in ESCAPES else 1)
        sink(pair if pair[1] in ESCAPES else "\\\\")


def string(tape: Tape) -> Parse[str]:
    """The value of a JSON string. Raises Broken."""
    if (yield from tape.space()) != '"':
        raise Broken
    parts: list[str] = []
    yield from copy_string(tape, parts.append)
    return str(_loaded("".join(parts)))


def copy_nested(tape: Tape, sink: Sink) -> Parse[None]:
    """An object or array as it comes, up to its own end. Raises Broken."""
    opened: list[str] = []
    while True:
        mark = yield from tape.copy(NESTED, sink)
        if mark is None:
            raise Broken
        if mark == '"':
            yield from copy_string(tape, sink)
            continue
        if mark in CLOSERS:
            opened.append(CLOSERS[mark])
        elif opened.pop() != mark:
            raise Broken
        yield from tape.read(1)
        sink(mark)
        if not opened:
            return


def value(tape: Tape) -> Parse[str]:
    """Any JSON value as text; Python's literals become JSON's. Raises Broken."""
    first = yield from tape.space()
    parts: list[str] = []
    if first == '"':
        yield from copy_string(tape, parts.append)
    elif first in CLOSERS:
        yield from copy_nested(tape, parts.append)
    else:
        word = yield from tape.until(LITERAL)
        known = literal(word)
        if not word or isinstance(known, str):
            raise Broken
        return dump(known)
    _loaded("".join(parts))
    return "".join(parts)


def copy_value(tape: Tape, types: frozenset[str], sink: Sink) -> Parse[None]:
    """A JSON value, as it comes where its type is right, and retyped as a whole where it is not."""
    first = yield from tape.space()
    if first == '"' and (not types or "string" in types):
        yield from copy_string(tape, sink)
    elif first in CLOSERS and types != {"string"}:
        yield from copy_nested(tape, sink)
    else:
        sink(retyped((yield from value(tape)), types))


def copy_arguments(tape: Tape, calls: Calls, name: str) -> Parse[None]:
    """Begin the call `name` and stream its arguments: an object, its JSON as a string, or null.

    The call begins when the arguments look like JSON. Raises Broken, before or after that.
    """
    first = yield from tape.space()
    if first == '"':
        text = yield from string(tape)
        run(copy_arguments(Tape(text or "{}", ended=True), calls, name))
        return
    if first == "n":
        yield from tape.expect("null")
        calls.begin(name)
        calls.add("{}")
        return
    yield from tape.expect("{")
    if (yield from tape.space()) not in ('"', "}"):
        raise Broken
    calls.begin(name)
    calls.add("{")
    separator = ""
    while not (yield from _closed(tape)):
        if separator:
            yield from tape.expect(",")
        key = yield from string(tape)
        yield from tape.expect(":")
        calls.add(f"{separator}{dump(key)}: ")
        yield from copy_value(tape, calls.types(key), calls.add)
        separator = ", "
    calls.add("}")


def _closed(tape: Tape) -> Parse[bool]:
    yield from tape.space()
    return (yield from tape.take("}"))


def _loaded(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Broken from error
