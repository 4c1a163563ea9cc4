"""Calls as tags, one argument in each: Qwen3-Coder, GLM, MiniMax and their like; and JSON in `<tool_call>`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import unescape

from treadle.output.tape import MAX_NAME, Broken, Ends, Parse, Sink, Tape
from treadle.output.tools.base import Format
from treadle.output.tools.calls import Calls
from treadle.output.tools.json_calls import read_json
from treadle.output.tools.schema import dump, typed
from treadle.output.tools.values import copy_arguments, escaped

CDATA = ("<![CDATA[", "]]>")
STRING = frozenset({"string"})
ATTRIBUTE = re.compile(r"\s\w+=$")
SAYS_STRING = re.compile(r"""\s(?:string=["']true["']|type=["']string["'])""")


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of one call.

    name_open: before the name ("" if the call begins with it); name_ends: what ends the name, of which `key_end`
    is read and others are not; key_open, key_end: around an argument's name; value_open: between key and value
    ("": nothing); value_end; close: the end of the call. lines: values stand on lines of their own. whole: what
    may stand around all arguments as one JSON object instead.

    A name may be the first attribute of its tag (`name="city" string="true"`); where the schema does not tell
    the type of a value, another attribute that says it is a string counts.
    """

    name_open: str
    name_ends: tuple[str, ...]
    key_open: str
    key_end: str
    value_open: str
    value_end: str
    close: str
    lines: bool = False
    whole: tuple[str, str] | None = None

    @property
    def strings(self) -> tuple[str, ...]:
        """All strings of which special tokens may be part."""
        found = (self.name_open, self.key_open, self.key_end, self.value_open, self.value_end, self.close)
        return tuple(string for string in (*found, *(self.whole or ())) if len(string) > 1)

    @property
    def quoted(self) -> bool:
        """Whether names are attributes of their tags, between quotes."""
        return ATTRIBUTE.search(self.key_open) is not None

    def read(self, tape: Tape, calls: Calls) -> Parse[None]:
        """One call, from `name_open` on, which may be read already. Raises Broken."""
        yield from tape.take(self.name_open)
        name = _unquoted((yield from tape.until(Ends(*self.name_ends), MAX_NAME)))
        if name not in calls.tools:
            raise Broken
        yield from tape.take(self.key_end if self.key_end in self.name_ends else "")
        first = yield from tape.space()
        if first not in ("<", ""):
            raise Broken
        if self.whole is not None and (yield from tape.take(self.whole[0])):
            yield from self._whole(tape, calls, name, self.whole[1])
            return
        calls.begin(name)
        calls.add("{")
        yield from self._arguments(tape, calls)
        calls.add("}")

    def _arguments(self, tape: Tape, calls: Calls) -> Parse[None]:
        """The arguments up to the end of the call; of the reply too, for some models forget the last tags."""
        separator, longest = "", max(len(self.key_open), len(self.close))
        while True:
            yield from tape.space()
            if (yield from tape.take(self.close)):
                return
            if len((yield from tape.peek(longest))) < longest and tape.truncated:
                raise Broken  # in the middle of a tag, for all one can see
            if not (yield from tape.take(self.key_open)):
                return  # the next call, or the end of the section
            header = yield from tape.until(Ends(self.key_end), MAX_NAME)
            yield from tape.take(self.key_end)
            if self.value_open:
                yield from tape.expect(self.value_open)
            key = _unquoted(header)
            calls.add(f"{separator}{dump(key)}: ")
            types = calls.types(key) or (STRING if SAYS_STRING.search(header) else frozenset())
            yield from self._value(tape, types, calls.add)
            separator = ", "

    def _whole(self, tape: Tape, calls: Calls, name: str, end: str) -> Parse[None]:
        """The arguments as one object, whose opening tag is read."""
        yield from tape.until(Ends(self.key_end), MAX_NAME)
        yield from tape.take(self.key_end)
        yield from copy_arguments(tape, calls, name)
        yield from tape.expect(end)
        yield from tape.expect(self.close)

    def _value(self, tape: Tape, types: frozenset[str], sink: Sink) -> Parse[None]:
        if self.lines:
            yield from tape.take("\n")
        cdata = yield from tape.take(CDATA[0])
        end = CDATA[1] if cdata else self.value_end
        ends = Ends(end, "\n" + end) if self.lines else Ends(end)
        if types == {"string"}:
            sink('"')
            if (yield from tape.copy(ends, lambda text: sink(escaped(text)))) is None:
                raise Broken
            sink('"')
        else:
            sink(typed((yield from tape.until(ends)), types))
        yield from tape.space()
        yield from tape.take(end)
        if cdata:
            yield from tape.expect(self.value_end)


def _unquoted(name: str) -> str:
    """A name without quotes, and without attributes behind its quotes; it may be escaped then."""
    name = name.strip()
    return unescape(name[1:].split(name[0])[0]) if name[:1] in ('"', "'") else name


QWEN = Tags("<function=", (">",), "<parameter=", ">", "", "</parameter>", "</function>", lines=True)
GLM = Tags(
    "", ("<arg_key>", "</tool_call>", "\n"), "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"
)


@dataclass(frozen=True, slots=True)
class TagFormat(Format):
    """`start` calls `end`; without a start of its own, each call stands alone."""

    tags: Tags

    @property
    def starts(self) -> tuple[str, ...]:
        return (self.start or self.tags.name_open,)

    @property
    def ends(self) -> tuple[str, ...]:
        return (self.end or self.tags.close,)

    @property
    def tokens(self) -> tuple[str, ...]:
        return (*self.starts, *self.ends, *self.tags.strings)

    def calls(self, tape: Tape, calls: Calls) -> Parse[None]:
        yield from tape.take(self.start)
        yield from tape.space()
        yield from self.tags.read(tape, calls)
        while self.start:
            yield from tape.space()
            ended = yield from tape.close(self.end)
            if ended or not (yield from tape.close(self.tags.name_open)):
                return
            yield from self.tags.read(tape, calls)


@dataclass(frozen=True, slots=True)
class ToolCallTag(Format):
    """`<tool_call>` with what the model puts inside: JSON (Hermes, Qwen), Qwen3-Coder's tags, or GLM's.

    Each call tells by itself which it is, so a model that mixes them is read too. Qwen3-Coder sometimes leaves
    the outer tag out.
    """

    start: str = "<tool_call>"
    end: str = "</tool_call>"

    @property
    def starts(self) -> tuple[str, ...]:
        return self.start, QWEN.name_open

    @property
    def tokens(self) -> tuple[str, ...]:
        return (self.start, self.end, *GLM.strings)

    def calls(self, tape: Tape, calls: Calls) -> Parse[None]:
        yield from tape.take(self.start)
        first = yield from tape.space()
        while True:
            if first in ("{", "["):
                yield from read_json(tape, calls)
            else:
                coder = (yield from tape.peek(len(QWEN.name_open))) == QWEN.name_open
                yield from (QWEN if coder else GLM).read(tape, calls)
            first = yield from tape.space()
            if first not in ("{", "["):
                yield from tape.close(self.end)
                return
