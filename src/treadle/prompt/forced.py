"""A call that must be made: its beginning is written into the prompt, and a schema holds the rest to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

CALL_START = "<tool_call>\n"
OPEN_KEYS = frozenset({"$ref", "allOf", "anyOf", "oneOf", "patternProperties"})  # properties may come from there


def call_schema(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The JSON schema of `{"name": ..., "arguments": {...}}` for a call to one of these functions."""
    functions = [tool["function"] for tool in tools]
    definitions = {f"f{index}": _arguments(function, f"f{index}") for index, function in enumerate(functions)}
    calls = [_call(function["name"], f"f{index}") for index, function in enumerate(functions)]
    return {"anyOf": calls, "$defs": definitions}


def _call(name: str, definition: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{definition}"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _arguments(function: Mapping[str, Any], definition: str) -> dict[str, Any]:
    """The schema of the parameters, its own references moved to where it stands now.

    Arguments that a plain schema does not name are not allowed, unless it says that they are.
    """
    schema = _moved(function.get("parameters") or {}, f"#/$defs/{definition}")
    assert isinstance(schema, dict)
    closed = {} if OPEN_KEYS & schema.keys() else {"additionalProperties": False}
    return {"type": "object", **closed, **schema}


def _moved(node: Any, root: str) -> Any:
    if isinstance(node, list):
        return [_moved(item, root) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: root + item[1:] if key == "$ref" and isinstance(item, str) and item[:1] == "#" else _moved(item, root)
        for key, item in node.items()
    }
