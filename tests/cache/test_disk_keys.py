"""Equal keys mean an equal root and equal ids, and a key says how deep it lies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.cache.disk_keys import BLOCK, KEY_BYTES, block_keys, depth_of, state_key

IDS = np.arange(5 * BLOCK, dtype=np.int64)


@given(length=st.integers(0, 4 * BLOCK + 3), root=st.binary(max_size=40))
def test_there_is_one_key_per_full_block_with_its_depth(length: int, root: bytes) -> None:
    keys = block_keys(root, IDS[:length])
    assert [depth_of(key) for key in keys] == list(range(1, length // BLOCK + 1))
    assert {len(key) for key in keys} <= {KEY_BYTES}


@given(at=st.integers(0, len(IDS) - 1))
def test_a_changed_id_changes_the_keys_of_its_block_and_all_after_it(at: int) -> None:
    changed = IDS.copy()
    changed[at] += 1
    same = [a == b for a, b in zip(block_keys(b"r", IDS), block_keys(b"r", changed), strict=True)]
    assert same == [block < at // BLOCK for block in range(5)]


def test_roots_share_no_key() -> None:
    assert not set(block_keys(b"one", IDS)) & set(block_keys(b"two", IDS))


def test_longer_ids_begin_with_the_keys_of_shorter_ones() -> None:
    assert block_keys(b"r", IDS)[:2] == block_keys(b"r", IDS[: 2 * BLOCK + 7])


def test_keys_do_not_depend_on_the_memory_layout_of_the_ids() -> None:
    assert block_keys(b"r", np.repeat(IDS, 2)[::2]) == block_keys(b"r", IDS)


def test_keys_stay_the_same_between_versions_as_files_outlive_them() -> None:
    assert block_keys(b"r", IDS)[1].hex() == "b047d7ab0be99136c57e0019394223c3bf911a3e17af4a5edcd688b000000002"
    assert (
        state_key(b"r", block_keys(b"r", IDS), IDS[:300], "x").hex()
        == "478546acedfa09a71dba441aa9d7cfce37ccd20e2b405338b367ac2b00000001"
    )


def test_states_differ_by_position_ids_tag_and_root_and_from_blocks() -> None:
    keys = block_keys(b"r", IDS)
    other = IDS[:300].copy()
    other[299] = 7
    found = {
        state_key(b"r", keys, IDS[:300], "a"),
        state_key(b"r", keys, IDS[:300], "b"),
        state_key(b"r", keys, IDS[:301], "a"),
        state_key(b"r", keys, other, "a"),
        state_key(b"r", keys, IDS[:BLOCK], "a"),
        state_key(b"r", keys, IDS[:0], "a"),
        state_key(b"q", [], IDS[:0], "a"),
        *keys,
    }
    assert len(found) == 7 + len(keys)


def test_a_state_key_needs_only_the_blocks_below_it() -> None:
    keys = block_keys(b"r", IDS)
    assert state_key(b"r", keys, IDS[:300], "a") == state_key(b"r", keys[:1], IDS[:300], "a")
    with pytest.raises(ValueError, match="1 full blocks, but there are 0 keys"):
        state_key(b"r", [], IDS[:300], "a")


@pytest.mark.parametrize("ids", [np.zeros(300, np.int32), np.zeros((2, 300), np.int64), np.zeros(300)])
def test_ids_of_another_type_are_refused(ids: np.ndarray) -> None:
    with pytest.raises(ValueError, match="one int64 array"):
        block_keys(b"r", ids)
