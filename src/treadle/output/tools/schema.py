"""The tools of one request, and values in the types that their schemas name."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

MAX_DEPTH = 8  # of references and alternatives in a schema
TYPE_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}


def dump(value: Any) -> str:
    """JSON with other scripts as they are; a lone surrogate half is escaped. Raises ValueError for infinity."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    return text


class Toolset:
    """Functions by name with the schema of their parameters. `tools` are as OpenAI's chat takes them."""

    def __init__(self, tools: Iterable[Mapping[str, Any]]) -> None:
        self._schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}

    def __contains__(self, name: object) -> bool:
        return name in self._schemas

    def types(self, name: str, key: str) -> frozenset[str]:
        """JSON type names that this argument may have; none if the schema does not say."""
        schema = self._schemas[name]
        properties = schema.get("properties")
        found = properties.get(key) if isinstance(properties, dict) else None
        return frozenset(_types(found, schema, 0))


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return set()
    given = schema.get("type")
    if isinstance(given, str | list):
        return {given} if isinstance(given, str) else {name for name in given if isinstance(name, str)}
    if isinstance(schema.get("$ref"), str):
        return _types(referred(schema["$ref"], root), root, depth + 1)
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    found = {_type_of(value) for value in values}
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else []:
            found |= _types(option, root, depth + 1)
    return found


def referred(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference inside the same schema (`#/$defs/Name`) names; None for others."""
    node: Any = root if reference.startswith("#") else None
    for part in reference.removeprefix("#").strip("/").split("/"):
        if part:
            node = node.get(part) if isinstance(node, dict) else None
    return node


def typed(text: str, types: frozenset[str]) -> str:
    """A value that a model wrote as text, as JSON of one of `types`; a string where none fits.

    Without types, JSON is taken for what it is. Python's spelling of literals and containers is read too.
    """
    if types == {"string"}:
        return dump(text)
    value = _value(text.strip())
    if isinstance(value, str):
        return dump(text)
    if types & {"integer"} and isinstance(value, float) and value.is_integer():
        value = int(value)
    return dump(value) if not types or _fits(value, types) else dump(text)


def retyped(raw: str, types: frozenset[str]) -> str:
    """A JSON value in the type that the schema names, where its text can be read as that."""
    value = json.loads(raw)
    if not types or _fits(value, types):
        return raw
    if isinstance(value, str):
        return typed(value, types)
    if types == {"string"} and value is not None:
        return dump(raw)
    return typed(raw, types | {_type_of(value)})


def _type_of(value: Any) -> str:
    return "null" if value is None else TYPE_NAMES[type(value)]


def _fits(value: Any, types: frozenset[str]) -> bool:
    name = _type_of(value)
    return name in types or (name == "integer" and "number" in types)


def _value(text: str) -> Any:
    """The JSON or Python value of a text; the text itself if it is neither, or no JSON can hold it."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = literal(text)
    return text if isinstance(value, float) and not math.isfinite(value) else value


class _JsonNames(ast.NodeTransformer):
    """`true`, `false` and `null` among Python literals."""

    VALUES: Mapping[str, bool | None] = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self.VALUES[node.id]) if node.id in self.VALUES else node


def literal(text: str) -> Any:
    """The value of a Python literal that JSON can hold too; the text itself if it is none."""
    try:
        tree = _JsonNames().visit(ast.parse(text.strip(), mode="eval"))
        value = ast.literal_eval(tree)
        return json.loads(json.dumps(value, allow_nan=False))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text
