"""What a request says about the shape of its reply: `response_format` and the `guided_` parameters."""

from __future__ import annotations

from typing import Any, Literal, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field, model_validator

from treadle.api.ports import ModelPort
from treadle.errors import BadRequest
from treadle.grammar.compile import grammars_of
from treadle.grammar.fault import GrammarError
from treadle.types import Constraint, Language

GUIDED = ("guided_regex", "guided_choice", "guided_grammar")
MOST_CHARS = 100_000  # of a regular expression or a grammar
FIELDS = {
    Language.JSON_OBJECT: "response_format",
    Language.JSON_SCHEMA: "response_format.json_schema.schema",
    Language.REGEX: "guided_regex",
    Language.CHOICE: "guided_choice",
    Language.LARK: "guided_grammar",
}


class NamedSchema(BaseModel):
    """`response_format.json_schema`. A schema is always enforced as a whole, whatever `strict` says."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: str = Field(min_length=1)
    description: str | None = None
    definition: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """`response_format`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _a_schema_goes_with_its_type(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError('json_schema must be given with the type "json_schema", and only then')
        return self


class ConstrainedBody(BaseModel):
    """The parameters that constrain a reply; at most one of them."""

    response_format: ResponseFormat = Field(default_factory=lambda: ResponseFormat(type="text"))
    guided_regex: str | None = Field(default=None, min_length=1, max_length=MOST_CHARS)
    guided_choice: list[str] | None = Field(default=None, min_length=1)
    guided_grammar: str | None = Field(default=None, min_length=1, max_length=MOST_CHARS)

    @model_validator(mode="after")
    def _only_one_shape(self) -> Self:
        given = self._given()
        if len(given) > 1:
            raise ValueError(f"{given[1]} cannot be combined with {given[0]}")
        return self

    @property
    def shape(self) -> str | None:
        """The name of the parameter that constrains the reply."""
        return next(iter(self._given()), None)

    def _given(self) -> list[str]:
        given = [] if self.response_format.type == "text" else ["response_format"]
        return given + [name for name in GUIDED if getattr(self, name) is not None]


def constraint_of(body: ConstrainedBody) -> Constraint | None:
    """The one constraint that `body` asks for; None: a free reply."""
    if body.guided_regex is not None:
        return Constraint(Language.REGEX, body.guided_regex)
    if body.guided_choice is not None:
        return Constraint(Language.CHOICE, orjson.dumps(body.guided_choice).decode())
    if body.guided_grammar is not None:
        return Constraint(Language.LARK, body.guided_grammar)
    if body.response_format.json_schema is not None:
        return Constraint(Language.JSON_SCHEMA, orjson.dumps(body.response_format.json_schema.definition).decode())
    return Constraint(Language.JSON_OBJECT) if body.response_format.type == "json_object" else None


def check_constraint(model: ModelPort, constraint: Constraint | None, field: str = "") -> None:
    """Compile it for `model`; not on the event loop, for it may take a moment.

    Raises BadRequest naming `field`, by default the parameter that `constraint_of` reads such a constraint from.
    """
    if constraint is None:
        return
    field = field or FIELDS[constraint.kind]
    try:
        grammars_of(model.tokenizer, model.caps.vocab_size, model.stop_ids).check(constraint)
    except GrammarError as error:
        raise BadRequest(f"{field}: {error}.", param=field) from error
