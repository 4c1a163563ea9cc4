"""Tools in the prompt: written by the model's own template where it can, else told in words.

The words are a convention that most models know: tools as JSON in the system message, calls as JSON in
`<tool_call>`, results as a user's message in `<tool_response>`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]

ID_LENGTH = 9  # what the strictest templates (Mistral's) want, of letters and digits
INSTRUCTIONS = """# Tools

You may call functions to help with the user's request. They are described here as JSON, one per line:
<tools>
{tools}
</tools>

To call a function, answer with a JSON object that has its name and its arguments, inside these tags:
<tool_call>
{{"name": "the function's name", "arguments": {{"argument": "value"}}}}
</tool_call>
Several calls are several such blocks. The results come back inside <tool_response></tool_response>. Call a function
only when it is needed; otherwise answer in plain text."""


def in_words(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The same conversation for a template that knows nothing of tools. Messages are normalised ones.

    Tools go behind the system message's text, calls behind the assistant's; results become the user's messages.
    """
    plain = [_in_words(message) for message in messages]
    if not tools:
        return plain
    text = INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": _joined(plain[0]["content"], text)}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _in_words(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": _response(message["content"])}
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
    blocks = [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
    return {**rest, "content": _joined(message["content"], *blocks)} if blocks else rest


def _response(content: Any) -> Any:
    """A result between its marks; one with images is a list of parts."""
    head, tail = "<tool_response>\n", "\n</tool_response>"
    if isinstance(content, str):
        return f"{head}{content}{tail}"
    return [{"type": "text", "text": head}, *content, {"type": "text", "text": tail}]


def _joined(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)


def short_ids(messages: Sequence[Message]) -> list[Message]:
    """The messages with call ids of nine letters and digits; the same id always becomes the same one."""
    return [_short_ids(message) for message in messages]


def _short_ids(message: Message) -> Message:
    short = dict(message)
    if "tool_call_id" in message:
        short["tool_call_id"] = _short(message["tool_call_id"])
    if "tool_calls" in message:
        short["tool_calls"] = [
            {**call, "id": _short(call["id"])} if "id" in call else call for call in message["tool_calls"]
        ]
    return short


def _short(id: Any) -> Any:
    text = str(id)
    if len(text) == ID_LENGTH and text.isascii() and text.isalnum():
        return id
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:ID_LENGTH]
