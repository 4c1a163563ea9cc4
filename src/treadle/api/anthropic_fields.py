"""The bodies of Anthropic's routes as pydantic models: types and ranges, and which names are known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from treadle.api.fields import MAX_STOPS, Number
from treadle.api.kv import KvBits
from treadle.api.unsupported import asks_nothing
from treadle.errors import BadRequest

Block = dict[str, Any]

HARMLESS = frozenset(
    {
        "anthropic_beta",
        "anthropic_version",
        "betas",
        "cache_control",
        "context_management",
        "diagnostics",
        "inference_geo",
        "metadata",
        "service_tier",
        "speed",
        "user_profile_id",
    }
)
"""Accepted with any value: they are about billing, routing and caching, or trim what the client sent anyway."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {"mcp_servers": ([],), "fallbacks": ([],)}
"""Known but not built: accepted only with a value that asks for nothing."""


def _blocks(value: Any) -> Any:
    """`system` is text or a list of blocks."""
    if not isinstance(value, str) and not (isinstance(value, list) and all(isinstance(b, dict) for b in value)):
        raise ValueError("must be a string or a list of blocks")
    return value


Blocks = Annotated[str | list[Block], BeforeValidator(_blocks, json_schema_input_type=str | list[Block])]
StopSequence = Annotated[str, Field(min_length=1)]


class Part(BaseModel):
    """A nested object of a body. Names beyond its own are refused."""

    model_config = ConfigDict(strict=True, extra="forbid")


class Thinking(Part):
    """`thinking`. `display` may leave the text out."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=1)
    display: Literal["summarized", "omitted"] | None = None

    @property
    def budget(self) -> int | None:
        """Most tokens of thinking."""
        return None if self.type == "disabled" else self.budget_tokens

    @property
    def omitted(self) -> bool:
        return self.display == "omitted"


class ToolChoice(Part):
    """`tool_choice`; `name` is that of a `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _a_tool_has_a_name(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("a choice of type 'tool' needs a name, the others have none")
        return self


class Tool(Part):
    """A tool that the client runs. What only tunes a hosted service may be there and has no effect."""

    name: str = Field(min_length=1)
    input_schema: dict[str, Any]
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    allowed_callers: Any = None
    cache_control: Any = None
    defer_loading: Any = None
    eager_input_streaming: Any = None
    input_examples: Any = None

    @model_validator(mode="before")
    @classmethod
    def _is_custom(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("type") not in (None, "custom"):
            raise ValueError(f"tools of type {str(value['type'])[:100]!r} are not supported, only custom ones")
        return value


class OutputConfig(Part):
    """`output_config`: the effort is a wish, the format a promise."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None


class CountBody(BaseModel):
    """`POST /v1/messages/count_tokens`: a request that is only counted, so nothing else is needed."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    messages: list[dict[str, Any]] = Field(min_length=1)
    system: Blocks = Field(default_factory=list)
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = Field(default_factory=OutputConfig)
    max_tokens: int | None = Field(default=None, ge=1)
    stop_sequences: list[StopSequence] = Field(default_factory=list, max_length=MAX_STOPS)
    stream: bool = False
    temperature: Number | None = Field(default=None, ge=0, le=2)
    top_p: Number | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    # Not Anthropic's: the same as in chat.
    seed: int | None = None
    timeout: Number | None = Field(default=None, gt=0)
    cache_salt: str = Field(default="", max_length=256)
    speculation: bool = True
    kv_bits: KvBits = None
    specprefill: bool | None = None
    specprefill_keep_pct: Number | None = Field(default=None, gt=0, le=1)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def refuse_unknown(self) -> None:
        """Raise BadRequest for the first name that would change the answer and means nothing here."""
        for name, value in (self.model_extra or {}).items():
            if name in HARMLESS or asks_nothing(value, NEUTRAL.get(name, ())):
                continue
            if name in NEUTRAL:
                raise BadRequest(f"{name} is not supported.", param=name)
            raise BadRequest(f"Unknown parameter: {name[:100]!r}.", param=name[:100])


class MessagesBody(CountBody):
    """`POST /v1/messages`."""

    max_tokens: int = Field(ge=1)
