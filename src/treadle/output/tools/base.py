"""What a format of tool calls is to the reader of a reply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from treadle.output.tape import Broken, Ends, Parse, Tape
from treadle.output.tools.calls import Calls


@dataclass(frozen=True, slots=True)
class Format:
    """How one family of models writes calls: `start` calls `end`. Each format reads its own kind of calls.

    bare: characters with which calls may also begin without `start`, at the start of the reply or after a call.
    """

    start: str
    end: str
    bare: str = field(default="", kw_only=True)

    @property
    def starts(self) -> tuple[str, ...]:
        """Strings that may begin calls."""
        return (self.start,)

    @property
    def ends(self) -> tuple[str, ...]:
        """Strings of which the first ends a call that cannot be read."""
        return (self.end,)

    @property
    def tokens(self) -> tuple[str, ...]:
        """All strings whose special tokens the format needs to see."""
        return (*self.starts, *self.ends)

    def read(self, tape: Tape, calls: Calls) -> Parse[bool]:
        """Parse from a start on, which is unread; false if it is prose after all, and then no call was begun."""
        ends = Ends(*filter(None, self.ends))
        return (yield from guarded(self.calls(tape, calls), tape, calls, ends, keep=self.starts))

    def calls(self, tape: Tape, calls: Calls) -> Parse[None]:
        """The calls with `start` and `end`. Raises Broken, before or after a call was begun."""
        raise NotImplementedError


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
