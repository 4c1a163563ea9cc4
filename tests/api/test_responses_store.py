"""The store holds what was used last, and never more than its room."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.api.responses_store import ResponseStore
from treadle.errors import BadRequest, NotFound


def response(id: str, text: str = "") -> dict[str, Any]:
    return {"id": id, "output": [{"text": text}]}


def test_a_conversation_is_what_came_before_and_the_output() -> None:
    store = ResponseStore()
    store.keep(response("a", "x"), [{"text": "q"}])
    assert store.history("a") == ({"text": "q"}, {"text": "x"})
    assert store.history(None) == ()


def test_what_is_not_there_is_named() -> None:
    store = ResponseStore()
    for act in (store.get, store.delete):
        with pytest.raises(NotFound):
            act("a")
    with pytest.raises(BadRequest) as caught:
        store.history("a")
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")


def test_a_deleted_response_is_gone() -> None:
    store = ResponseStore()
    store.keep(response("a"), [])
    store.delete("a")
    with pytest.raises(NotFound):
        store.get("a")


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 300)), max_size=40))
def test_the_bounds_hold_and_the_last_used_stay(steps: list[tuple[int, int]]) -> None:
    store = ResponseStore(max_responses=4, max_bytes=1000)
    expected: list[str] = []
    sizes: dict[str, int] = {}
    for step, (name, length) in enumerate(steps):
        known = f"r{name}"
        if known in expected:
            assert store.get(known)["id"] == known
            expected.remove(known)
            expected.append(known)
            continue
        store.keep(response(known, "x" * length), [])
        expected.append(known)
        sizes[known] = 2 * length + len('[{"id":"r0","output":[{"text":""}]},[{"text":""}]]')
        while len(expected) > 4 or sum(sizes[id] for id in expected) > 1000:
            expected.pop(0)
        assert len(store) == len(expected), step


def test_one_that_fills_all_the_room_is_not_kept() -> None:
    store = ResponseStore(max_bytes=100)
    store.keep(response("a", "x" * 200), [])
    assert len(store) == 0
