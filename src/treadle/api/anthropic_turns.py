"""Anthropic's messages as chat messages.

Rules: neighbours of one role are one turn, and `system` comes before the messages as one. Texts of a turn are
joined by a line break. The results of tools come before the text of their turn. Thinking goes where the chat
template reads the reasoning of earlier turns; a redacted one is dropped. A turn of the assistant without text
and calls says nothing and is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from treadle.errors import BadRequest
from treadle.prompt.conversation import ImageRef

Message = dict[str, Any]

ROLES = ("user", "assistant", "system")
JOINT = "\n"
SOURCES = {"base64": "data", "url": "url"}
"""Of images, and the field that each has."""
ERROR = "Error: "  # before the result of a tool that failed
MAX_SHOWN = 100  # characters of a wrong value in a message about it


def content(parts: Sequence[str | ImageRef]) -> str | list[Any]:
    """Chat's content: text, or with images a list of parts in the same order."""
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        return JOINT.join(texts)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


@dataclass(slots=True)
class Turn:
    """What one role said until the other did."""

    role: str
    texts: list[str | ImageRef] = field(default_factory=list)
    thinking: list[str] = field(default_factory=list)
    calls: list[Message] = field(default_factory=list)
    results: list[Message] = field(default_factory=list)

    def messages(self) -> Iterator[Message]:
        """The chat messages of this turn, in their order."""
        yield from self.results
        message: Message = {"role": self.role, "content": content(self.texts)}
        if self.thinking:
            message["reasoning_content"] = JOINT.join(self.thinking)
        if self.calls:
            message["tool_calls"] = self.calls
        if any(self.texts) or self.calls or (self.role == "user" and not self.results):
            yield message


def chat_messages(system: str | Sequence[Any], messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The whole conversation. Raises BadRequest naming the field: a wrong role, a block that cannot be read,
    nothing in any message."""
    turns: list[Turn] = []
    for message, param in _located(system, messages):
        role = message.get("role")
        if role not in ROLES:
            raise BadRequest(
                f"A message's role must be one of {', '.join(ROLES)}, not {str(role)[:MAX_SHOWN]!r}.",
                param=f"{param}.role",
            )
        if not turns or turns[-1].role != role:
            turns.append(Turn(role))
        _read(turns[-1], message.get("content"), "system" if param == "system" else f"{param}.content")
    made = [message for turn in turns for message in turn.messages()]
    if not made:
        raise BadRequest("No message says anything.", param="messages")
    return made


def _located(
    system: str | Sequence[Any], messages: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Every message with the name of its place, `system` first."""
    if system:
        yield {"role": "system", "content": system}, "system"
    for index, message in enumerate(messages):
        yield message, f"messages[{index}]"


def _read(turn: Turn, content: Any, param: str) -> None:
    if isinstance(content, str):
        turn.texts.append(content)
        return
    if not isinstance(content, list):
        raise BadRequest("The content of a message must be text or a list of blocks.", param=param)
    for index, block in enumerate(content):
        place = f"{param}[{index}]"
        READERS[_kind(block, KINDS[turn.role], place)](turn, block, place)


def _kind(block: Any, known: Sequence[str], param: str) -> str:
    """The block's type, if it is one of `known`."""
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind not in known:
        raise BadRequest(
            f"A block here must be one of {', '.join(known)}, not {str(kind)[:MAX_SHOWN]!r}.", param=f"{param}.type"
        )
    return str(kind)


def _string(block: Mapping[str, Any], key: str, param: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise BadRequest(f"A {block['type']} block must have a string here.", param=f"{param}.{key}")
    return value


def _text(turn: Turn, block: Mapping[str, Any], param: str) -> None:
    turn.texts.append(_string(block, "text", param))


def _image(turn: Turn, block: Mapping[str, Any], param: str) -> None:
    turn.texts.append(_ref(block, param))


def _ref(block: Mapping[str, Any], param: str) -> ImageRef:
    """An image by its data or by its URL."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else None
    if not isinstance(source, Mapping) or not isinstance(kind, str) or kind not in SOURCES:
        raise BadRequest(f"An image's source must be of the type {' or '.join(SOURCES)}.", param=f"{param}.source")
    name = SOURCES[kind]
    value = source.get(name)
    if not isinstance(value, str):
        raise BadRequest("An image's source must have a string here.", param=f"{param}.source.{name}")
    return ImageRef(f"data:;base64,{value}" if kind == "base64" else value, param)


def _thinking(turn: Turn, block: Mapping[str, Any], param: str) -> None:
    thought = _string(block, "thinking", param)
    if thought:
        turn.thinking.append(thought)


def _redacted(turn: Turn, block: Mapping[str, Any], param: str) -> None:
    """Its text is nobody's but the server's that made it."""


def _tool_use(turn: Turn, block: Mapping[str, Any], param: str) -> None:
    arguments = block.get("input", {})
    if not isinstance(arguments, Mapping):
        raise BadRequest("The input of a tool must be an object.", param=f"{param}.input")
    function = {"name": _string(block, "name", param), "arguments": dict(arguments)}
    turn.calls.append({"id": _string(block, "id", param), "type": "function", "function": function})


def _tool_result(turn: Turn, block: Mapping[str, Any], param: str) -> None:
    parts = _result(block.get("content"), f"{param}.content")
    if block.get("is_error") is True:
        parts = [ERROR + parts[0], *parts[1:]] if parts and isinstance(parts[0], str) else [ERROR, *parts]
    id = _string(block, "tool_use_id", param)
    turn.results.append({"role": "tool", "tool_call_id": id, "content": content(parts)})


def _result(content: Any, param: str) -> list[str | ImageRef]:
    """A result is text, a list of blocks of text and images, or nothing."""
    if content is None or isinstance(content, str):
        return [content or ""]
    if not isinstance(content, list):
        raise BadRequest("The content of a tool result must be text or a list of blocks.", param=param)
    parts: list[str | ImageRef] = []
    for index, block in enumerate(content):
        place = f"{param}[{index}]"
        kind = _kind(block, ("text", "image"), place)
        parts.append(_ref(block, place) if kind == "image" else _string(block, "text", place))
    return parts


READERS: Mapping[str, Callable[[Turn, Mapping[str, Any], str], None]] = {
    "text": _text,
    "image": _image,
    "thinking": _thinking,
    "redacted_thinking": _redacted,
    "tool_use": _tool_use,
    "tool_result": _tool_result,
}
KINDS: Mapping[str, Sequence[str]] = {
    "system": ("text",),
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}
