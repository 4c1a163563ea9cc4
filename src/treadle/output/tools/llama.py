"""Llama's calls: JSON objects, or Python calls in a list, often without any marker."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.output.tape import Parse, Tape
from treadle.output.tools.base import Format
from treadle.output.tools.calls import Calls
from treadle.output.tools.json_calls import read_json
from treadle.output.tools.literals import read_python_list


@dataclass(frozen=True, slots=True)
class LlamaFormat(Format):
    """`start` calls `end`, both being optional. Several JSON objects may be parted by `;`."""

    def calls(self, tape: Tape, calls: Calls) -> Parse[None]:
        yield from tape.take(self.start)
        if (yield from _python(tape)):
            yield from read_python_list(tape, calls)
        else:
            yield from read_json(tape, calls)
        yield from tape.space()
        yield from tape.take(";")
        yield from tape.close(self.end)


def _python(tape: Tape) -> Parse[bool]:
    """Whether a list comes next, and not one of JSON objects."""
    if (yield from tape.space()) != "[":
        return False
    start = tape.offset
    yield from tape.read(1)
    first = yield from tape.space()
    tape.rewind(start)
    return first not in ("{", "")
