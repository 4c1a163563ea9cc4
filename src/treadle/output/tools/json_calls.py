"""Calls as JSON: `{"name": ..., "arguments": {...}}` between markers, or arguments behind a header with the name."""

from __future__ import annotations

import re
from dataclasses import dataclass

from treadle.output.tape import MAX_NAME, Broken, Ends, Parse, Tape, run
from treadle.output.tools.base import Format
from treadle.output.tools.calls import Calls
from treadle.output.tools.values import copy_arguments, string, value

ARGUMENT_KEYS = ("arguments", "parameters", "args")
NAME_KEYS = ("name", "tool_name")
FIRST_KEYS = frozenset((*ARGUMENT_KEYS, *NAME_KEYS, "type", "function", "id", "tool_call_id"))
BRACE = Ends("{", "\n\n")


def read_json(tape: Tape, calls: Calls) -> Parse[None]:
    """One call object, or an array of them. Raises Broken, also for a function that is not known."""
    if (yield from tape.space()) != "[":
        yield from read_object(tape, calls)
        return
    yield from tape.read(1)
    while True:
        yield from read_object(tape, calls)
        yield from tape.space()
        if not (yield from tape.take(",")):
            yield from tape.expect("]")
            return


def read_object(tape: Tape, calls: Calls) -> Parse[None]:
    """One call object, its keys in any order; arguments that come before the name wait for it."""
    yield from tape.expect("{")
    name, early, begun, first = "", "{}", False, True
    while (yield from tape.space()) != "}":
        if not first:
            yield from tape.expect(",")
        key = yield from string(tape)
        if first and key not in FIRST_KEYS:
            raise Broken  # other JSON, which should not wait for its end
        first = False
        yield from tape.expect(":")
        if key in NAME_KEYS and not name:
            name = yield from string(tape)
            if name not in calls.tools:
                raise Broken
        elif key == "function" and (yield from tape.space()) == "{":
            yield from read_object(tape, calls)
            begun = True
        elif key in ARGUMENT_KEYS and name and not begun:
            yield from copy_arguments(tape, calls, name)
            begun = True
        elif key in ARGUMENT_KEYS and not begun:
            early = yield from value(tape)
        else:
            yield from value(tape)
    yield from tape.expect("}")
    if not begun and name:
        run(copy_arguments(Tape(early, ended=True), calls, name))
    elif not begun:
        raise Broken


@dataclass(frozen=True, slots=True)
class JsonFormat(Format):
    """`start` JSON `end`, `end` being optional."""

    def calls(self, tape: Tape, calls: Calls) -> Parse[None]:
        yield from tape.take(self.start)
        yield from read_json(tape, calls)
        yield from tape.space()
        yield from tape.close(self.end)


@dataclass(frozen=True, slots=True)
class HeadedFormat(Format):
    """`start` (`call` header `{arguments}` tail)* : the header holds the name, found by `pattern`.

    `call` may equal `start`. `tails` are what may stand behind the arguments of each call, in this order; after
    the last call, `end` stands.
    """

    call: str
    pattern: str
    tails: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()  # further special tokens

    @property
    def starts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.start, self.call)))

    @property
    def ends(self) -> tuple[str, ...]:
        return (*self.tails, self.end, *self.starts)

    @property
    def tokens(self) -> tuple[str, ...]:
        return (*self.ends, *self.inner)

    def calls(self, tape: Tape, calls: Calls) -> Parse[None]:
        if self.start != self.call:
            yield from tape.take(self.start)
        yield from tape.expect(self.call)
        while True:
            if (yield from tape.space()) == "[":
                yield from read_json(tape, calls)
            else:
                yield from self._call(tape, calls)
            for tail in (*self.tails, self.end):
                yield from tape.space()
                yield from tape.close(tail)
            yield from tape.space()
            if not (yield from tape.take(self.call)):
                return

    def _call(self, tape: Tape, calls: Calls) -> Parse[None]:
        header = yield from tape.until(BRACE, MAX_NAME)
        found = re.fullmatch(self.pattern, header.strip())
        if found is None or found["name"] not in calls.tools:
            raise Broken
        yield from copy_arguments(tape, calls, found["name"])
