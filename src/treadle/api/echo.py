"""Prompts that are repeated before their completions together with the log probabilities of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from treadle.api.logprobs import UNKNOWN
from treadle.api.prompts import Prompt
from treadle.errors import EngineFault
from treadle.output.stream import Event, Kind
from treadle.types import TokenLogprob

Item = tuple[int, Event]  # the index of a choice, and what comes for it


@dataclass(slots=True)
class _Echo:
    """One prompt: how many of its tokens were handed out, and what came for its choices before all of them were."""

    prompt: Prompt
    handed: int = 0
    held: list[Item] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.handed == len(self.prompt.ids)

    def text(self, scores: Sequence[TokenLogprob]) -> Event:
        """The next piece of the prompt as a text event. The first token, which has no score, is added."""
        prompt, first = self.prompt, self.handed
        items = [TokenLogprob(int(prompt.ids[0]), UNKNOWN), *scores] if first == 0 else list(scores)
        self.handed += len(items)
        offsets = (*prompt.offsets, len(prompt.echo))
        text = prompt.echo[offsets[first] : offsets[self.handed]]
        ids = tuple(item.token for item in items)
        return Event(Kind.TEXT, text, ids, tuple(items), offsets[first : self.handed])


class ScoredEchoes:
    """Puts the scored prompts before the events of their choices, `n` for each prompt.

    The scores come with the first choice of a prompt and are given to all of them; the others wait for them.
    """

    def __init__(self, prompts: Sequence[Prompt], n: int) -> None:
        self._echoes = [_Echo(prompt) for prompt in prompts]
        self._n = n

    def feed(self, index: int, event: Event) -> list[Item]:
        """What can be told now that this event came. Raises EngineFault if the scores do not come."""
        echo = self._echoes[index // self._n]
        made: list[Item] = []
        if event.prompt_logprobs or (len(echo.prompt.ids) == 1 and not echo.done):
            text = echo.text(event.prompt_logprobs)
            made += [(index - index % self._n + place, text) for place in range(self._n)]
        if event.kind is Kind.PROGRESS:
            told = event.prefilled is not None or event.skimmed is not None
            return [*made, (index, event)] if told else made
        echo.held.append((index, event))
        if echo.done:
            made += [(place, _behind(item, len(echo.prompt.echo))) for place, item in echo.held]
            echo.held.clear()
        elif event.finish is not None and index % self._n == 0:
            raise EngineFault("The engine did not report the log probabilities of the prompt.")
        return made


def _behind(event: Event, start: int) -> Event:
    """An event of the completion, which begins after `start` characters."""
    return event._replace(offsets=tuple(start + offset for offset in event.offsets))
