"""What a reply may consist of, known before it begins: reasoning, and calls of the request's tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from treadle.output.reasoning import HARMONY, Markers, markers_of, speaks_harmony
from treadle.output.tools.base import Format
from treadle.output.tools.detect import FALLBACK, format_of
from treadle.output.tools.schema import Toolset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HARMONY_TOKENS = (*HARMONY, "<|constrain|>", "<|call|>", "<|return|>")


@dataclass(frozen=True, slots=True)
class Form:
    """markers: of reasoning; opened: the reply begins inside it; tools with the format of their calls, or None;
    single: only the first call counts; harmony: the reply is channels, and `markers` and `format` are not used;
    shown: ids of special tokens that the pipeline must see; begun: text of the prompt that the reply goes on from.
    """

    markers: Markers | None = None
    opened: bool = False
    tools: Toolset | None = None
    format: Format | None = None
    single: bool = False
    harmony: bool = False
    shown: frozenset[int] = frozenset()
    begun: str = ""

    @property
    def plain(self) -> bool:
        """Whether the reply is text and nothing else."""
        return self.markers is None and self.format is None and not self.harmony


def writes_calls(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the format of calls that the model's own template teaches is known here."""
    return speaks_harmony(tokenizer) or format_of(tokenizer) is not None


def form_of(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    native: bool = True,
    single: bool = False,
) -> Form:
    """The form of replies to this prompt text. `tools` as in OpenAI's chat; `native`: the template wrote them."""
    toolset = Toolset(tools) if tools else None
    if speaks_harmony(tokenizer):
        return Form(tools=toolset, single=single, harmony=True, shown=_shown(tokenizer, HARMONY_TOKENS))
    markers = markers_of(tokenizer)
    format = None if toolset is None else (format_of(tokenizer) if native else None) or FALLBACK
    strings = (*((markers.opener, markers.closer) if markers else ()), *(format.tokens if format else ()))
    opened = markers is not None and markers.opened_by(prompt)
    return Form(markers, opened, toolset, format, single, shown=_shown(tokenizer, strings))


def form_of_call(tools: Sequence[Mapping[str, Any]], begun: str) -> Form:
    """The form of a reply that is a call, whose beginning `begun` stands in the prompt."""
    return Form(tools=Toolset(tools), format=FALLBACK, begun=begun)


def _shown(tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> frozenset[int]:
    """The special tokens that these strings hold; by default they have no text."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(
        int(i) for i, token in added if token.special and any(str(token.content) in string for string in strings)
    )
