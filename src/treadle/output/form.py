"""What a reply may consist of, known before it begins: reasoning, and calls of the request's tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from treadle.output.dialect import Dialect, dialect_of
from treadle.output.reasoning import Markers, frames_of, markers_of
from treadle.output.tools.base import Format
from treadle.output.tools.detect import FALLBACK, format_of
from treadle.output.tools.schema import Toolset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Form:
    """markers: of reasoning; opened: the reply begins inside it; tools with the format of their calls, or None;
    single: only the first call counts; dialect: of channels, then `markers` and `format` are not used; frames:
    strings that are nobody's text; shown: ids of special tokens that the pipeline must see.
    """

    markers: Markers | None = None
    opened: bool = False
    tools: Toolset | None = None
    format: Format | None = None
    single: bool = False
    dialect: Dialect | None = None
    frames: tuple[str, ...] = ()
    shown: frozenset[int] = frozenset()

    @property
    def plain(self) -> bool:
        """Whether the reply is text and nothing else."""
        return self.markers is None and self.format is None and self.dialect is None and not self.frames


def writes_calls(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the format of calls that the model's own template teaches is known here."""
    return dialect_of(tokenizer) is not None or format_of(tokenizer) is not None


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
    dialect = dialect_of(tokenizer)
    if dialect is not None:
        opened, shown = dialect.opened_by(prompt), _shown(tokenizer, dialect.tokens)
        return Form(opened=opened, tools=toolset, single=single, dialect=dialect, shown=shown)
    markers = markers_of(tokenizer)
    format = None if toolset is None else (format_of(tokenizer) if native else None) or FALLBACK
    frames = frames_of(tokenizer)
    strings = (*((markers.opener, markers.closer) if markers else ()), *(format.tokens if format else ()), *frames)
    opened = markers is not None and markers.opened_by(prompt)
    return Form(markers, opened, toolset, format, single, frames=frames, shown=_shown(tokenizer, strings))


def in_words(tokenizer: PreTrainedTokenizerBase, form: Form) -> Form:
    """The same form, but with calls as models write them that were told of tools in words."""
    shown = form.shown | _shown(tokenizer, FALLBACK.tokens)
    return replace(form, dialect=None, format=FALLBACK, frames=(), shown=shown)


def _shown(tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> frozenset[int]:
    """The special tokens that these strings hold; by default they have no text."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(
        int(i) for i, token in added if token.special and any(str(token.content) in string for string in strings)
    )
