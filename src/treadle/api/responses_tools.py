"""Tools of the Responses API as those of a chat request.

Coding agents offer kinds of tools that only OpenAI's own servers run (web search, shells, free-form text).
Those are left out, so the model never hears of them; the functions beside them work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treadle.errors import BadRequest

FIELDS = ("name", "description", "parameters", "strict")
MODES = ("none", "auto", "required")


def functions(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The function tools, with the fields that a model is shown. Raises BadRequest for one without a name."""
    found = []
    for index, tool in enumerate(tools):
        kind = tool.get("type")
        if not isinstance(kind, str):
            raise BadRequest("A tool must have a type.", param=f"tools[{index}].type")
        if kind != "function":
            continue
        if not isinstance(tool.get("name"), str) or not tool["name"]:
            raise BadRequest("A function must have a name.", param=f"tools[{index}].name")
        found.append({name: tool[name] for name in FIELDS if tool.get(name) is not None})
    return found


def chat_tools(tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """`tools` and `tool_choice` of the chat request; neither where nothing is offered. Raises BadRequest."""
    offered = functions(tools)
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        offered = [tool for tool in offered if tool["name"] in allowed_names(choice)]
        choice = choice.get("mode", "auto")
    chosen = chat_choice(choice)
    if not offered and chosen in (None, "none", "auto"):
        return {}
    wrapped = [{"type": "function", "function": tool} for tool in offered]
    return {"tools": wrapped} if chosen is None else {"tools": wrapped, "tool_choice": chosen}


def chat_choice(choice: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    """A mode, or one function by its name."""
    if choice is None or choice in MODES:
        return choice if isinstance(choice, str) else None
    if isinstance(choice, Mapping) and choice.get("type") == "function" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}
    raise BadRequest(
        "tool_choice must be none, auto, required, a function by name or allowed_tools.", param="tool_choice"
    )


def allowed_names(choice: Mapping[str, Any]) -> list[Any]:
    """The functions that an `allowed_tools` choice leaves."""
    tools = choice.get("tools")
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise BadRequest("allowed_tools must have a list of tools.", param="tool_choice.tools")
    return [tool.get("name") for tool in tools if tool.get("type") == "function"]


def shown(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A function tool as a response repeats it."""
    return {"type": "function", "description": None, "parameters": None, "strict": None, **tool}
