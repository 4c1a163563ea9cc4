"""Where the parsers put the calls that they find."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from treadle.output.tools.schema import Toolset


def new_id() -> str:
    """A fresh `call_...` id."""
    return f"call_{uuid.uuid4().hex[:24]}"


class Calls:
    """Numbers the calls of one reply. `emit` gets (index, name or None, arguments fragment)."""

    def __init__(self, tools: Toolset, emit: Callable[[int, str | None, str], None], *, single: bool = False) -> None:
        self.tools = tools
        self.count = 0
        self.name = ""  # of the call being read
        self._emit = emit
        self._single = single

    def begin(self, name: str) -> None:
        """A call to a known function: from here on it cannot become prose again."""
        self.name = name
        self.count += 1
        if not self._muted:
            self._emit(self.count - 1, name, "")

    def add(self, arguments: str) -> None:
        """The next piece of the arguments' JSON."""
        if not self._muted and arguments:
            self._emit(self.count - 1, None, arguments)

    def types(self, key: str) -> frozenset[str]:
        """The types of an argument of the call being read."""
        return self.tools.types(self.name, key)

    @property
    def _muted(self) -> bool:
        return self._single and self.count > 1
