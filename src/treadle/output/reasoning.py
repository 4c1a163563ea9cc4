"""Where a model's reasoning begins and ends in its text: told by its chat template and its vocabulary."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAIRS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
CHANNEL = ("<|channel>thought", "<channel|>")
XTML = frozenset({"<|open|>", "<|close|>", "<|sep|>"})
OPENER, CLOSER = "<|open|>{}<|sep|>", "<|close|>{}<|sep|>"
FRAMES = (
    (XTML, (OPENER.format("response"), CLOSER.format("response"), CLOSER.format("message"))),
    (frozenset({"<|START_RESPONSE|>", "<|END_RESPONSE|>"}), ("<|START_RESPONSE|>", "<|END_RESPONSE|>")),
)
"""Vocabularies with strings around the parts of an answer, which are nobody's text."""
SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True, slots=True)
class Markers:
    """What stands around reasoning. `assumed`: the model may begin inside, without an opener anywhere."""

    opener: str
    closer: str
    assumed: bool = False

    def opened_by(self, prompt: str) -> bool:
        """Whether a reply to this prompt text begins inside reasoning.

        The prompt counts by its end, where the template opens (or closes) reasoning: messages may mention markers.
        """
        end = prompt.rstrip()
        return end.endswith(self.opener) or (self.assumed and not end.endswith(self.closer))


_found: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[str, Markers | None]] = WeakKeyDictionary()


def markers_of(tokenizer: PreTrainedTokenizerBase) -> Markers | None:
    """The markers of this tokenizer and its template, found once; None for a model without."""
    template = str(tokenizer.chat_template or "")
    known = _found.get(tokenizer)
    if known is None or known[0] != template:
        known = _found[tokenizer] = (template, find_markers(template, tokenizer.get_added_vocab()))
    return known[1]


def find_markers(template: str, added: Mapping[str, int]) -> Markers | None:
    """As `markers_of`. A template that cuts at the closer and never writes the opener leaves it to the model."""
    if {"<|channel>", "<channel|>"} <= added.keys():
        return Markers(*CHANNEL)
    if added.keys() >= XTML:
        return Markers(OPENER.format("think"), CLOSER.format("think"))
    for opener, closer in PAIRS:
        if closer in template or {opener, closer} <= added.keys():
            return Markers(opener, closer, assumed=closer in template and opener not in template)
    return None


def frames_of(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Strings that frame the parts of this model's replies and are not shown."""
    added = tokenizer.get_added_vocab().keys()
    return tuple(string for tokens, strings in FRAMES if tokens <= added for string in strings)


def template_effort(template: str, effort: str | None) -> dict[str, Any]:
    """Template variables for a `reasoning_effort`: those that the template reads, none where it has no control."""
    if effort is None:
        return {}
    variables: dict[str, Any] = {}
    switch = next((name for name in SWITCHES if re.search(rf"\b{name}\b", template)), None)
    if switch is not None:
        variables[switch] = effort != "none"
    if re.search(r"\breasoning_effort\b", template):
        variables["reasoning_effort"] = {"none": "low", "minimal": "low", "xhigh": "high"}.get(effort, effort)
    return variables
