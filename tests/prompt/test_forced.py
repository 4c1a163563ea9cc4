"""The schema of a forced call is one of the tools' calls, and each tool's own references stay right."""

from __future__ import annotations

from typing import Any

from treadle.prompt.forced import call_schema


def function_with(**parameters: Any) -> dict[str, Any]:
    return {"function": {"name": "f", "parameters": parameters}}


def test_one_alternative_per_function_and_references_that_move_with_it() -> None:
    tree = {"type": "object", "properties": {"t": {"$ref": "#/$defs/T"}, "u": {"$ref": "#"}}, "$defs": {"T": {}}}
    schema = call_schema([{"function": {"name": "a", "parameters": tree}}, {"function": {"name": "b"}}])
    assert [call["properties"]["name"]["const"] for call in schema["anyOf"]] == ["a", "b"]
    assert schema["$defs"]["f0"]["properties"] == {"t": {"$ref": "#/$defs/f0/$defs/T"}, "u": {"$ref": "#/$defs/f0"}}
    assert schema["$defs"]["f1"] == {"type": "object", "additionalProperties": False}
    assert "additionalProperties" not in call_schema([function_with(anyOf=[])])["$defs"]["f0"]
    assert call_schema([function_with(additionalProperties=True)])["$defs"]["f0"]["additionalProperties"] is True
    assert tree["properties"]["t"] == {"$ref": "#/$defs/T"}  # type: ignore[index]
