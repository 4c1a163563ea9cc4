"""What was used last stays longest; of one chain the end goes first; the total is always the sum."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from treadle.cache.disk_folder import Stored
from treadle.cache.disk_index import DiskIndex
from treadle.cache.disk_keys import BLOCK, block_keys

A, B = (block_keys(root, np.zeros(4 * BLOCK, np.int64)) for root in (b"a", b"b"))


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def filled(clock: Clock, *keys: bytes, nbytes: int = 10) -> DiskIndex:
    index = DiskIndex(clock)
    for key in keys:
        index.add(Stored(key, nbytes, index.stamp(key)), index.generation)
    return index


def order(index: DiskIndex) -> list[bytes]:
    return [stored.key for stored in index.victims(0)]


def test_a_chain_written_in_order_loses_its_end_first() -> None:
    clock = Clock()
    index = DiskIndex(clock)
    for key in A:
        index.add(Stored(key, 10, index.stamp(key)), index.generation)
        clock.now += 0.01
    assert order(index) == A[::-1]


def test_the_chain_used_last_goes_last() -> None:
    clock = Clock()
    index = filled(clock, *A, *B)
    clock.now += 5
    assert index.leading(A) == 4
    assert order(index) == B[::-1] + A[::-1]


def test_only_the_leading_keys_count_and_are_used() -> None:
    clock = Clock()
    index = filled(clock, A[0], A[1], A[3])
    clock.now += 5
    assert index.leading(A) == 2
    assert order(index) == [A[3], A[1], A[0]]
    assert index.leading([]) == index.leading([B[0], A[0]]) == 0


def test_no_more_goes_than_must_when_files_are_large() -> None:
    index = filled(Clock(), *A)
    assert [stored.key for stored in index.victims(30)] == [A[3]]
    assert [stored.key for stored in index.victims(29)] == [A[3], A[2]]
    assert index.victims(40) == []


def test_a_little_more_goes_when_files_are_small() -> None:
    keys = block_keys(b"many", np.zeros(1000 * BLOCK, np.int64))
    assert len(filled(Clock(), *keys, nbytes=1).victims(999)) == 20


def test_a_scan_adds_what_others_wrote_and_drops_what_they_removed() -> None:
    clock = Clock()
    index = filled(clock, A[0], A[1])
    index.merge([Stored(A[1], 10, 5.0), Stored(B[0], 7, 6.0)], index.generation)
    assert (len(index), index.nbytes) == (2, 17)
    assert order(index) == [B[0], A[1]]  # the newer use of A[1] is kept


def test_a_time_in_the_future_counts_as_now() -> None:
    clock = Clock()
    index = DiskIndex(clock)
    index.merge([Stored(A[0], 10, 1e12)], index.generation)
    clock.now += 5
    index.add(Stored(B[0], 10, index.stamp(B[0])), index.generation)
    assert order(index) == [A[0], B[0]]


def test_what_began_before_a_clear_changes_nothing_after_it() -> None:
    index = filled(Clock(), *A)
    before = index.generation
    index.clear()
    assert not index.add(Stored(A[0], 10, 1.0), before)
    index.merge([Stored(A[0], 10, 1.0)], before)
    assert (len(index), index.nbytes) == (0, 0)


def test_uses_are_handed_out_once_and_only_for_what_is_still_held() -> None:
    clock = Clock()
    index = filled(clock, A[0], A[1])
    clock.now += 5
    index.touch([A[0], A[1], B[0]])
    index.drop(A[1])
    assert index.take_touched() == [(A[0], index.stamp(A[0]))]
    assert index.take_touched() == []


actions = st.lists(
    st.tuples(st.sampled_from(["add", "drop", "touch", "merge", "clear"]), st.sampled_from(A + B), st.integers(0, 9))
)


@given(actions)
def test_the_total_is_the_sum_of_what_is_held(steps) -> None:
    clock = Clock()
    index = DiskIndex(clock)
    model: dict[bytes, int] = {}
    for action, key, number in steps:
        clock.now += number
        if action == "add":
            index.add(Stored(key, number, index.stamp(key)), index.generation)
            model[key] = number
        elif action == "drop":
            index.drop(key)
            model.pop(key, None)
        elif action == "touch":
            index.touch([key])
        elif action == "merge":
            model = {key: number, A[0]: 3}
            index.merge([Stored(k, n, clock.now) for k, n in model.items()], index.generation)
        else:
            index.clear()
            model.clear()
        assert index.nbytes == sum(model.values())
        assert [key in index for key in A + B] == [key in model for key in A + B]
        assert len(index) == len(model)
