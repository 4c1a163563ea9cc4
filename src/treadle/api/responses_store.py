"""The responses that can be asked for again and continued: in memory, bounded, the least used go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from treadle.api.responses_items import Item
from treadle.errors import BadRequest, NotFound

MAX_RESPONSES = 1000
MAX_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Stored:
    """A finished response and the conversation up to and with it."""

    response: dict[str, Any]
    items: tuple[Item, ...]
    size: int


class ResponseStore:
    """By id. One that is larger than all the room is not kept at all."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def keep(self, response: dict[str, Any], before: Sequence[Item]) -> None:
        """`before`: all items of the conversation that the response's output follows."""
        items = (*before, *response["output"])
        stored = Stored(response, items, len(orjson.dumps([response, items])))
        self._stored[response["id"]] = stored
        self._bytes += stored.size
        while self._bytes > self._max_bytes or len(self._stored) > self._max_responses:
            self._bytes -= self._stored.popitem(last=False)[1].size

    def get(self, id: str) -> dict[str, Any]:
        """Raises NotFound."""
        return self._used(id).response

    def before(self, id: str) -> tuple[Item, ...]:
        """The items that the response followed. Raises NotFound."""
        found = self._used(id)
        return found.items[: len(found.items) - len(found.response["output"])]

    def delete(self, id: str) -> None:
        """Raises NotFound."""
        self._bytes -= self._used(id).size
        del self._stored[id]

    def history(self, id: str | None) -> tuple[Item, ...]:
        """The conversation to continue. Raises BadRequest for an id that is not, or no longer, kept."""
        if id is None:
            return ()
        if id not in self._stored:
            raise BadRequest(
                f"Previous response with id {id[:100]!r} not found.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return self._used(id).items

    def _used(self, id: str) -> Stored:
        if id not in self._stored:
            raise NotFound(f"Response with id {id[:100]!r} not found.", param="id", code="response_not_found")
        self._stored.move_to_end(id)
        return self._stored[id]
