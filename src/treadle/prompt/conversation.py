"""A client's chat messages as the plain dicts that chat templates read.

Rules: `developer` is `system`; `function` is `tool`. Content becomes one string: parts are joined by a line
break, null or missing content of an assistant or tool message is ""; only with images among its parts it stays
a list. Tool-call arguments become objects with the client's key order; arguments that are not a JSON object stay
the string they were. A tool result without a name gets that of the call that it answers. Unknown keys of a
message are dropped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
SHOWING = ("user", "tool")  # roles whose messages may have images
MAY_BE_EMPTY = ("assistant", "tool")
KEPT = ("name", "tool_call_id", "reasoning_content", "reasoning")
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
IMAGE_PARTS = ("image_url", "image", "input_image")
DETAILS = ("auto", "low", "high", "original")
BLIND = "This model cannot see images."
MAX_SHOWN = 100  # characters of a wrong value in a message about it
MAX_DEPTH = 100  # levels of arguments that templates write by recursion

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ImageRef:
    """An image in a message: where it is to be had, and the client's name for its place. `low`: in few pixels."""

    url: str
    param: str
    low: bool = False


def normalise(
    messages: Sequence[Mapping[str, Any]], *, param: str = "messages", blind: str | None = BLIND
) -> list[Message]:
    """Plain messages {role, content: str, ...} for a template. Nothing of the input is changed.

    `blind`: why images cannot be read. Without a reason a content with images is a list of parts: {type: text, text}
    and {type: image, image: ImageRef}.

    Raises BadRequest naming the field: no messages, an unknown role, a part that the model cannot read.
    """
    if not messages:
        raise BadRequest("There must be at least one message.", param=param)
    return _named([_message(message, f"{param}[{index}]", blind) for index, message in enumerate(messages)])


def _named(messages: list[Message]) -> list[Message]:
    """Tool results with the name of the function that was called: some templates write it."""
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    names = {call["id"]: call["function"]["name"] for call in calls if "id" in call}
    for message in messages:
        id = message.get("tool_call_id")
        if message["role"] == "tool" and "name" not in message and id in names:
            message["name"] = names[id]
    return messages


def _message(message: Mapping[str, Any], param: str, blind: str | None) -> Message:
    given = message.get("role")
    role = ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        raise BadRequest(
            f"A message's role must be one of {', '.join(ROLES)}, not {str(given)[:MAX_SHOWN]!r}.",
            param=f"{param}.role",
        )
    plain: Message = {"role": role, "content": _content(message.get("content"), role, f"{param}.content", blind)}
    for key in KEPT:
        if message.get(key) is not None:
            plain[key] = _text(message, key, param)
    calls = _calls(message, param)
    if calls:
        plain["tool_calls"] = calls
    return plain


def _text(owner: Mapping[str, Any], key: str, param: str) -> str:
    value = owner[key]
    if not isinstance(value, str):
        raise BadRequest(f"This must be text, not {str(value)[:MAX_SHOWN]!r}.", param=f"{param}.{key}")
    return value


def _content(content: Any, role: str, param: str, blind: str | None) -> str | list[Message]:
    if isinstance(content, str):
        return content
    if content is None and role in MAY_BE_EMPTY:
        return ""
    if not isinstance(content, list):
        raise BadRequest(f"The content of a {role} message must be text or a list of parts.", param=param)
    parts = [_part(part, role, f"{param}[{index}]", blind) for index, part in enumerate(content)]
    if all(isinstance(part, str) for part in parts):
        return "\n".join(map(str, parts))
    made: list[Message] = []
    for part in parts:
        if isinstance(part, ImageRef):
            made.append({"type": "image", "image": part})
        elif made and made[-1]["type"] == "text":
            made[-1]["text"] += f"\n{part}"
        else:
            made.append({"type": "text", "text": part})
    return made


def _part(part: Any, role: str, param: str, blind: str | None) -> str | ImageRef:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if is_image(part):
        param = part.param if isinstance(part, ImageRef) else param
        if blind is not None:
            raise BadRequest(blind, param=param)
        if role not in SHOWING:
            raise BadRequest(f"Images belong to messages of {' and '.join(SHOWING)}, not of {role}.", param=param)
        return part if isinstance(part, ImageRef) else _image(part, param)
    if not isinstance(part, Mapping) or not isinstance(kind, str) or kind not in TEXT_PARTS:
        raise BadRequest(
            f"This model cannot read content parts of type {str(kind)[:MAX_SHOWN]!r}.", param=f"{param}.type"
        )
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise BadRequest("A text part must have text.", param=f"{param}.{TEXT_PARTS[kind]}")
    return text


def is_image(part: Any) -> bool:
    """Whether a part of a content is an image in any of the shapes that clients send."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return isinstance(part, ImageRef) or (isinstance(kind, str) and kind in IMAGE_PARTS)


def _image(part: Mapping[str, Any], param: str) -> ImageRef:
    """The shapes of chat (`image_url` with an object), of Responses (with a string), and `image` with either."""
    name = next((key for key in ("image_url", "image", "url") if part.get(key) is not None), "image_url")
    value = part.get(name)
    url, owner = (value.get("url"), value) if isinstance(value, Mapping) else (value, part)
    if not isinstance(url, str):
        raise BadRequest("An image part must have a URL.", param=f"{param}.{name}")
    detail = owner.get("detail") or "auto"
    if detail not in DETAILS:
        raise BadRequest(f"An image's detail must be one of {', '.join(DETAILS)}.", param=f"{param}.{name}.detail")
    return ImageRef(url, param, detail == "low")


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
    named = {"id": _text(call, "id", param)} if call.get("id") is not None else {}
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
    return parsed if isinstance(parsed, dict) and not deeper(parsed, MAX_DEPTH) else arguments


def deeper(value: Any, most: int) -> bool:
    """Whether lists and objects are nested more than `most` levels deep; a walk level by level, for any depth."""
    level = [value]
    for _ in range(most + 1):
        level = [node for node in level if isinstance(node, dict | list)]
        if not level:
            return False
        level = [item for node in level for item in (node.values() if isinstance(node, dict) else node)]
    return True
