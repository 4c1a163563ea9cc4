"""A grammar is compiled once, and what cannot be enforced is refused with the reason."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.grammar.letters import grammars, ids_of, letters, text_of
from treadle.grammar.compile import MOST_KEPT, Grammars, grammars_of
from treadle.grammar.fault import GrammarError
from treadle.grammar.vocabulary import Vocabulary
from treadle.types import Constraint, Language

END = frozenset({0})


def schema(value: Any) -> Constraint:
    return Constraint(Language.JSON_SCHEMA, json.dumps(value))


def accepts(constraint: Constraint, text: str) -> bool:
    """Whether the whole text may be generated, and the reply may end after it."""
    matcher = grammars().matcher(constraint, END)
    for token in ids_of(text):
        if not matcher.mask()[token // 32] >> (token % 32) & 1:
            return False
        matcher.accept(token)
    return bool(matcher.mask()[0] & 1)


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        (Constraint(Language.JSON_OBJECT), ['{"a": [1, "x", null]}', "{}"], ["[]", "1", '{"a": }', "{} "]),
        (
            schema({"type": "array", "items": {"enum": ["x", 3]}, "maxItems": 2}),
            ["[]", '["x", 3]'],
            ['["y"]', "[3,3,3]"],
        ),
        (Constraint(Language.REGEX, "a+b?"), ["a", "aab"], ["", "b", "ba", "abb"]),
        (Constraint(Language.REGEX, r"a/b\d\/[\d_]"), ["a/b1/_"], ["a/bd/_"]),
        (Constraint(Language.CHOICE, '["yes", "no (.*) $1/2", "\\\\d"]'), ["yes", "no (.*) $1/2", "\\d"], ["ye", "7"]),
        (Constraint(Language.CHOICE, '["", "a", "a"]'), ["", "a"], ["aa"]),
        (Constraint(Language.CHOICE, json.dumps([f"no {i}" for i in range(3000)])), ["no 7", "no 2999"], ["no 3000"]),
        (
            schema(
                {
                    "anyOf": [
                        {"type": "object", "properties": {"k": {"const": i}}, "required": ["k"]} for i in range(2500)
                    ]
                }
            ),
            ['{"k": 2499}'],
            ['{"k": 2500}', "{}"],
        ),
        (Constraint(Language.LARK, 'start: "(" start ")" | "x"'), ["x", "((x))"], ["((x)", "()"]),
    ],
    ids=lambda value: value.kind.value if isinstance(value, Constraint) else "",
)
def test_each_kind_allows_its_own_texts_and_no_others(constraint: Constraint, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not accepts(constraint, text)] == []
    assert [text for text in bad if accepts(constraint, text)] == []


def test_a_model_cannot_go_on_with_blanks_forever() -> None:
    constraint = schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    assert accepts(constraint, '{"a": 1, "b": [2,3]}') and accepts(constraint, '{"a":1}')
    for text in ('{"a":  1}', '{ "a": 1}', '{"a" : 1}', '{"a": 1 }', '{"a": 1} '):
        assert not accepts(constraint, text)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "objekt"}, "objekt"),
        ({"type": "string", "format": "fancy"}, "fancy"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"$ref": "https://example.org/schema"}, "example.org"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}, "x-guidance"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_a_schema_that_cannot_be_enforced_is_refused_with_its_reason(value: dict[str, Any], says: str) -> None:
    with pytest.raises(GrammarError) as caught:
        grammars().check(schema(value))
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint(Language.REGEX, "a("),
        Constraint(Language.REGEX, "(?=a)b"),
        Constraint(Language.LARK, "start: nowhere"),
        Constraint(Language.LARK, "begin: /a/"),
        Constraint(Language.LARK, "start: X\nX: /[a-c]/ & /[d-f]/"),
    ],
    ids=lambda constraint: constraint.source,
)
def test_a_broken_or_empty_grammar_is_refused_in_one_line(constraint: Constraint) -> None:
    with pytest.raises(GrammarError) as caught:
        grammars().check(constraint)
    assert str(caught.value) and "\n" not in str(caught.value)


def test_the_least_recently_used_grammars_are_dropped() -> None:
    own = Grammars(grammars().vocabulary)
    asked = [Constraint(Language.REGEX, "a" * n) for n in range(1, MOST_KEPT + 4)]
    for constraint in asked:
        own.check(constraint)
        own.check(asked[0])
    assert len(own._kept) == MOST_KEPT and (Language.REGEX, "a") in own._kept
    assert not own.matcher(asked[1], END).finished


def test_a_model_without_an_end_cannot_have_a_grammar() -> None:
    with pytest.raises(GrammarError, match="no end"):
        grammars_of(letters(), 97, frozenset())


def test_a_tokenizer_without_bytes_of_its_own_is_refused() -> None:
    core = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    with pytest.raises(GrammarError, match="tokenizer"):
        Vocabulary(PreTrainedTokenizerFast(tokenizer_object=core), 3, [0])


def test_a_vocabulary_may_be_smaller_or_larger_than_the_tokenizer() -> None:
    for size in (70, 96, 97, 300):
        matcher = Grammars(Vocabulary(letters(), size, [0])).matcher(Constraint(Language.REGEX, "[ -~]"), END)
        bits = matcher.mask()
        allowed = [i for i in range(32 * len(bits)) if bits[i // 32] >> (i % 32) & 1]
        assert len(bits) == -(-size // 32)
        assert text_of(allowed) == "".join(chr(code) for code in range(32, 127))[: size - 1]
