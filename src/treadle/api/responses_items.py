"""The items of the Responses API as chat messages.

Reasoning, text and function calls of one turn of the model are items of their own here and one assistant
message there. Instructions and the developer's messages that begin the conversation become one system
message: many templates know only one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treadle.errors import BadRequest

Item = Mapping[str, Any]
Message = dict[str, Any]

ROLES = ("user", "system", "developer", "assistant")
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
CALLS = ("function_call", "custom_tool_call")
RESULTS = ("function_call_output", "custom_tool_call_output")
SKIPPED = frozenset(
    {
        "additional_tools",
        "code_interpreter_call",
        "compaction",
        "compaction_trigger",
        "computer_call",
        "file_search_call",
        "ghost_snapshot",
        "image_generation_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_list_tools",
        "program",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    }
)
"""Traces of what other servers ran by themselves; they hold nothing that this model could read."""
JOINT = "\n\n"


class Turns:
    """The messages so far, and for each where it came from, for errors about it."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.origins: list[str] = []
        self._open: Message | None = None  # the assistant's turn that further items belong to

    def say(self, role: str, content: Any, origin: str) -> Message:
        """One more message."""
        message: Message = {"role": role, "content": content}
        self._append(message, origin)
        self._open = message if role == "assistant" else None
        return message

    def add(self, item: Item, origin: str) -> None:
        """One more item. Raises BadRequest naming what is wrong with it."""
        kind = item.get("type", "message")
        if kind == "message":
            self._message(item, origin)
        elif kind == "reasoning":
            self._reasoning(item, origin)
        elif kind in CALLS:
            self._call(item, origin)
        elif kind in RESULTS:
            self._result(item, origin)
        elif not isinstance(kind, str) or kind not in SKIPPED:
            raise BadRequest(f"Items of type {str(kind)[:100]!r} are not supported.", param=f"{origin}.type")

    def settle(self) -> None:
        """Call once, after the last item: fold the system messages at the start, and have someone speak."""
        while len(self.messages) > 1 and all(message["role"] in ROLES[1:3] for message in self.messages[:2]):
            texts = [plain(message["content"]) for message in self.messages[:2]]
            if None in texts:
                break
            self.messages[:2] = [{"role": "system", "content": JOINT.join(text for text in texts if text)}]
            del self.origins[1]
        if all(message["role"] in ROLES[1:3] for message in self.messages):
            self.say("user", "", "input")

    def _append(self, message: Message, origin: str) -> None:
        self.messages.append(message)
        self.origins.append(origin)

    def _message(self, item: Item, origin: str) -> None:
        role = item.get("role")
        if role not in ROLES:
            shown = str(role)[:100]
            raise BadRequest(f"A role must be one of {', '.join(ROLES)}, not {shown!r}.", param=f"{origin}.role")
        content = parts(field(item, "content", (str, list), origin), f"{origin}.content")
        if role == "assistant" and self._open is not None and self._open.keys() <= {"role", "reasoning_content"}:
            self._open["content"] = content
        else:
            self.say(role, content, origin)

    def _turn(self, origin: str) -> Message:
        """The assistant's turn that goes on, or a new one."""
        if self._open is None:
            self._open = {"role": "assistant"}
            self._append(self._open, origin)
        return self._open

    def _reasoning(self, item: Item, origin: str) -> None:
        """Thinking begins a new turn, unless the turn has nothing but thinking so far."""
        texts = [plain(item.get(name) or []) for name in ("content", "summary")]
        text = next((text for text in texts if text), "")
        if not text:  # encrypted by another server
            return
        if self._open is not None and not self._open.keys() <= {"role", "reasoning_content"}:
            self._open = None
        turn = self._turn(origin)
        turn["reasoning_content"] = JOINT.join([*([turn["reasoning_content"]] if len(turn) > 1 else []), text])

    def _result(self, item: Item, origin: str) -> None:
        """A function may give nothing."""
        output = "" if item.get("output") is None else field(item, "output", (str, list), origin)
        message = self.say("tool", parts(output, f"{origin}.output"), origin)
        message["tool_call_id"] = field(item, "call_id", str, origin)

    def _call(self, item: Item, origin: str) -> None:
        """Custom calls have a text where functions have arguments."""
        custom = item["type"] == "custom_tool_call"
        arguments = field(item, "input" if custom else "arguments", str, origin)
        function = {
            "name": field(item, "name", str, origin),
            "arguments": {"input": arguments} if custom else arguments,
        }
        call = {"id": field(item, "call_id", str, origin), "type": "function", "function": function}
        self._turn(origin).setdefault("tool_calls", []).append(call)


def field(item: Item, name: str, kind: type | tuple[type, ...], origin: str) -> Any:
    """Raises BadRequest where it is missing or of another kind."""
    value = item.get(name)
    if not isinstance(value, kind):
        kinds = {str: "a string", (str, list): "a string or a list of parts"}
        raise BadRequest(f"{origin}.{name} must be {kinds[kind]}.", param=f"{origin}.{name}")
    return value


def parts(content: str | Sequence[Any], param: str) -> str | list[Any]:
    """Content for a chat message: pictures have another shape there."""
    if isinstance(content, str):
        return content
    return [part(value, f"{param}[{index}]") for index, value in enumerate(content)]


def part(value: Any, param: str) -> Any:
    if not isinstance(value, Mapping) or value.get("type") != "input_image":
        return value
    if not isinstance(value.get("image_url"), str):
        raise BadRequest("An image must have an image_url; files are not kept here.", param=f"{param}.image_url")
    detail = {"detail": value["detail"]} if value.get("detail") is not None else {}
    return {"type": "image_url", "image_url": {"url": value["image_url"], **detail}}


def plain(content: Any) -> str | None:
    """The text of a content that is text alone; else None."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts = [
        value.get("text") if isinstance(value, Mapping) and value.get("type") in TEXT_PARTS else None
        for value in content
    ]
    found = [text for text in texts if isinstance(text, str)]
    return "\n".join(found) if len(found) == len(texts) else None
