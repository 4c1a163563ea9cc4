"""Parameters beyond the ones that are built: the harmless are accepted, the rest is refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treadle.errors import BadRequest

HARMLESS = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Accepted with any value: none of them can change the text of a reply here."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
"""Known but not built: accepted only with a value that asks for nothing."""


def refuse_unsupported(extra: Mapping[str, Any], n: int) -> None:
    """Raise BadRequest for the first parameter that would change the answer and is not built.

    `best_of` equal to `n` asks for nothing either.
    """
    for name, value in extra.items():
        if name in HARMLESS or asks_nothing(value, NEUTRAL.get(name, ())):
            continue
        if name == "best_of" and asks_nothing(value, (n,)):
            continue
        if name in NEUTRAL:
            raise BadRequest(f"{name} is not supported yet.", param=name, code="unsupported_parameter")
        raise BadRequest(f"Unknown parameter: {name[:100]!r}.", param=name[:100], code="unknown_parameter")


def asks_nothing(value: Any, neutral: Sequence[Any]) -> bool:
    """Whether it is one of `neutral` as JSON sees it: true is not 1, and 0 is not false."""
    return any(isinstance(value, bool) == isinstance(other, bool) and value == other for other in neutral)
