"""Calls as tags, one argument in each: Qwen3-Coder, GLM, MiniMax and their like; and JSON in `<tool_call>`."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.output.tape import MAX_NAME, Broken, Ends, Parse, Sink, Tape
from treadle.output.tools.base import guarded
from treadle.output.tools.calls import Calls
from treadle.output.tools.json_calls import read_json
from treadle.output.tools.schema import dump, typed
from treadle.output.tools.values import escaped

CDATA = ("<![CDATA[", "]]>")


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of one call.

    name_open: before the name ("" if the call begins with it); name_ends: what ends the name, of which `>` is
    read and others are not; key_open, key_end: around an argument's name; value_open: between key and value
    ("": nothing); value_end; close: the end of the call. lines: values stand on lines of their own.
    """

    name_open: str
    name_ends: tuple[str, ...]
    key_open: str
    key_end: str
    value_open: str
    value_end: str
    close: str
    lines: bool = False

    def read(self, tape: Tape, calls: Calls) -> Parse[None]:
        """One call, from `name_open` on, which is unread. Raises Broken."""
        yield from tape.take(self.name_open)
        name = _unquoted((yield from tape.until(Ends(*self.name_ends), MAX_NAME)))
        if name not in calls.tools:
            raise Broken
        yield from tape.take(">")
        first = yield from tape.space()
        if first not in ("<", ""):
            raise Broken
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
            key = _unquoted((yield from tape.until(Ends(self.key_end), MAX_NAME)))
            yield from tape.take(self.key_end)
            if self.value_open:
                yield from tape.expect(self.value_open)
            calls.add(f"{separator}{dump(key)}: ")
            yield from self._value(tape, calls.types(key), calls.add)
            separator = ", "

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
    """A name without quotes, and without attributes behind its quotes."""
    name = name.strip()
    return name[1:].split(name[0])[0] if name[:1] in ('"', "'") else name


QWEN = Tags("<function=", (">",), "<parameter=", ">", "", "</parameter>", "</function>", lines=True)
GLM = Tags(
    "", ("<arg_key>", "</tool_call>", "\n"), "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"
)


@dataclass(frozen=True, slots=True)
class TagFormat:
    """`start` calls `end`; without a start of its own, each call stands alone."""

    start: str
    end: str
    tags: Tags
    bare: bool = False

    @property
    def starts(self) -> tuple[str, ...]:
        return (self.start or self.tags.name_open,)

    @property
    def tokens(self) -> tuple[str, ...]:
        tags = self.tags
        parts = (self.start, self.end, tags.name_open, tags.key_open, tags.key_end, tags.value_open)
        return tuple(part for part in (*parts, tags.value_end, tags.close) if len(part) > 1)

    def read(self, tape: Tape, calls: Calls) -> Parse[bool]:
        return (yield from guarded(self._calls(tape, calls), tape, calls, Ends(self.end or self.tags.close)))

    def _calls(self, tape: Tape, calls: Calls) -> Parse[None]:
        yield from tape.take(self.start)
        yield from tape.space()
        yield from self.tags.read(tape, calls)
        while self.start:
            yield from tape.space()
            ended = yield from tape.take(self.end)
            if ended or (yield from tape.peek(len(self.tags.name_open))) != self.tags.name_open:
                return
            yield from self.tags.read(tape, calls)


@dataclass(frozen=True, slots=True)
class ToolCallTag:
    """`<tool_call>` with what the model puts inside: JSON (Hermes, Qwen), Qwen3-Coder's tags, or GLM's.

    Each call tells by itself which it is, so a model that mixes them is read too. Qwen3-Coder sometimes leaves
    the outer tag out.
    """

    bare: bool = False

    @property
    def starts(self) -> tuple[str, ...]:
        return "<tool_call>", "<function="

    @property
    def tokens(self) -> tuple[str, ...]:
        return "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"

    def read(self, tape: Tape, calls: Calls) -> Parse[bool]:
        return (yield from guarded(self._calls(tape, calls), tape, calls, Ends("</tool_call>")))

    def _calls(self, tape: Tape, calls: Calls) -> Parse[None]:
        yield from tape.take("<tool_call>")
        first = yield from tape.space()
        while True:
            if first in ("{", "["):
                yield from read_json(tape, calls)
            else:
                coder = (yield from tape.peek(len(QWEN.name_open))) == QWEN.name_open
                yield from (QWEN if coder else GLM).read(tape, calls)
            first = yield from tape.space()
            if first not in ("{", "["):
                yield from tape.take("</tool_call>")
                return
