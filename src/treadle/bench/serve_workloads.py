"""What the load generator asks: conversations of one or more turns, made of plain words. Pure, repeatable by seed.

    chat           each request is a conversation of its own: a short system message and a question
    shared-prefix  one long system message for all of them, and a short question each
    agent          a conversation that grows: after every reply of the model comes the result of a tool, as an agent
                   would send it, so that each turn repeats all of the one before

Tool results are messages of the user, which every server takes, whatever the model's template knows of tools. Words are
common ones, so that a word is about a token.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from treadle.errors import BadRequest

WORKLOADS = ("chat", "agent", "shared-prefix")
TURNS = 6  # of an agent's conversation
TEXT = (
    "the a of to in and is that it was for on are as with they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so "
    "these would other into has more her two like him see time could no make than first been its who now people my "
    "made over did down only way find use may water long little very after words called just where most know get "
    "through back much before go good new write our used me man too any day same right look think also around "
    "another came come work three word must because does part even place well such here take why things help put "
    "years different away again off went old number great tell men say small every found still between name should "
    "home big give air line set own under read last never us left end along while might next sound below saw "
    "something thought both few those always looked show large often together asked house world going want"
)
WORDS = TEXT.split()

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages before the first reply, and what is said after each reply but the last."""

    opening: tuple[Message, ...]
    later: tuple[Message, ...] = ()

    @property
    def num_turns(self) -> int:
        return 1 + len(self.later)


def conversations(workload: str, num_requests: int, num_words: int, seed: int) -> list[Conversation]:
    """As many as give `num_requests` turns. `num_words` is the length of the part that makes a prompt long.

    Raises BadRequest for an unknown workload.
    """
    if workload not in WORKLOADS:
        raise BadRequest(f"The workload must be one of {', '.join(WORKLOADS)}, not {workload!r}.", param="workload")
    source = random.Random(seed)
    if workload == "agent":
        return _agents(source, num_requests, num_words)
    shared = text(source, num_words if workload == "shared-prefix" else 20)
    length = 12 if workload == "shared-prefix" else num_words
    return [Conversation((system(shared), user(question(source, length)))) for _ in range(num_requests)]


def _agents(source: random.Random, num_requests: int, num_words: int) -> list[Conversation]:
    """Each with its own instructions and tool results of `num_words`; the last one is shorter if need be."""
    made = []
    for start in range(0, num_requests, TURNS):
        turns = min(TURNS, num_requests - start)
        opening = (system(text(source, num_words)), user(question(source, 20)))
        results = (f"Result of read_file({number}):\n{text(source, num_words)}" for number in range(1, turns))
        made.append(Conversation(opening, tuple(user(result) for result in results)))
    return made


def text(source: random.Random, num_words: int) -> str:
    return " ".join(source.choices(WORDS, k=num_words))


def question(source: random.Random, num_words: int) -> str:
    return f"Write a long story about this: {text(source, num_words)}."


def system(content: str) -> Message:
    return {"role": "system", "content": content}


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def after(messages: Sequence[Message], reply: str, said: Message) -> list[Message]:
    """The conversation one turn later. A reply without text is one full stop: many templates refuse an empty one."""
    return [*messages, {"role": "assistant", "content": reply or "."}, said]
