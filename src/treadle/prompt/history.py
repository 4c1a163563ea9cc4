"""What in a conversation changes with every request and says nothing to the model.

Some coding agents put an attribution line first in the system prompt. It holds a value that is new in each
request, so no two prompts would share a beginning and none could be reused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]

ATTRIBUTION = re.compile(r"x-anthropic-billing-header: [^\r\n]*;[ \t]*(?:\r?\n|\Z)")


def without_attribution(messages: Sequence[Message]) -> list[Message]:
    """Normalised messages without the attribution line, if the system message that comes first begins with it.

    Only that whole first line goes, and nothing anywhere else, so a text about the line stays. A system
    message of nothing else goes as a whole, unless it is the only message. The input is not changed.
    """
    first, *rest = messages
    line = ATTRIBUTION.match(first["content"]) if first["role"] == "system" else None
    if line is None:
        return [first, *rest]
    text = first["content"][line.end() :]
    return [{**first, "content": text}, *rest] if text or not rest else rest
