"""A grammar that cannot be used, with the reason as a clause: "the schema has ...", without a full stop."""

from __future__ import annotations

MOST_CHARS = 300


class GrammarError(ValueError):
    """Not valid, not supported or too complex."""


def reason(text: str) -> str:
    """The one line of llguidance's message that says what is wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    line = next(iter(said or lines), "unknown error")
    return line.removesuffix("regex parse error:").removesuffix(".")[:MOST_CHARS]
