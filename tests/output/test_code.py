"""A text ends inside Markdown code or not, however it was fed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.output.code import CodeSpans


def inside(*pieces: str) -> bool:
    code = CodeSpans()
    for piece in pieces:
        code.feed(piece)
    return code.inside


@pytest.mark.parametrize("text", ["a `", "a ``x ` ", "```\n", "```xml\na\n", "a\n  ```\n", "```\na `b` "])
def test_code(text: str) -> None:
    assert inside(text)


@pytest.mark.parametrize("text", ["", "a `b` ", "a ` b\n", "``a``", "```\na\n```\n", "it`s\nfine", "a ```b``` c"])
def test_no_code(text: str) -> None:
    assert not inside(text)


@given(st.text(st.sampled_from("`a \n"), max_size=30), st.data())
def test_the_pieces_do_not_matter(text: str, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(text)))
    assert inside(text) == inside(*text) == inside(text[:cut], text[cut:])
