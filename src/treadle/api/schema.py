"""The request bodies in the OpenAPI document; they are parsed by `body.parse`, not by FastAPI."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


def inlined(node: Any, definitions: dict[str, Any]) -> Any:
    """`node` with each `$ref` into `definitions` replaced by what it names; none may be recursive."""
    if isinstance(node, list):
        return [inlined(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return inlined(definitions[node["$ref"].rsplit("/", 1)[-1]], definitions)
    return {key: inlined(value, definitions) for key, value in node.items() if key != "$defs"}


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` for a route whose JSON body is `model`."""
    schema = model.model_json_schema()
    content = {"application/json": {"schema": inlined(schema, schema.get("$defs", {}))}}
    return {"requestBody": {"required": True, "content": content}}
