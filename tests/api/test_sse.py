"""A pre-built frame gives the bytes that the general JSON encoder gives."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from treadle.api.sse import Frame, encode

TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def chunk_of(text: str, name: str = "m") -> dict[str, Any]:
    return {"model": name, "choices": [{"index": 0, "delta": {"content": text}}], "usage": None}


@given(TEXT)
def test_a_frame_equals_the_general_encoder(text: str) -> None:
    assert Frame(chunk_of)(text) == encode(chunk_of(text))


@given(TEXT, TEXT)
def test_what_surrounds_the_text_may_hold_anything(name: str, text: str) -> None:
    assert Frame(lambda t: chunk_of(t, name))(text) == encode(chunk_of(text, name))


@given(TEXT)
def test_an_event_is_one_line_of_json_whatever_the_text(text: str) -> None:
    data = encode(chunk_of(text)).decode()
    assert data.endswith("\n\n") and data.count("\n") == 2 and "\r" not in data
    assert json.loads(data.removeprefix("data: ")) == chunk_of(text)
