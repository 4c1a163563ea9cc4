"""Values get the type that the schema names, where their text can be read as that."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.output.tools.schema import Toolset, retyped, typed

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
TYPES = st.frozensets(st.sampled_from(["string", "integer", "number", "boolean", "object", "array", "null"]))


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", {"integer"}, 5),
        ("5.0", {"integer"}, 5),
        ("5", {"number"}, 5),
        ("5", {"string"}, "5"),
        ("True", {"boolean"}, True),
        ("null", {"string", "null"}, None),
        ("{'a': True, 'b': null}", {"object"}, {"a": True, "b": None}),
        ("[1, 2", {"array"}, "[1, 2"),
        ("NaN", {"number"}, "NaN"),
        ("1e999", {"number"}, "1e999"),
        ("five", {"integer"}, "five"),
        ("5", set(), 5),
        ("Paris", set(), "Paris"),
    ],
)
def test_text_is_read_as_its_type(text: str, types: set[str], value: Any) -> None:
    assert json.loads(typed(text, frozenset(types))) == value


@given(JSON, TYPES)
def test_any_value_stays_json_and_the_right_type_stays_as_it_is(value: Any, types: frozenset[str]) -> None:
    raw = json.dumps(value)
    made = json.loads(retyped(raw, types))
    if not types:
        assert made == value
    if types == {"string"} and value is not None:
        assert isinstance(made, str)


def test_types_come_from_every_way_to_say_them() -> None:
    properties = {
        "a": {"type": ["string", "null"]},
        "b": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/T"}]},
        "c": {"enum": ["x", 1]},
        "d": {"const": True},
        "e": {"$ref": "#/$defs/Loop"},
        "f": {"$ref": "http://elsewhere"},
        "g": True,
    }
    schema = {"properties": properties, "$defs": {"T": {"type": "array"}, "Loop": {"$ref": "#/$defs/Loop"}}}
    tools = Toolset([{"function": {"name": "f", "parameters": schema}}, {"function": {"name": "g"}}])
    found = {key: set(tools.types("f", key)) for key in (*properties, "unknown")}
    assert found == {
        "a": {"string", "null"}, "b": {"integer", "array"}, "c": {"string", "integer"}, "d": {"boolean"},
        "e": set(), "f": set(), "g": set(), "unknown": set(),
    }  # fmt: skip
    assert tools.types("g", "x") == frozenset() and "g" in tools and "h" not in tools
