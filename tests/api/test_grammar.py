"""What a client asks of its reply reaches the engine as one constraint, or is refused by its field's name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes_engine import FakeEngine
from tests.live import Live, live
from treadle.types import Constraint, Language

SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"type": "string"}}, "required": ["z"]}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = {"prompt": "hi"}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(FakeEngine()) as running:
        yield running


def json_schema(schema: Any, **rest: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **rest}}}


ASKED: list[tuple[dict[str, Any], Constraint | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None}, None),
    ({"response_format": {"type": "json_object"}}, Constraint(Language.JSON_OBJECT)),
    (json_schema(SCHEMA), Constraint(Language.JSON_SCHEMA, json.dumps(SCHEMA, separators=(",", ":")))),
    (json_schema({}, strict=True, description="d"), Constraint(Language.JSON_SCHEMA, "{}")),
    ({"guided_regex": "a+"}, Constraint(Language.REGEX, "a+")),
    ({"guided_choice": ["yes", "nö"]}, Constraint(Language.CHOICE, '["yes","nö"]')),
    ({"guided_grammar": 'start: "x"'}, Constraint(Language.LARK, 'start: "x"')),
    ({"response_format": {"type": "text"}, "guided_regex": "a+"}, Constraint(Language.REGEX, "a+")),
]


@pytest.mark.parametrize(
    "path_and_body", [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)], ids=["chat", "text"]
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "expected"), ASKED, ids=lambda value: str(value)[:40])
def test_every_choice_gets_the_constraint(
    server: Live, path_and_body: tuple[str, Any], stream: bool, fields: dict[str, Any], expected: Constraint | None
) -> None:
    path, body = path_and_body
    server.engine.requests.clear()
    assert server.post(path, {**body, **fields, "n": 2, "stream": stream}).status_code == 200
    assert [request.constraint for request in server.engine.requests] == [expected] * 2


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "yaml"}}, "response_format.type", "json_schema"),
    ({"response_format": {}}, "response_format.type", "required"),
    ({"response_format": "json_object"}, "response_format", "dictionary"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
    ({"response_format": {"type": "text", "json_schema": {"name": "n", "schema": {}}}}, "response_format", "only then"),
    ({"response_format": {"type": "json_object", "grammar": "x"}}, "response_format.grammar", "not permitted"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
        "response_format.json_schema.schema",
        "required",
    ),
    (json_schema(True), "response_format.json_schema.schema", "dictionary"),
    (json_schema({"type": "objekt"}), "response_format.json_schema.schema", "objekt"),
    (json_schema({"type": "array", "uniqueItems": True}), "response_format.json_schema.schema", "uniqueItems"),
    (json_schema({"$ref": "https://example.org/x"}), "response_format.json_schema.schema", "example.org"),
    ({"guided_regex": "a("}, "guided_regex", "unclosed"),
    ({"guided_regex": ""}, "guided_regex", "at least 1"),
    ({"guided_regex": 3}, "guided_regex", "string"),
    ({"guided_choice": []}, "guided_choice", "at least 1"),
    ({"guided_choice": "yes"}, "guided_choice", "list"),
    ({"guided_choice": ["yes", 1]}, "guided_choice[1]", "string"),
    ({"guided_grammar": "start: nowhere"}, "guided_grammar", "nowhere"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "cannot be combined with guided_regex"),
    (
        {"response_format": {"type": "json_object"}, "guided_regex": "a"},
        "guided_regex",
        "cannot be combined with response_format",
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param", "says"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_cannot_be_enforced_is_refused_by_name(
    server: Live, stream: bool, fields: dict[str, Any], param: str, says: str
) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        server.engine.requests.clear()
        answer = server.post(path, {**body, **fields, "stream": stream})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert says in error["message"] and error["message"].startswith(param) and "\n" not in error["message"]
        assert server.engine.requests == []


def test_a_model_whose_replies_cannot_end_refuses_a_grammar_but_answers_freely() -> None:
    with live(FakeEngine(stop_ids=frozenset())) as server:
        answer = server.post("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}})
        assert answer.status_code == 400 and "no end token" in answer.json()["error"]["message"]
        assert server.post("/v1/chat/completions", CHAT).status_code == 200
