"""Markdown code in a growing text: what is written there is shown, not meant."""

from __future__ import annotations

import re

PARTS = re.compile(r"`+|\n|[^`\n]+")
FENCE = 3  # backticks that open or close a block at the start of a line


class CodeSpans:
    """Tells whether a text, fed in pieces of any size, ends inside inline code or a fenced block.

    Inline code ends with its line at the latest, so one stray backtick spoils one line only.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin a new text."""
        self._run = 0  # backticks in a row at the end
        self._inline = 0  # backticks that opened inline code
        self._fenced = False
        self._line_start = True  # only white space so far in this line

    def feed(self, text: str) -> None:
        if not (self._run or self._inline or self._fenced or "`" in text):
            _, newline, last = text.rpartition("\n")
            self._line_start = not last.strip() and (bool(newline) or self._line_start)
            return
        for part in PARTS.findall(text):
            self._part(part)

    @property
    def inside(self) -> bool:
        """Whether other text than a backtick would be code here."""
        self._settle()
        return self._fenced or self._inline > 0

    def _part(self, part: str) -> None:
        if part[0] == "`":
            self._run += len(part)
            return
        self._settle()
        if part == "\n":
            self._inline, self._line_start = 0, True
        elif part.strip():
            self._line_start = False

    def _settle(self) -> None:
        """A run of backticks is complete: it opens or closes something."""
        if not self._run:
            return
        if self._line_start and self._run >= FENCE and not self._inline:
            self._fenced = not self._fenced
        elif not self._fenced and self._inline in (0, self._run):
            self._inline = self._run - self._inline
        self._run, self._line_start = 0, False
