"""Calls as JSON: `{"name": ..., "arguments": {...}}` between markers, or arguments behind a header with the name."""

from __future__ import annotations

import re
from dataclasses import dataclass

from treadle.output.tape import MAX_NAME, Broken, Ends, Parse, Tape, run
from treadle.output.tools.base import guarded
from treadle.output.tools.calls import Calls
from treadle.output.tools.values import copy_arguments, string, value

ARGUMENT_KEYS = ("arguments", "parameters", "args")
FIRST_KEYS = frozenset((*ARGUMENT_KEYS, "name", "type", "function", "id"))
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
        if key == "name" and not name:
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
class JsonFormat:
    """`start` JSON `end`, `end` being optional; with `bare` the JSON may stand alone where the reply begins."""

    start: str
    end: str
    bare: bool = False

    @property
    def starts(self) -> tuple[str, ...]:
        return (self.start,)

    @property
    def tokens(self) -> tuple[str, ...]:
        return self.start, self.end

    def read(self, tape: Tape, calls: Calls) -> Parse[bool]:
        return (yield from guarded(self._calls(tape, calls), tape, calls, Ends(self.end)))

    def _calls(self, tape: Tape, calls: Calls) -> Parse[None]:
        yield from tape.take(self.start)
        yield from read_json(tape, calls)
        yield from tape.space()
        if self.bare:
            yield from tape.take(";")
        yield from tape.take(self.end)


@dataclass(frozen=True, slots=True)
class HeadedFormat:
    """`section` (`call` header `{arguments}` tail)* : the header holds the name, found by `pattern`.

    `section` may equal `call`. `tails` are what may stand behind the arguments of each call, in this order.
    """

    section: str
    call: str
    pattern: str
    tails: tuple[str, ...]
    more: tuple[str, ...] = ()  # further special tokens inside
    bare: bool = False

    @property
    def starts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.section, self.call)))

    @property
    def tokens(self) -> tuple[str, ...]:
        return self.section, self.call, *self.tails, *self.more

    def read(self, tape: Tape, calls: Calls) -> Parse[bool]:
        ends = Ends(*{*self.tails, self.section, self.call})
        return (yield from guarded(self._calls(tape, calls), tape, calls, ends, keep=self.starts))

    def _calls(self, tape: Tape, calls: Calls) -> Parse[None]:
        if self.section != self.call:
            yield from tape.take(self.section)
        yield from tape.expect(self.call)
        while True:
            if (yield from tape.space()) == "[":
                yield from read_json(tape, calls)
            else:
                yield from self._call(tape, calls)
            for tail in self.tails:
                yield from tape.space()
                yield from tape.take(tail)
            yield from tape.space()
            if not (yield from tape.take(self.call)):
                return

    def _call(self, tape: Tape, calls: Calls) -> Parse[None]:
        header = yield from tape.until(BRACE, MAX_NAME)
        found = re.fullmatch(self.pattern, header.strip())
        if found is None or found["name"] not in calls.tools:
            raise Broken
        yield from copy_arguments(tape, calls, found["name"])
