"""From a request body to prompt ids. Runs in the prompt threads, never on the event loop."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treadle.api.fields import ChatBody, CompletionBody
from treadle.api.ports import ModelPort
from treadle.errors import BadRequest, ContextLengthExceeded
from treadle.output.detokenise import Detokeniser
from treadle.output.form import Form
from treadle.prompt.conversation import normalise
from treadle.prompt.history import without_attribution
from treadle.prompt.template import check_kwargs, render
from treadle.prompt.tokenise import encode, encoder_of
from treadle.prompt.turns import boundaries
from treadle.types import Ids

CHARS_PER_TOKEN = 8  # a text with more characters than this per token of context is counted in pieces first
PIECE_CHARS = 16_384
PLAIN = Form()
MARGIN = 1.25  # a cut adds a few tokens, so only what is over by this much is over for certain


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt for the engine, where its messages start, and its text where the reply must repeat it.

    `form`: what its replies may consist of beside text.
    """

    ids: Ids
    echo: str = ""
    boundaries: tuple[int, ...] = ()
    form: Form = PLAIN


def chat_prompts(model: ModelPort, body: ChatBody) -> list[Prompt]:
    """Render and encode the messages: one prompt. Raises BadRequest, ContextLengthExceeded."""
    ids = _encoded(model, chat_text(model, body), "messages", special=False)
    return [Prompt(ids, boundaries=boundaries(model.tokenizer, ids))]


def chat_text(model: ModelPort, body: ChatBody) -> str:
    """The messages as the model's own template writes them. Raises BadRequest."""
    variables = check_kwargs(body.chat_template_kwargs)
    messages = without_attribution(normalise(body.messages))
    return render(model.tokenizer, messages, model=model.name, **variables)


def completion_prompts(model: ModelPort, body: CompletionBody) -> list[Prompt]:
    """Encode each prompt; token ids are taken as they are. Raises BadRequest, ContextLengthExceeded."""
    return [_completion_prompt(model, prompt, body.echo) for prompt in body.prompt]


def _completion_prompt(model: ModelPort, prompt: str | list[int], echo: bool) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(_encoded(model, prompt, "prompt", special=True), prompt if echo else "")
    ids = _checked(model, prompt)
    return Prompt(ids, _text(model, prompt) if echo else "")


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


def _text(model: ModelPort, ids: list[int]) -> str:
    detokeniser = Detokeniser(model.tokenizer)
    return detokeniser.push(ids) + detokeniser.finish()
