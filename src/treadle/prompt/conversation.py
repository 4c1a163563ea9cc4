"""A client's chat messages as the plain dicts that chat templates read.

Rules: `developer` is `system`; `function` is `tool`. Content becomes one string: parts are joined by a line
break, null or missing content of an assistant or tool message is "". Tool-call arguments become objects with
the client's key order; arguments that are not a JSON object stay the string they were. A tool result without a
name gets that of the call that it answers. Unknown keys of a message are dropped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from treadle.errors import BadRequest

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
MAY_BE_EMPTY = ("assistant", "tool")
KEPT = ("name", "tool_call_id", "reasoning_content", "reasoning")
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
IMAGE_PARTS = ("image_url", "image", "input_image")
MAX_SHOWN = 100  # characters of a wrong value in a message about it

Message = dict[str, Any]


def normalise(messages: Sequence[Mapping[str, Any]], *, param: str = "messages") -> list[Message]:
    """Plain messages {role, content: str, ...} for a template. Nothing of the input is changed.

    Raises BadRequest naming the field: no messages, an unknown role, a part that the model cannot read.
    """
    if not messages:
        raise BadRequest("There must be at least one message.", param=param)
    return _named([_message(message, f"{param}[{index}]") for index, message in enumerate(messages)])


def _named(messages: list[Message]) -> list[Message]:
    """Tool results with the name of the function that was called: some templates write it."""
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    names = {str(call["id"]): call["function"]["name"] for call in calls if "id" in call}
    for message in messages:
        id = str(message.get("tool_call_id"))
        if message["role"] == "tool" and "name" not in message and id in names:
            message["name"] = names[id]
    return messages


def _message(message: Mapping[str, Any], param: str) -> Message:
    given = message.get("role")
    role = ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        raise BadRequest(
            f"A message's role must be one of {', '.join(ROLES)}, not {str(given)[:MAX_SHOWN]!r}.",
            param=f"{param}.role",
        )
    plain: Message = {"role": role, "content": _content(message.get("content"), role, f"{param}.content")}
    plain |= {key: message[key] for key in KEPT if message.get(key) is not None}
    calls = _calls(message, param)
    if calls:
        plain["tool_calls"] = calls
    return plain


def _content(content: Any, role: str, param: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role in MAY_BE_EMPTY:
        return ""
    if not isinstance(content, list):
        raise BadRequest(f"The content of a {role} message must be text or a list of parts.", param=param)
    return "\n".join([_part(part, f"{param}[{index}]") for index, part in enumerate(content)])


def _part(part: Any, param: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in IMAGE_PARTS:
        raise BadRequest("This model cannot see images.", param=param)
    if not isinstance(part, Mapping) or not isinstance(kind, str) or kind not in TEXT_PARTS:
        raise BadRequest(
            f"This model cannot read content parts of type {str(kind)[:MAX_SHOWN]!r}.", param=f"{param}.type"
        )
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise BadRequest("A text part must have text.", param=f"{param}.{TEXT_PARTS[kind]}")
    return text


def _calls(message: Mapping[str, Any], param: str) -> list[Message]:
    given = message.get("tool_calls")
    if not isinstance(given, list | tuple | None):
        raise BadRequest("The tool calls of a message must be a list.", param=f"{param}.tool_calls")
    calls = list(given or ())
    if message.get("function_call") is not None:
        calls.append({"function": message["function_call"]})
    return [_call(call, f"{param}.tool_calls[{index}]") for index, call in enumerate(calls)]


def _call(call: Any, param: str) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRequest("A tool call must have a function with a name.", param=f"{param}.function")
    body = {"name": function["name"], "arguments": _arguments(function.get("arguments"))}
    named = {"id": call["id"]} if call.get("id") is not None else {}
    return {**named, "type": "function", "function": body}


def _arguments(arguments: Any) -> Any:
    """JSON text of an object -> that object; absent -> {}; anything else unchanged."""
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
