"""Repetitions inside repetitions: `(a{1000}){1000}` is a regular expression of a million parts. Pure.

llguidance builds such parts while it follows a reply and gives up in the midst of one. So they are counted before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from treadle.grammar.fault import GrammarError
from treadle.types import Constraint, Language

MOST_PARTS = 50_000  # of one repetition; at twice as many llguidance's own limit comes near
COUNT = re.compile(r"\{(\d+)(?:(,)(\d*))?\}")
REGEX_IN_LARK = re.compile(r"/((?:\\.|[^/\\\n])+)/")
PATTERN_IN_LARK = re.compile(r'"pattern"\s*:\s*("(?:\\.|[^"\\])*")')
ANY_NUMBER = "*+?"


def check_repeats(constraint: Constraint) -> None:
    """Raises GrammarError when a repetition of a regular expression in `constraint` has too many parts."""
    for regex in _regexes(constraint):
        most = most_parts(regex)
        if most > MOST_PARTS:
            raise GrammarError(
                f"the repetitions of {regex[:60]!r} multiply to {most}, more than the {MOST_PARTS} that can be followed"
            )


def _regexes(constraint: Constraint) -> Iterator[str]:
    source = constraint.source
    match constraint.kind:
        case Language.REGEX:
            yield source
        case Language.JSON_SCHEMA:
            yield from _patterns(json.loads(source))
        case Language.LARK:
            yield from (found[1] for found in REGEX_IN_LARK.finditer(source))
            yield from (str(json.loads(found[1], strict=False)) for found in PATTERN_IN_LARK.finditer(source))


def _patterns(node: Any) -> Iterator[str]:
    """All patterns of a schema, wherever they stand."""
    if isinstance(node, list):
        for item in node:
            yield from _patterns(item)
    elif isinstance(node, Mapping):
        if isinstance(node.get("pattern"), str):
            yield node["pattern"]
        if isinstance(node.get("patternProperties"), Mapping):
            yield from node["patternProperties"]
        for item in node.values():
            yield from _patterns(item)


def most_parts(regex: str) -> int:
    """The parts of the largest repetition with a number; what is no valid expression has some number too."""
    sums = [0]  # parts of each open group so far
    last = most = 0  # parts of what a repetition would repeat
    at = 0
    while at < len(regex):
        char, count = regex[at], COUNT.match(regex, at)
        if count is not None:
            times = int(count[3] or count[1])
            sums[-1] += last * (times - 1)
            last *= times
            most = max(most, last)
            at = count.end()
            continue
        if char == "(":
            sums.append(0)
            last = 0
        elif char == ")" and len(sums) > 1:
            last = sums.pop()
            sums[-1] += last
        elif char not in ANY_NUMBER:
            last = 1
            sums[-1] += 1
            at = _end_of_atom(regex, at)
        at += 1
    return most


def _end_of_atom(regex: str, at: int) -> int:
    """The last place of the character, the escape or the class that begins at `at`."""
    if regex[at] == "\\":
        return at + 1
    if regex[at] != "[":
        return at
    end = at + (2 if regex[at + 1 : at + 2] == "^" else 1)
    end += regex[end : end + 1] == "]"
    while end < len(regex) and regex[end] != "]":
        end += 1 + (regex[end] == "\\")
    return end
