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

Message = dict[str, Any]

ROLES = ("user", "assistant", "system")
JOINT = "\n"
ERROR = "Error: "  # before the result of a tool that failed
MAX_SHOWN = 100  # characters of a wrong value in a message about it


@dataclass(slots=True)
class Turn:
    """What one role said until the other did."""

    role: str
    texts: list[str] = field(default_factory=list)
    thinking: list[str] = field(default_factory=list)
    calls: list[Message] = field(default_factory=list)
    results: list[Message] = field(default_factory=list)

    def messages(self) -> Iterator[Message]:
        """The chat messages of this turn, in their order."""
        yield from self.results
        message: Message = {"role": self.role, "content": JOINT.join(self.texts)}
        if self.thinking:
            message["reasoning_content"] = JOINT.join(self.thinking)
        if self.calls:
            message["tool_calls"] = self.calls
        if any(self.texts) or self.calls or (self.role == "user" and not self.results):
            yield message


def chat_messages(system: str | Sequence[Any], messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The whole conversation. Raises BadRequest naming the field: a wrong role, a block that cannot be read."""
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
    return [message for turn in turns for message in turn.messages()]


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
    if kind == "image":
        raise BadRequest("This model cannot see images.", param=param)
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
    text = _result(block.get("content"), f"{param}.content")
    if block.get("is_error") is True:
        text = ERROR + text
    turn.results.append({"role": "tool", "tool_call_id": _string(block, "tool_use_id", param), "content": text})


def _result(content: Any, param: str) -> str:
    """A result is text, a list of text blocks, or nothing."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise BadRequest("The content of a tool result must be text or a list of blocks.", param=param)
    texts: list[str] = []
    for index, block in enumerate(content):
        place = f"{param}[{index}]"
        _kind(block, ("text",), place)
        texts.append(_string(block, "text", place))
    return JOINT.join(texts)


READERS: Mapping[str, Callable[[Turn, Mapping[str, Any], str], None]] = {
    "text": _text,
    "thinking": _thinking,
    "redacted_thinking": _redacted,
    "tool_use": _tool_use,
    "tool_result": _tool_result,
}
KINDS: Mapping[str, Sequence[str]] = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}
