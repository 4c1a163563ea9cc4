"""Wherever a body has a number, true and false are none, and neither is a text that spells one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from treadle.api.anthropic_fields import CountBody, MessagesBody
from treadle.api.embeddings import EmbeddingsBody
from treadle.api.fields import ChatBody, CompletionBody
from treadle.api.responses_body import ResponsesBody
from treadle.api.tokenise import DetokeniseBody, TemplateBody, TokeniseBody
from treadle.api.unsupported import refuse_unsupported
from treadle.errors import BadRequest

BODIES: tuple[type[BaseModel], ...] = (
    ChatBody, CompletionBody, ResponsesBody, MessagesBody, CountBody, EmbeddingsBody, TokeniseBody, DetokeniseBody,
    TemplateBody,
)  # fmt: skip


def numbers(body: type[BaseModel]) -> Iterator[str]:
    """The fields that the schema has as numbers."""
    for name, schema in body.model_json_schema()["properties"].items():
        kinds = {option.get("type") for option in (schema, *schema.get("anyOf", ()))}
        if kinds & {"integer", "number"}:
            yield name


FIELDS = [(body, name) for body in BODIES for name in numbers(body)]


def test_there_are_such_fields() -> None:
    assert len(FIELDS) > 40


@pytest.mark.parametrize("value", [True, False, "1", [1], {"a": 1}])
@pytest.mark.parametrize(("body", "name"), FIELDS, ids=lambda part: getattr(part, "__name__", part))
def test_a_number_is_a_number(body: type[BaseModel], name: str, value: Any) -> None:
    if name == "kv_bits" and value == "1":
        pytest.skip("a format is written as a text too")
    with pytest.raises(ValidationError) as caught:
        body.model_validate({name: value})
    assert any(error["loc"][:1] == (name,) and error["type"] != "missing" for error in caught.value.errors())


@pytest.mark.parametrize(
    ("name", "value", "n"), [("best_of", True, 1), ("best_of", 2, 1), ("best_of", 1.5, 1), ("best_of", "1", 1)]
)
def test_what_is_not_built_is_asked_for_by_its_own_type_too(name: str, value: Any, n: int) -> None:
    with pytest.raises(BadRequest) as caught:
        refuse_unsupported({name: value}, n)
    assert caught.value.param == name


def test_best_of_as_many_as_are_given_asks_for_nothing() -> None:
    refuse_unsupported({"best_of": 1}, 3)
    refuse_unsupported({"best_of": 3}, 3)
