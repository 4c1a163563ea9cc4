"""The body of `POST /v1/responses`, and the chat request that it is.

Everything that a chat request has too is checked by the chat body; errors are given the names of this route.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from treadle.api.body import generation, renamed
from treadle.api.fields import ChatBody
from treadle.api.responses_items import Item, Turns
from treadle.api.responses_tools import chat_tools
from treadle.api.unsupported import asks_nothing
from treadle.errors import BadRequest

PASSED = (
    "cache_salt",
    "chat_template_kwargs",
    "frequency_penalty",
    "guided_choice",
    "guided_grammar",
    "guided_regex",
    "kv_bits",
    "logit_bias",
    "min_p",
    "parallel_tool_calls",
    "presence_penalty",
    "prompt_cache_key",
    "prompt_cache_retention",
    "repetition_penalty",
    "safety_identifier",
    "seed",
    "service_tier",
    "speculation",
    "stop",
    "specprefill",
    "specprefill_keep_pct",
    "temperature",
    "thinking_budget",
    "timeout",
    "top_k",
    "top_p",
    "user",
)
"""Fields that mean the same in a chat request."""

HARMLESS = ("client_metadata",)  # nothing here could be done with it

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "prompt": (),
    "truncation": ("disabled",),
}
"""Not supported: accepted only with a value that asks for nothing."""

NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
"""What fields of a chat request are called here."""

LOGPROBS = "message.output_text.logprobs"  # in `include`


def _items(value: Any) -> Any:
    """`input` is a text or a list of items; a text is one user message."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError("must be a string or a list of objects")
    return value


Items = Annotated[list[dict[str, Any]], BeforeValidator(_items, json_schema_input_type=str | list[dict[str, Any]])]


class TextOptions(BaseModel):
    """`text`. The verbosity is a hint to models that were trained on it; none here was."""

    model_config = ConfigDict(strict=True, extra="forbid")

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(BaseModel):
    """`reasoning`. Only `effort` has an effect: reasoning is shown as it is, never summarised."""

    model_config = ConfigDict(strict=True, extra="forbid")

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class StreamOptions(BaseModel):
    """`stream_options`; padding is never sent."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_obfuscation: bool = False


class ResponsesBody(BaseModel):
    """`POST /v1/responses`. Further fields are those of a chat request (`PASSED`)."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    input: Items | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    include: list[str] = Field(default_factory=list)
    metadata: dict[str, str] = Field(default_factory=dict)
    max_output_tokens: int | None = Field(default=None, ge=1)
    max_tool_calls: int | None = Field(default=None, ge=1)  # of tools that a server runs; there are none here
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    text: TextOptions = Field(default_factory=TextOptions)
    reasoning: ReasoningOptions = Field(default_factory=ReasoningOptions)
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None

    @property
    def extra(self) -> dict[str, Any]:
        return self.model_extra or {}


def refuse_unknown(body: ResponsesBody) -> None:
    """Raise BadRequest for the first field that would change the answer and is not built."""
    for name, value in body.extra.items():
        if name in PASSED or name in HARMLESS or asks_nothing(value, NEUTRAL.get(name, ())):
            continue
        if name in NEUTRAL:
            raise BadRequest(f"{name} is not supported.", param=name, code="unsupported_parameter")
        raise BadRequest(f"Unknown parameter: {name[:100]!r}.", param=name[:100], code="unknown_parameter")
    if body.input is None and body.previous_response_id is None and body.instructions is None:
        raise BadRequest("input: Field required.", param="input")


def conversation(body: ResponsesBody, history: Sequence[Item]) -> Turns:
    """The messages of the instructions, the stored items and the new ones, in this order. Raises BadRequest."""
    turns = Turns()
    if body.instructions:
        turns.say("system", body.instructions, "instructions")
    for item in history:
        turns.add(item, "previous_response_id")
    for index, item in enumerate(body.input or ()):
        turns.add(item, f"input[{index}]")
    turns.settle()
    return turns


def chat_request(body: ResponsesBody, turns: Turns) -> ChatBody:
    """The chat request that gives this response. Raises BadRequest."""
    values: dict[str, Any] = {name: body.extra[name] for name in PASSED if name in body.extra}
    values |= {"messages": turns.messages, "stream": body.stream, **chat_tools(body.tools, body.tool_choice)}
    optional = {
        "model": body.model,
        "max_completion_tokens": body.max_output_tokens,
        "reasoning_effort": body.reasoning.effort,
        "response_format": response_format(body.text.format),
    }
    values |= {name: value for name, value in optional.items() if value is not None}
    if body.top_logprobs is not None or LOGPROBS in body.include:
        values |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    with renamed(names_of(turns)):
        return generation(values, ChatBody)


def response_format(format: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """`text.format` as chat's `response_format`, which has the schema one level deeper."""
    if format is None or format.get("type") == "text":
        return None
    if format.get("type") != "json_schema":
        return dict(format)
    schema = {name: value for name, value in format.items() if name != "type" and value is not None}
    return {"type": "json_schema", "json_schema": schema}


def names_of(turns: Turns) -> Callable[[str], str]:
    """What a chat request's fields are called here, for `body.renamed`."""
    return lambda param: client_name(param, turns)


def client_name(param: str, turns: Turns) -> str:
    """`messages[1].content` as `input[0].content`, `response_format.json_schema.schema` as `text.format.schema`."""
    message = re.fullmatch(r"messages\[(\d+)\](.*)", param)
    if message is not None:
        return turns.origins[int(message[1])] + message[2]
    first, dot, rest = param.replace("response_format.json_schema", "response_format").partition(".")
    return NAMES.get(first, first) + dot + rest
