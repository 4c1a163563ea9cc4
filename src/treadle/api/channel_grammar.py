"""The grammar of replies that are messages with headers: reasoning first, then an answer or a call."""

from __future__ import annotations

from collections.abc import Mapping

from treadle.api.call_values import NO_GRAMMAR, Schema, Unwritable, plain_name, tag_arguments
from treadle.grammar.lark import ANY_TEXT, LINE, Lark, sequence
from treadle.output.dialect import HARMONY, Dialect
from treadle.output.tools.tagged import TagFormat

START = "<|start|>assistant"


def channels(lark: Lark, dialect: Dialect, answer: str, calls: Mapping[str, Schema], *, thinks: bool) -> str:
    """An expression: a whole reply, or what follows its reasoning.

    `answer`: an expression, "" if there must be a call to one of `calls`, functions with the schemas of their
    arguments. `thinks`: whether there may be messages of reasoning. Raises Unwritable, GrammarError.
    """
    space = " " if dialect.final.startswith(" ") else ""
    bound = sequence(lark.literal(dialect.openings[0]), lark.literal(START))
    before = [f"{space}{dialect.thinks}{dialect.message}"] if thinks else []
    if dialect is HARMONY:
        before.append("<|channel|>commentary<|message|>")
    ends = [sequence(lark.literal(dialect.final), answer)] if answer else []
    ends += [_call(lark, dialect, name, schema) for name, schema in calls.items()]
    earlier = [sequence(lark.literal(header), ANY_TEXT, bound) for header in before]
    many = f"{lark.rule(*earlier)}*" if earlier else ""
    return sequence(f"({lark.literal(START)})?", many, lark.rule(*ends))


def _call(lark: Lark, dialect: Dialect, name: str, schema: Schema) -> str:
    """A message that is a call, or has one in it."""
    format, plain = dialect.format, plain_name(name)
    if format is None:
        header = f"<|channel|>commentary to=functions.{plain} <|constrain|>json<|message|>"
        return sequence(lark.literal(header), lark.json(schema))
    if not isinstance(format, TagFormat):
        raise Unwritable(NO_GRAMMAR)
    tags = format.tags
    return sequence(
        lark.literal(f" to={plain}{dialect.message}{format.start}"),
        LINE,
        lark.literal(f'{tags.name_open}"{plain}"{tags.name_ends[0]}'),
        LINE,
        tag_arguments(lark, tags, schema),
        lark.literal(tags.close),
        LINE,
        lark.literal(format.end),
    )
