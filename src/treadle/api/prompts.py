"""From a request body to prompt ids. Runs in the prompt threads, never on the event loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from treadle.api.fields import ChatBody, CompletionBody
from treadle.api.grammar import constraint_of
from treadle.api.ports import ModelPort
from treadle.api.shape import shaped
from treadle.errors import BadRequest, ContextLengthExceeded
from treadle.output.detokenise import Detokeniser
from treadle.output.form import Form, form_of, writes_calls
from treadle.output.reasoning import template_effort
from treadle.prompt.conversation import BLIND, ImageRef, normalise
from treadle.prompt.history import without_attribution
from treadle.prompt.pictures import expanded, for_template, image_refs
from treadle.prompt.template import check_kwargs, render, takes_tools
from treadle.prompt.tokenise import encode, encoder_of
from treadle.prompt.tools import in_words
from treadle.prompt.turns import boundaries
from treadle.types import Constraint, Ids, Span

CHARS_PER_TOKEN = 8  # a text with more characters than this per token of context is counted in pieces first
PIECE_CHARS = 16_384
PLAIN = Form()
MARGIN = 1.25  # a cut adds a few tokens, so only what is over by this much is over for certain


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt for the engine, where its messages start, and its text where the reply must repeat it; with the
    characters before each id where these are reported.

    `form`: what its replies may consist of beside text. `constraint`: what they must look like. `spans`: its pictures.
    """

    ids: Ids
    echo: str = ""
    offsets: tuple[int, ...] = ()
    boundaries: tuple[int, ...] = ()
    form: Form = PLAIN
    constraint: Constraint | None = None
    spans: tuple[Span, ...] = ()


def chat_prompts(model: ModelPort, body: ChatBody) -> list[Prompt]:
    """Render and encode the messages: one prompt. Raises BadRequest, ContextLengthExceeded."""
    tokenizer = model.tokenizer
    text, shown = _read_chat(model, body)
    ids = _encoded(model, _expanded(model, text, shown), "messages", special=False)
    starts = boundaries(tokenizer, ids)
    native, single = has_native_tools(tokenizer), not body.parallel_tool_calls
    form = form_of(tokenizer, text, body.callable_tools, native=native, single=single)
    form, constraint = shaped(model, body, text, form, native=native)
    spans = model.reader.spans(ids, shown) if model.reader is not None and shown else ()
    return [Prompt(ids, boundaries=starts, form=form, constraint=constraint, spans=spans)]


def full_text(model: ModelPort, body: ChatBody) -> str:
    """What is encoded: `chat_text` with what stands for each picture. Raises BadRequest."""
    return _expanded(model, *_read_chat(model, body))


def chat_text(model: ModelPort, body: ChatBody) -> str:
    """The messages as the model's own template writes them; tools in words where it cannot. Raises BadRequest."""
    return _rendered(model, body)[0]


def _read_chat(model: ModelPort, body: ChatBody) -> tuple[str, list[Any]]:
    """The rendered messages, and their pictures."""
    text, refs = _rendered(model, body)
    return text, [] if model.reader is None else [model.reader.read(ref.url, ref.param, ref.low) for ref in refs]


def _expanded(model: ModelPort, text: str, shown: Sequence[Any]) -> str:
    return text if model.reader is None or not shown else expanded(text, model.reader.marker, [s.text for s in shown])


def sightless(model: ModelPort) -> str | None:
    """Why the model cannot see images; None if it can."""
    if model.reader is not None:
        return None
    return BLIND if model.caps.vision is None else model.caps.vision.why


def _rendered(model: ModelPort, body: ChatBody) -> tuple[str, list[ImageRef]]:
    tokenizer, tools = model.tokenizer, body.callable_tools
    effort = template_effort(str(tokenizer.chat_template or ""), body.reasoning_effort)
    variables = effort | check_kwargs(body.chat_template_kwargs)
    messages = without_attribution(normalise(body.messages, blind=sightless(model)))
    native = has_native_tools(tokenizer)
    if not native:
        messages = in_words(messages, tools)
    refs = image_refs(messages)
    messages = for_template(tokenizer, messages, None if model.reader is None else model.reader.marker)
    return render(tokenizer, messages, tools if native else None, model=model.name, **variables), refs


def has_native_tools(tokenizer: Any) -> bool:
    """Whether the template takes tools and teaches a format of calls that is known here."""
    return takes_tools(tokenizer) and writes_calls(tokenizer)


def completion_prompts(model: ModelPort, body: CompletionBody) -> list[Prompt]:
    """Encode each prompt; token ids are taken as they are. Raises BadRequest, ContextLengthExceeded."""
    constraint = constraint_of(body)
    return [replace(_completion_prompt(model, prompt, body), constraint=constraint) for prompt in body.prompt]


def _completion_prompt(model: ModelPort, prompt: str | list[int], body: CompletionBody) -> Prompt:
    ids = _encoded(model, prompt, "prompt", special=True) if isinstance(prompt, str) else _checked(model, prompt)
    if not body.echo:
        return Prompt(ids)
    text, offsets = _read(model, ids)
    echo = prompt if isinstance(prompt, str) else text
    return Prompt(ids, echo, tuple(min(offset, len(echo)) for offset in offsets) if body.scores_prompt else ())


def _encoded(model: ModelPort, text: str, param: str, *, special: bool) -> Ids:
    """The ids of `text`; `special` adds what the tokenizer puts around a bare text (templates have it)."""
    refuse_hopeless(model, text, param)
    return _fitting(model, encode(model.tokenizer, text, add_special_tokens=special), param)


def refuse_hopeless(model: ModelPort, text: str, param: str) -> None:
    """Raise ContextLengthExceeded for a text far over the context after encoding little more than that.

    A whole text of megabytes may take the tokenizer many seconds, more so when it is a single "word".
    The error's count is what was seen up to there.
    """
    context = model.caps.context_length
    if len(text) <= context * CHARS_PER_TOKEN:
        return
    seen = 0
    for start in range(0, len(text), PIECE_CHARS):
        piece = text[start : start + PIECE_CHARS]
        seen += len(encoder_of(model.tokenizer).encode_in_full(piece, add_special_tokens=False))
        if seen > context * MARGIN:
            raise ContextLengthExceeded(seen, context, param=param, at_least=True)


def _checked(model: ModelPort, ids: list[int]) -> Ids:
    vocab_size = model.caps.vocab_size
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        raise BadRequest(f"prompt: token ids must lie between 0 and {vocab_size - 1}.", param="prompt")
    return _fitting(model, np.array(ids, dtype=np.int64), "prompt")


def _fitting(model: ModelPort, ids: Ids, param: str) -> Ids:
    """At least one token, and room for at least one more."""
    if len(ids) == 0:
        raise BadRequest(f"{param}: the prompt has no tokens.", param=param)
    if len(ids) >= model.caps.context_length:
        raise ContextLengthExceeded(len(ids), model.caps.context_length, param=param)
    return ids


def _read(model: ModelPort, ids: Ids) -> tuple[str, list[int]]:
    """The text of the ids, and the characters before each of them."""
    detokeniser = Detokeniser(model.tokenizer)
    parts: list[str] = []
    offsets: list[int] = []
    length = 0
    for id in ids.tolist():
        offsets.append(length)
        parts.append(detokeniser.push((id,)))
        length += len(parts[-1])
    return "".join(parts) + detokeniser.finish(), offsets
