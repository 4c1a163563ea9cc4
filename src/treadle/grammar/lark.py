"""Grammars in llguidance's dialect of Lark, put together rule by rule."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llguidance import regex_to_lark

from treadle.grammar.fault import GrammarError
from treadle.types import Constraint, Language

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# JSON on one line, at most one blank after a comma or a colon: a model free to put blanks anywhere may never end.
JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "coerce_one_of": False,
    "lenient": False,
}
ANY_OBJECT = {"type": "object"}
ASCII_DIGITS = "d"  # \\d is 0-9, as in JSON schemas, and not any digit of Unicode
ANY_TEXT = "/(?s:.*)/"
LINE = '"\\n"?'


class Lark:
    """The rules of one grammar for one tokenizer, whose special tokens a text never spells.

    Methods give expressions that a rule may be made of.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._rules: list[str] = []
        added = tokenizer.added_tokens_decoder.items()
        self._special = {str(token.content): int(i) for i, token in added if token.special}
        self._at_special = re.compile("|".join(map(re.escape, sorted(self._special, key=len, reverse=True))) or r"(?!)")

    def rule(self, *expressions: str, options: str = "") -> str:
        """A new rule: one of these."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {' | '.join(expressions)}")
        return name

    def terminal(self, expression: str) -> str:
        """A new terminal, in which `&` and `~` may be used."""
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {expression}")
        return name

    def is_plain(self, text: str) -> bool:
        """Whether it begins with ordinary text and not with a special token."""
        return bool(text) and self._parts(text)[0][1] is None

    def literal(self, text: str) -> str:
        """Exactly this text; "" is nothing."""
        return " ".join(part if id is None else f"<[{id}]>" for part, id in self._parts(text))

    def _parts(self, text: str) -> list[tuple[str, int | None]]:
        """The text as quoted pieces and special tokens."""
        found: list[tuple[str, int | None]] = []
        at = 0
        for match in self._at_special.finditer(text):
            if match.start() > at:
                found.append((quoted(text[at : match.start()]), None))
            found.append((match.group(), self._special[match.group()]))
            at = match.end()
        return [*found, (quoted(text[at:]), None)] if at < len(text) else found

    def until(self, end: str, text: str = ANY_TEXT) -> str:
        """Text of this terminal, as short as possible, and then `end`."""
        (first, id), *_ = self._parts(end)
        if id is not None:
            return f"{text} {self.literal(end)}"
        plain = json.loads(first)
        if plain == end:
            return self.rule(text, options=f"[suffix={first}]")
        # The special token behind it decides where the text ends, which may hold the plain beginning of `end` as well.
        return f"{self.terminal(f'{text} {first}')} {self.literal(end[len(plain) :])}"

    def one_of(self, texts: Iterable[str]) -> str:
        return self.rule(*map(self.literal, texts))

    def json(self, schema: Mapping[str, Any]) -> str:
        """JSON that a schema allows. Raises GrammarError."""
        return json_expression(schema)

    def some(self, expression: str, between: str) -> str:
        """One or more, with `between` (an expression) between them."""
        item = self.rule(expression)
        return f"{item} ({between} {item})*"

    def text(self, *starts: str) -> str:
        """The whole grammar, which begins with one of these expressions."""
        return "\n".join((f"start: {' | '.join(starts)}", *self._rules))


def expression(constraint: Constraint) -> str:
    """What a constraint asks for, as an expression; "" where anything goes. Not everything wrong is found here.

    Raises GrammarError.
    """
    source = constraint.source
    match constraint.kind:
        case Language.JSON_OBJECT:
            made = json_expression(ANY_OBJECT)
        case Language.JSON_SCHEMA:
            made = json_expression(json.loads(source))
        case Language.REGEX:
            made = f"/{regex_to_lark(source, ASCII_DIGITS)}/"
        case Language.CHOICE:
            # One terminal: as rules, thousands of choices are more than the parser takes in a row.
            made = f"/({'|'.join(map(escaped, json.loads(source)))})/"
        case Language.LARK:
            made = f"%lark {{\n{source}\n}}"
        case Language.FREE:
            made = ""
    return made


def json_expression(schema: Any) -> str:
    """JSON that a schema allows. Raises GrammarError."""
    if not isinstance(schema, Mapping):
        raise GrammarError("the schema is not an object")
    if "x-guidance" in schema:
        raise GrammarError('the keyword "x-guidance" is not taken from a request')
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS})}"


def escaped(text: str) -> str:
    """The text inside a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/").replace("\n", "n")


def quoted(text: str) -> str:
    """A string literal. It may hold no control characters, of which JSON allows one."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def sequence(*expressions: str) -> str:
    """One after another; empty expressions are left out."""
    return " ".join(expression for expression in expressions if expression)


def in_order(lark: Lark, members: Sequence[tuple[str, bool]], separator: str, more: str = "") -> str:
    """Members (expression, whether it must be there) in their order, then any number of `more`.

    `separator`, an expression or "", stands between those that are there.
    """
    rest = lark.rule(f"({sequence(separator, more)})*") if more else ""
    first = lark.rule(f"{more} {rest}", '""') if more else lark.rule('""')
    rest = rest or lark.rule('""')
    for expression, needed in reversed(members):
        member = lark.rule(expression)
        first = lark.rule(f"{member} {rest}", *([] if needed else [first]))
        rest = lark.rule(sequence(separator, member, rest), *([] if needed else [rest]))
    return first
