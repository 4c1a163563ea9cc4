"""An Anthropic request as a chat request: from there on both take one path."""

from __future__ import annotations

from typing import Any

from treadle.api.anthropic_fields import CountBody, Thinking, Tool, ToolChoice
from treadle.api.anthropic_turns import chat_messages
from treadle.api.body import generation, renamed
from treadle.api.context import Context
from treadle.api.fields import ChatBody
from treadle.api.ports import SlotPort
from treadle.errors import BadRequest, ModelNotFound

ALIAS = "claude-"  # clients ask for several such models by name, all of them at this address
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
EFFORTS = {"max": "xhigh"}
NAMES = {
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "thinking_budget": "thinking.budget_tokens",
}
"""What fields of a chat request are called here."""
SAME = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "timeout",
    "cache_salt",
    "speculation",
    "kv_bits",
    "specprefill",
    "specprefill_keep_pct",
    "stream",
    "chat_template_kwargs",
)


def served_model(here: Context, name: str | None) -> SlotPort:
    """The model by its names; any other `claude-*`, or no name, is the default one. Raises ModelNotFound."""
    try:
        return here.engine.find(name)
    except ModelNotFound:
        if name is None or not name.startswith(ALIAS):
            raise
        return here.engine.find(None)


def chat_body(body: CountBody) -> ChatBody:
    """The same request in the chat route's terms, checked as one. Raises BadRequest naming the field."""
    body.refuse_unknown()
    values: dict[str, Any] = {name: getattr(body, name) for name in SAME}
    values |= {
        "messages": chat_messages(body.system, body.messages),
        "stop": body.stop_sequences,
        "reasoning_effort": chat_effort(body.thinking, body.output_config.effort),
        "thinking_budget": None if body.thinking is None else body.thinking.budget,
        "tools": [chat_tool(tool) for tool in body.tools],
        "tool_choice": None if body.tool_choice is None else chat_choice(body.tool_choice),
        "response_format": None if body.output_config.format is None else chat_format(body.output_config.format),
    }
    if body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use:
        values["parallel_tool_calls"] = False
    with renamed(client_name):
        return generation({name: value for name, value in values.items() if value not in (None, [])}, ChatBody)


def client_name(param: str) -> str:
    """What a chat request's field is called here."""
    first, dot, rest = param.replace("response_format.json_schema", "response_format").partition(".")
    return NAMES.get(first, first) + dot + rest


def chat_effort(thinking: Thinking | None, effort: str | None) -> str | None:
    """Thinking as `reasoning_effort`, which finds the template's switch; None leaves it to the template."""
    if thinking is None:
        return None
    if thinking.type == "disabled":
        return "none"
    return EFFORTS.get(effort, effort) if effort is not None else "medium"


def chat_tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def chat_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return CHOICES[choice.type]


def chat_format(format: dict[str, Any]) -> dict[str, Any]:
    """`output_config.format` as `response_format`. Raises BadRequest for anything but a JSON schema."""
    if format.get("type") != "json_schema" or not isinstance(format.get("schema"), dict):
        raise BadRequest(
            "The output format must be {type: 'json_schema', schema: {...}}.", param="output_config.format"
        )
    schema = {"name": "output", "schema": format["schema"], "strict": True}
    return {"type": "json_schema", "json_schema": schema}
