"""Stop strings, found across any boundary while the text streams (Aho-Corasick, CACM 18(6), 1975)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache

from treadle.errors import BadRequest


class Automaton:
    """Stop strings as states; read only, so matchers share it. Raises BadRequest for an empty string."""

    def __init__(self, strings: Sequence[str]) -> None:
        if not all(strings):
            raise BadRequest("A stop string must not be empty.", param="stop")
        self._next: list[dict[str, int]] = [{}]
        self.depth = [0]  # characters of a stop string that a state stands for
        self.word: list[str | None] = [None]  # the longest stop string that ends in this state
        for string in strings:
            self._add(string)
        self._fail = [0] * len(self._next)
        self._link()

    @property
    def empty(self) -> bool:
        return len(self._next) == 1

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        while True:
            target = self._next[state].get(char)
            if target is not None:
                return target
            if state == 0:
                return 0
            state = self._fail[state]

    def _add(self, string: str) -> None:
        state = 0
        for char in string:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self.depth.append(self.depth[state] + 1)
                self.word.append(None)
            state = self._next[state][char]
        self.word[state] = string

    def _link(self) -> None:
        """Breadth first: where to go on when a character does not fit, and which word ends there."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, target in self._next[state].items():
                self._fail[target] = self.step(self._fail[state], char)
                if self.word[target] is None:
                    self.word[target] = self.word[self._fail[target]]
                queue.append(target)


automaton = lru_cache(maxsize=16)(Automaton)
"""The automaton of a tuple of strings, made once for all choices of a request."""


class StopMatcher:
    """Cuts a streamed text where the first of several stop strings is complete.

    The match that is complete first wins; of those complete at the same character, the longest, so the text
    is cut earliest. The stop string is never emitted. Held back is exactly the longest suffix that may still
    become a stop string; everything before it is emitted at once. Time is linear in the text.

    Raises BadRequest for an empty string.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._automaton = automaton(tuple(strings))
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """(text to emit now, the stop string if one has matched). After a match nothing more is emitted."""
        if self.matched is not None:
            return "", self.matched
        stops = self._automaton
        if stops.empty:
            return text, None
        state = self._state
        for index, char in enumerate(text):
            state = stops.step(state, char)
            word = stops.word[state]
            if word is not None:
                self.matched = word
                seen = self._held + text[: index + 1]
                self._held = ""
                return seen[: len(seen) - len(word)], word
        self._state = state
        seen = self._held + text
        cut = len(seen) - stops.depth[state]
        self._held = seen[cut:]
        return seen[:cut], None

    def finish(self) -> str:
        """The text held back, when the stream ends without a match."""
        held, self._held, self._state = self._held, "", 0
        return held
