"""The families whose replies are messages with headers, each on a channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from treadle.output.tools.base import Format
from treadle.output.tools.detect import MUSE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Dialect:
    """How such a family writes.

    message: ends a header; openings: bound messages, and so may `inner` in headers; named: every header has it;
    thinks: headers of reasoning have it; final: the header before an answer; begun: what the end may leave of a
    header, a pattern. format: how calls are written in a message; without one, a message to a function is its
    arguments.
    """

    message: str
    openings: tuple[str, ...]
    named: str
    thinks: str
    final: str
    begun: str
    inner: tuple[str, ...] = ()
    format: Format | None = None

    @property
    def bounds(self) -> tuple[str, ...]:
        """What ends a message. A header may follow without an opening where it begins with a token."""
        return (*self.openings, *(token for token in self.inner if token == self.named))

    @property
    def tokens(self) -> tuple[str, ...]:
        """All strings whose special tokens are to be seen."""
        return (self.message, *self.openings, *self.inner, *(self.format.tokens if self.format else ()))

    def opened_by(self, prompt: str) -> bool:
        """Whether a reply to this prompt text begins inside reasoning."""
        return prompt.rstrip().endswith(self.thinks + self.message)


HARMONY = Dialect(
    message="<|message|>",
    openings=("<|end|>", "<|call|>", "<|return|>", "<|start|>"),
    named="<|channel|>",
    thinks="<|channel|>analysis",
    final="<|channel|>final<|message|>",
    begun=r"(?s)<\|channel\|>.*",
    inner=("<|channel|>", "<|constrain|>"),
)
"""gpt-oss."""
ATEM = Dialect(
    message="<|message|>",
    openings=("<|eom|>", "<|eot|>", "<|start|>"),
    named="to=",
    thinks="to=self",
    final=" to=user<|message|>",
    begun=r"\s*(?:assistant)?\s*(?:to=\w*)?",
    format=MUSE,
)
"""Muse."""
VOCABULARIES = (
    (frozenset({"<|start|>", "<|channel|>", "<|message|>", "<|end|>"}), HARMONY),
    (frozenset({"<|start|>", "<|message|>", "<|eom|>"}), ATEM),
)


def dialect_of(tokenizer: PreTrainedTokenizerBase) -> Dialect | None:
    """The dialect that the vocabulary tells; None for most models."""
    known = tokenizer.get_added_vocab().keys()
    return next((dialect for tokens, dialect in VOCABULARIES if tokens <= known), None)
