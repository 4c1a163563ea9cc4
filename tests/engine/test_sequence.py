"""A sequence's tokens: what is committed at once is what would be committed one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from treadle.engine.ending import taken_one_by_one
from treadle.engine.sequence import Sequence
from treadle.types import Finish, Request, Sampling

ROOM = 5000


def sequence(prompt: int, room: int = ROOM, stops: frozenset[int] = frozenset()) -> Sequence:
    request = Request("r", np.arange(prompt), Sampling(0.0), room, stop_ids=stops)
    return Sequence(request, room, 0.0)


@given(st.integers(1, 400), st.lists(st.integers(0, 1500), max_size=4))
def test_any_number_of_tokens_is_committed_at_once(prompt: int, sizes: list[int]) -> None:
    one, expected = sequence(prompt), list(range(prompt))
    for size in sizes:
        tokens = list(range(size))
        one.commit(tokens)
        expected += tokens
    assert one.tokens.tolist() == expected
    assert one.num_generated == sum(sizes)


@given(st.lists(st.integers(-1, 6), max_size=8), st.integers(1, 10), st.frozensets(st.integers(0, 6), max_size=2))
def test_tokens_that_pass_are_those_of_which_none_ends_it(drawn: list[int], room: int, stops: frozenset[int]) -> None:
    one = sequence(3, room, stops)
    passes = one.passes(drawn)
    taken, ending = taken_one_by_one(one, drawn)
    assert passes == (not ending)
    if passes:
        assert taken == len(drawn)
    elif ending["finish"] is Finish.LENGTH:
        assert taken == one.num_generated == room
    else:
        assert drawn[taken] == ending.get("stop_id", -1) and one.num_generated == taken
