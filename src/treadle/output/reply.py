"""The whole output pipeline of a reply that may hold reasoning and calls: outputs in, events out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from treadle.output.channels import read_channels
from treadle.output.form import Form
from treadle.output.marked import read_marked
from treadle.output.reader import Reader
from treadle.output.stream import Event, Kind, TextStream
from treadle.output.tape import Parse
from treadle.output.tools.calls import new_id
from treadle.types import Finish, Output

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ReplyStream:
    """Turns the outputs of one sequence into events of text, reasoning and calls, as `TextStream` does for text.

    Joined over all outputs the events do not depend on how the tokens were grouped. A call that the end of the
    reply cuts off before its function is known stays text; after that its arguments end where the text does.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_strings: Sequence[str] = (),
        form: Form | None = None,
        *,
        new_id: Callable[[], str] = new_id,
    ) -> None:
        self._text = TextStream(tokenizer, stop_strings, shown=form.shown if form else frozenset())
        self._reader = Reader(form or Form(), new_id)
        self._parse = _parser(self._reader, form) if form and not form.plain else None

    @property
    def stopped(self) -> bool:
        """Whether a stop string has matched."""
        return self._text.stopped

    def push(self, output: Output) -> list[Event]:
        """The events that this output makes certain; with `finish`, the last of them is `done`."""
        made = self._text.push(output)
        if self._parse is None:
            return made
        return [event for event in made for event in self._read(event, self._parse)]

    def _read(self, event: Event, parse: Parse[None]) -> list[Event]:
        reader = self._reader
        if event.kind is Kind.TEXT:
            reader.tokens.add(event)
            reader.tape.add(event.text)
        elif event.kind is Kind.DONE:
            reader.tape.end(truncated=event.finish is not Finish.STOP or event.stop_string is not None)
        else:
            return [event]
        next(parse, None)
        if event.kind is Kind.DONE:
            reader.close()
            reader.out.append(event._replace(reasoning_tokens=reader.reasoning_tokens))
        out, reader.out = reader.out, []
        return out


def _parser(reader: Reader, form: Form) -> Parse[None]:
    return read_channels(reader, form.dialect) if form.dialect else read_marked(reader, form)
