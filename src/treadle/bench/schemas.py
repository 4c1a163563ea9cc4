"""Random JSON schemas, made of keywords that are enforced, whose instances are all short."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
WORDS = ("name", "size", "kind", "tags", "ok", "über", "a b", "$id", "0", 'quote"d', "next", "items")
FORMATS = ("date", "uuid", "ipv4")  # not "time" or "date-time": a second may have any number of decimals
DEPTH = 2


def random_schema(seed: int) -> Schema:
    """A schema of an object, the same for the same seed."""
    draw = random.Random(seed)
    schema = _object(draw, DEPTH)
    if draw.random() < 0.3:  # a part that is referred to
        schema["$defs"] = {"part": _any(draw, 0)}
        schema["properties"]["part"] = {"$ref": "#/$defs/part"}
        schema["required"].append("part")
    return schema


def _any(draw: random.Random, depth: int) -> Schema:
    kinds: list[Callable[[random.Random, int], Schema]] = [_string, _number, _constant, _plain]
    if depth > 0:
        kinds += [_object, _array, _tuple, _union]
    return draw.choice(kinds)(draw, depth - 1)


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(WORDS, draw.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _any(draw, depth) for name in names},
        "required": [name for name in names if draw.random() < 0.7],
        "additionalProperties": False,
    }


def _array(draw: random.Random, depth: int) -> Schema:
    least = draw.randint(0, 2)
    return {"type": "array", "items": _any(draw, depth), "minItems": least, "maxItems": least + draw.randint(0, 2)}


def _tuple(draw: random.Random, depth: int) -> Schema:
    parts = [_any(draw, depth) for _ in range(draw.randint(1, 3))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def _union(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(draw, depth) for _ in range(draw.randint(2, 3))]}


def _string(draw: random.Random, depth: int) -> Schema:
    shapes: list[Schema] = [
        {"minLength": draw.randint(0, 3), "maxLength": draw.randint(3, 20)},
        {"pattern": "^[a-z]{2,8}(-[0-9]{1,3})?$"},
        {"enum": ["red", "green", "blue", "ça va", 'say "hi"\n']},
        {"format": draw.choice(FORMATS)},
    ]
    return {"type": "string", **draw.choice(shapes)}


def _number(draw: random.Random, depth: int) -> Schema:
    low = draw.randint(-1000, 1000)
    limits = {"minimum": low, "maximum": low + draw.randint(0, 500)}
    shapes: list[Schema] = [
        {"type": "integer", **limits},
        {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 12},
        {"type": "integer", "multipleOf": 5, **limits, "maximum": low + 100},
    ]
    return draw.choice(shapes)


def _constant(draw: random.Random, depth: int) -> Schema:
    values: list[Any] = [1, "one", None, True, 2.5, {"a": [1, None]}, []]
    return {"const": draw.choice(values)} if draw.random() < 0.4 else {"enum": draw.sample(values, 3)}


def _plain(draw: random.Random, depth: int) -> Schema:
    return {"type": draw.choice(["boolean", "null", ["boolean", "null"]])}
