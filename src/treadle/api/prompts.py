"""From a request body to prompt ids: in the prompt threads, never on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from treadle.api.context import Context
from treadle.api.fields import ChatBody, CompletionBody
from treadle.api.ports import ModelPort
from treadle.errors import BadRequest, ContextLengthExceeded
from treadle.prompt.conversation import normalise
from treadle.prompt.template import check_kwargs, render
from treadle.prompt.tokenise import decode, encode
from treadle.types import Ids

Result = TypeVar("Result")

SUSPECT_CHARS_PER_TOKEN = 8  # a text with more characters than this per token of context is counted before it is encoded
PIECE_CHARS = 16_384
MARGIN = 1.25  # cutting a text into pieces adds a few tokens; what is over by this much is over for certain


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt for the engine, and its text where the reply must repeat it."""

    ids: Ids
    echo: str = ""


async def in_thread(here: Context, work: Callable[[], Result]) -> Result:
    return await asyncio.get_running_loop().run_in_executor(here.pool, work)


def chat_prompt(model: ModelPort, body: ChatBody) -> Prompt:
    """Render and encode the messages. Raises BadRequest, ContextLengthExceeded."""
    variables = check_kwargs(body.chat_template_kwargs)
    messages = normalise(body.messages)
    text = render(model.tokenizer, messages, model=model.name, **variables)
    return Prompt(_encode(model, text, "messages", special=True))
