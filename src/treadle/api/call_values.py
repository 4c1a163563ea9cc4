"""Arguments of calls as grammars: as JSON, as the text of tags, as Gemma writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llguidance import regex_to_lark

from treadle.grammar.lark import ANY_TEXT, ASCII_DIGITS, LINE, Lark, in_order, sequence
from treadle.output.tools.schema import MAX_DEPTH, dump, referred
from treadle.output.tools.tagged import Tags

OPEN_KEYS = frozenset({"$ref", "allOf", "anyOf", "oneOf", "patternProperties"})  # properties may come from there
ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"})
COMMA = "/, ?/"
NAME = "/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"
SCALAR = {"type": ["number", "boolean", "null"]}
Schema = Mapping[str, Any]
NO_GRAMMAR = "the syntax of this model's calls has no grammar here"


class Unwritable(ValueError):
    """What a grammar of this format cannot say, as a clause."""


def arguments(schema: Schema | None, *, held: bool = True) -> dict[str, Any]:
    """The schema of an argument object; of any object if it is not held to its own.

    Arguments that a plain schema does not name are not allowed, unless it says that they are.
    """
    given = dict(schema or {}) if held else {"additionalProperties": True}
    closed = {} if OPEN_KEYS & given.keys() else {"additionalProperties": False}
    return {"type": "object", **closed, **given}


def members(lark: Lark, schema: Schema, member: Callable[[str, Schema], str], separator: str, more: str) -> str:
    """The properties of an argument object in the schema's order, each as `member` writes it; `more`: any other."""
    if OPEN_KEYS & schema.keys():
        raise Unwritable(f"the model's own syntax cannot be held to {min(OPEN_KEYS & schema.keys())!r} of parameters")
    needed = schema.get("required") or ()
    properties = schema.get("properties") or {}
    found = [
        (member(key, value if isinstance(value, dict) else {}), key in needed) for key, value in properties.items()
    ]
    return in_order(lark, found, separator, more if schema.get("additionalProperties", True) else "")


def resolved(schema: Schema, root: Schema) -> Schema:
    """`schema`, or the definition that it refers to."""
    for _ in range(MAX_DEPTH):
        if "$ref" not in schema:
            return schema
        found = referred(str(schema["$ref"]), root)
        if not isinstance(found, dict):
            break
        schema = found
    raise Unwritable(f"the reference {str(schema['$ref'])[:100]!r} leads nowhere")


def rooted(schema: Schema, root: Schema) -> dict[str, Any]:
    """`schema`, a part of `root`, by itself: what it refers to goes with it."""
    return {**_moved(schema), "$defs": {"root": _moved(root)}}


def _moved(node: Any) -> Any:
    """A schema whose references lead to where `root` stands in `rooted`."""
    if isinstance(node, list):
        return [_moved(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: f"#/$defs/root{item[1:]}" if key == "$ref" and isinstance(item, str) and item[:1] == "#" else _moved(item)
        for key, item in node.items()
    }


def options(schema: Schema, root: Schema) -> list[Schema]:
    """The schemas of which one must hold; for a list of types one each."""
    schema = resolved(schema, root)
    given = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(given, list):
        return [found for option in given for found in options(option, root)]
    if isinstance(schema.get("type"), list):
        return [{**schema, "type": name} for name in schema["type"]]
    return [schema]


def is_text(schema: Schema) -> bool:
    values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
    if values is not None:
        return all(isinstance(value, str) for value in values)
    return schema.get("type") == "string" or not (schema.keys() - ANNOTATIONS)


def bare_text(lark: Lark, schema: Schema, end: str) -> str:
    """A string without quotes, and `end`."""
    if "enum" in schema or "const" in schema:
        values = schema.get("enum") or [schema["const"]]
        return sequence(lark.one_of(values), lark.literal(end))
    beyond = schema.keys() - ANNOTATIONS - {"type", "minLength", "maxLength", "pattern"}
    if beyond:
        raise Unwritable(f"the model's own syntax for calls cannot hold a string to {min(beyond)!r}")
    parts = [pattern(schema["pattern"])] if "pattern" in schema else []
    if "minLength" in schema or "maxLength" in schema:
        parts.append(f"/(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})/")
    return lark.until(end, lark.terminal(" & ".join(parts)) if parts else ANY_TEXT)


def pattern(regex: str) -> str:
    """The texts in which a schema's pattern is found, as a terminal's expression."""
    inner = regex.removeprefix("^")
    open_end = not inner.endswith("$") or inner.endswith("\\$")
    before = "" if regex.startswith("^") else "(?s:.*)"
    inner = inner if open_end else inner[:-1]
    return f"/{regex_to_lark(f'{before}({inner})', ASCII_DIGITS)}{'(?s:.*)' if open_end else ''}/"


def tag_value(lark: Lark, schema: Schema, root: Schema, end: str) -> str:
    """A value between tags, and the tag `end`: strings as they are, all else as JSON."""
    found = options(schema, root)
    texts = [option for option in found if is_text(option)]
    others = [option for option in found if not is_text(option)]
    if texts and any(option.get("type") not in ("null", "boolean") for option in others):
        raise Unwritable("the model's own syntax for calls cannot tell a string from other types")
    written = [bare_text(lark, option, end) for option in texts]
    written += [sequence(lark.json(rooted(option, root)), lark.literal(end)) for option in others]
    return lark.rule(*written)


def tag_arguments(lark: Lark, tags: Tags, schema: Schema) -> str:
    """The arguments of a call, each in tags of its own."""
    around = "\n" if tags.lines else ""
    end = around + tags.value_end

    def member(key: str, value: Schema) -> str:
        name = f'"{plain_name(key)}"' if tags.quoted else plain_name(key)
        return written(lark.literal(name), value)

    def written(name: str, value: Schema) -> str:
        says = said_type(lark, tags, options(value, schema))
        opened = sequence(lark.literal(tags.key_open), name, says, lark.literal(tags.key_end))
        between = sequence(LINE, lark.literal(tags.value_open)) if tags.value_open else lark.literal(around)
        return sequence(opened, between, tag_value(lark, value, schema, end), LINE)

    more = sequence('"\\""', NAME, '"\\""') if tags.quoted else NAME
    return members(lark, schema, member, "", written(more, {"type": "string"}))


def said_type(lark: Lark, tags: Tags, found: Sequence[Schema]) -> str:
    """What the tag of an argument says of its type, an expression: for one that may have any of these schemas."""
    if "DSML" in tags.key_open:
        return lark.literal(f' string="{str(all(map(is_text, found))).lower()}"')
    if tags.whole is None:
        return ""
    return lark.rule(*dict.fromkeys(lark.literal(f' type="{xtml_type(option)}"') for option in found))


def xtml_type(schema: Schema) -> str:
    """Kimi K3's name of a value's type; where the schema names none, that of its first value."""
    if is_text(schema):
        return "string"
    values = schema.get("enum") or [schema["const"]] if "enum" in schema or "const" in schema else [None]
    kind = schema.get("type") or {bool: "boolean", int: "number", float: "number", dict: "object", list: "array"}.get(
        type(values[0]), "null"
    )
    return "number" if kind == "integer" else str(kind)


def gemma_value(lark: Lark, schema: Schema, root: Schema, quote: str, depth: int = 0) -> str:
    """A value as Gemma writes it: strings between quotes of its own, keys bare."""
    if depth > MAX_DEPTH:
        raise Unwritable("the parameters are nested too deeply, or without end")
    return lark.rule(*(_gemma_option(lark, option, root, quote, depth) for option in options(schema, root)))


def _gemma_option(lark: Lark, schema: Schema, root: Schema, quote: str, depth: int) -> str:
    if is_text(schema):
        return sequence(lark.literal(quote), bare_text(lark, schema, quote))
    kind = schema.get("type")
    if kind == "object":
        return gemma_object(lark, schema, root, quote, depth + 1)
    if kind != "array":
        return lark.json(schema)
    beyond = schema.keys() - ANNOTATIONS - {"type", "items"}
    if beyond:
        raise Unwritable(f"the model's own syntax for calls cannot hold a list to {min(beyond)!r}")
    item = gemma_value(lark, schema.get("items") or {}, root, quote, depth + 1)
    return sequence('"["', f"({lark.some(item, COMMA)})?", '"]"')


def gemma_object(lark: Lark, schema: Schema, root: Schema, quote: str, depth: int = 0) -> str:
    """An object as Gemma writes it."""

    def member(key: str, value: Schema) -> str:
        return sequence(lark.literal(f"{key}:"), gemma_value(lark, value, root, quote, depth))

    more = sequence(NAME, '":"', lark.rule(sequence(lark.literal(quote), lark.until(quote)), lark.json(SCALAR)))
    return sequence('"{"', members(lark, schema, member, COMMA, more), '"}"')


def python_arguments(lark: Lark, schema: Schema) -> str:
    """`key=value, ...` with values in JSON, which Python's readers of calls take too."""

    def member(key: str, value: Schema) -> str:
        return sequence(lark.literal(f"{key}="), lark.json(rooted(value, schema)))

    return members(lark, schema, member, COMMA, sequence(NAME, '"="', lark.json({})))


def call_object(
    name: str, schema: Schema, name_key: str, arguments_key: str, before: Mapping[str, Any]
) -> dict[str, Any]:
    """The schema of `{"name": ..., "arguments": {...}}` for a call to one function; `before`: further properties."""
    return {
        "type": "object",
        "properties": {**before, name_key: {"const": name}, arguments_key: {"$ref": "#/$defs/root"}},
        "required": [*before, name_key, arguments_key],
        "additionalProperties": False,
        "$defs": {"root": _moved(schema)},
    }


def plain_name(name: str) -> str:
    """The name, if it may stand in a format without quotes. Raises Unwritable."""
    if dump(name) != f'"{name}"' or any(char in name for char in "<>(){}[]=:, \n"):
        raise Unwritable(f"the name {name[:100]!r} cannot stand in the model's own syntax for calls")
    return name
