"""What a format of tool calls is to the reader of a reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from treadle.output.tape import Broken, Ends, Parse, Tape
from treadle.output.tools.calls import Calls


class Format(Protocol):
    """How one family of models writes calls.

    starts: strings that may begin calls. bare: calls may also begin, at the start of the reply or after a call,
    with `{`. tokens: all strings whose special tokens the format needs to see. read: parse from a start on,
    which is unread; false if it is prose after all, and then no call was begun.
    """

    @property
    def starts(self) -> tuple[str, ...]: ...
    @property
    def bare(self) -> bool: ...
    @property
    def tokens(self) -> tuple[str, ...]: ...
    def read(self, tape: Tape, calls: Calls) -> Parse[bool]: ...


def guarded(parse: Parse[None], tape: Tape, calls: Calls, end: Ends, keep: Sequence[str] = ()) -> Parse[bool]:
    """Run a parser of calls: whether it began any.

    If it breaks inside a call, the rest of that call's text up to `end` goes into its arguments as it is: the
    client sees what the model wrote instead of something made up. The end is read too, if it is not one of `keep`.
    """
    before = calls.count
    try:
        yield from parse
    except Broken:
        if calls.count > before:
            found = yield from tape.copy(end, calls.add)
            yield from tape.take("" if found is None or found in keep else found)
    return calls.count > before
