"""The request bodies as pydantic models: types and ranges, nothing that needs a loaded model.

A top-level `null` counts as absent (see `body.parse`), so no field here takes None from the wire.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from treadle.api.grammar import ConstrainedBody
from treadle.api.kv import KvBits
from treadle.output.reasoning import SWITCHES
from treadle.prompt.conversation import is_image

MAX_STOPS = 16
MAX_STOP_CHARS = 1000
MAX_CHOICES = 128
MAX_BIAS = 100.0
TOOL_CHOICES = ("none", "auto", "required")

Message = dict[str, Any]


def _stops(value: Any) -> Any:
    """`stop` is a string or a list of them; empty ones would match everywhere."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"takes at most {MAX_STOPS} strings, not {len(stops)}")
    if "" in stops:
        raise ValueError("must not contain an empty string")
    if any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"takes strings of at most {MAX_STOP_CHARS} characters")
    return stops


def _bias(value: Any) -> Any:
    """`logit_bias` has token ids as JSON keys; they are checked against the vocabulary later."""
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and numbers")
    bias: dict[int, float] = {}
    for key, amount in value.items():
        if not re.fullmatch(r"0|[1-9][0-9]*", key):
            raise ValueError(f"has the key {key[:40]!r}, which is not a token id")
        if not isinstance(amount, int | float) or isinstance(amount, bool):
            raise ValueError(f"has a value for token {key[:40]} that is not a number")
        if not -MAX_BIAS <= amount <= MAX_BIAS:
            raise ValueError(f"has a value for token {key[:40]} outside -100..100")
        bias[int(key[:20])] = float(amount)  # longer ids are beyond every vocabulary all the same
    return bias


def is_id(value: Any) -> bool:
    """Whether it is a whole number, as a token id is; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def _prompts(value: Any) -> Any:
    """Legacy `prompt`: text, token ids, or a list of either, as a list of prompts."""
    prompts = [value] if isinstance(value, str) or (isinstance(value, list) and all(map(is_id, value))) else value
    if not isinstance(prompts, list) or not prompts:
        raise ValueError("must be a string, a list of token ids, or a non-empty list of either")
    for prompt in prompts:
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(map(is_id, prompt))):
            raise ValueError("must be a string, a list of token ids, or a non-empty list of either")
    return prompts


def _tools(value: Any) -> Any:
    """`tools` stay as they were sent, for the template writes them in the client's key order."""
    if not isinstance(value, list):
        raise ValueError("must be a list of functions")
    seen: dict[str, Any] = {}
    for index, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            raise ValueError(f"has an item ({index}) that is not a function")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise ValueError(f"has a function ({index}) without a name")
        if not isinstance(function.get("parameters"), dict | None):
            raise ValueError(f"has a function ({index}) whose parameters are not a schema")
        if not isinstance(function.get("description"), str | None):
            raise ValueError(f"has a function ({index}) whose description is not text")
        if not isinstance(function.get("strict"), bool | None):
            raise ValueError(f"has a function ({index}) whose strict is not true or false")
        if seen.setdefault(function["name"], function) != function:
            raise ValueError(f"has two functions that are called {function['name'][:100]!r} and differ")
    return value


def _tool_choice(value: Any) -> Any:
    """A word, or an object with the name of a function, as that object."""
    if value in TOOL_CHOICES:
        return value
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"must be one of {', '.join(TOOL_CHOICES)}, or name a function")
    return value


Stops = Annotated[list[str], BeforeValidator(_stops, json_schema_input_type=str | list[str])]
Bias = Annotated[dict[int, float], BeforeValidator(_bias, json_schema_input_type=dict[str, float])]
Prompts = Annotated[
    list[str | list[int]],
    BeforeValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]
Tools = Annotated[list[dict[str, Any]], BeforeValidator(_tools)]
ToolChoice = Annotated[str | dict[str, Any], BeforeValidator(_tool_choice)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Number = Annotated[float, Field(allow_inf_nan=False)]


class StreamOptions(BaseModel):
    """`stream_options`; obfuscation padding is never sent, so asking for none or some is the same."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool = False
    include_obfuscation: bool = False


class GenerationBody(ConstrainedBody):
    """What both generation routes share. Unset sampling fields fall to the model's own defaults."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: Number | None = Field(default=None, ge=0, le=2)
    top_p: Number | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: Number | None = Field(default=None, ge=0, le=1)
    repetition_penalty: Number | None = Field(default=None, gt=0, le=10)
    presence_penalty: Number | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: Number | None = Field(default=None, ge=-2, le=2)
    logit_bias: Bias = Field(default_factory=dict)
    seed: int | None = None
    stop: Stops = Field(default_factory=list)
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    timeout: Number | None = Field(default=None, gt=0)
    cache_salt: str = Field(default="", max_length=256)
    speculation: bool = True
    kv_bits: KvBits = None
    specprefill: bool | None = None
    specprefill_keep_pct: Number | None = Field(default=None, gt=0, le=1)
    return_progress: bool = False

    @model_validator(mode="after")
    def _progress_needs_a_stream(self) -> Self:
        if self.return_progress and not self.stream:
            raise ValueError("return_progress needs stream to be true")
        return self

    @property
    def limit(self) -> int | None:
        """Most tokens to make; None: until the model ends or the context is full."""
        return self.max_tokens

    @property
    def num_replies(self) -> int:
        """How many sequences the request is."""
        return self.n

    @property
    def scores_prompt(self) -> bool:
        """Whether the log probabilities of the prompt's tokens are reported too."""
        return False

    @property
    def shows_images(self) -> bool:
        """Whether a message has an image."""
        return False

    @property
    def alternatives(self) -> int | None:
        """How many alternatives each token's log probability is reported with; None: no report."""
        raise NotImplementedError


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: Effort | None = None
    thinking_budget: int | None = Field(default=None, ge=0)
    tools: Tools = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _alternatives_need_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self

    @model_validator(mode="after")
    def _a_call_needs_its_tool(self) -> Self:
        if self.tool_choice not in ("none", "auto") and not self.forced_tools:
            raise ValueError("tool_choice asks for a call of a tool that is not among the tools")
        return self

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def forced_tools(self) -> list[dict[str, Any]]:
        """The tools one of which must be called; none: the model may answer in text."""
        if isinstance(self.tool_choice, str):
            return self.tools if self.tool_choice == "required" else []
        name = self.tool_choice["function"]["name"]
        return [tool for tool in self.tools if tool["function"]["name"] == name]

    @property
    def strict_names(self) -> frozenset[str]:
        """The functions whose arguments must follow their schema whenever they are called."""
        return frozenset(tool["function"]["name"] for tool in self.tools if tool["function"].get("strict"))

    @property
    def shows_images(self) -> bool:
        contents = (message.get("content") for message in self.messages)
        return any(is_image(part) for content in contents if isinstance(content, list) for part in content)

    @property
    def thinking_off(self) -> bool:
        """Whether the request itself asks for no reasoning."""
        return self.reasoning_effort == "none" or any(self.chat_template_kwargs.get(name) is False for name in SWITCHES)

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: Prompts
    max_tokens: int | None = Field(default=None, ge=0)
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=5)

    @model_validator(mode="after")
    def _something_is_made_or_echoed(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens may be 0 only if echo is true")
        return self

    @property
    def num_replies(self) -> int:
        return self.n * len(self.prompt)

    @property
    def scores_prompt(self) -> bool:
        return self.echo and self.logprobs is not None

    @property
    def alternatives(self) -> int | None:
        return self.logprobs
