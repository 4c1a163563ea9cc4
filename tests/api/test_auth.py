"""Keys are found in either header, and only whole ones."""

from __future__ import annotations

import pytest

from treadle.api.auth import Keys

KEYS = Keys(["alpha", "beta"])


@pytest.mark.parametrize(
    ("name", "value", "owner"),
    [
        (b"authorization", b"Bearer alpha", "key 0"),
        (b"authorization", b"bEARER  beta ", "key 1"),
        (b"x-api-key", b"beta", "key 1"),
        (b"authorization", b"alpha", None),
        (b"authorization", b"Basic alpha", None),
        (b"x-api-key", b"alph", None),
        (b"x-api-key", b"alphabeta", None),
        (b"x-api-key", b"", None),
        (b"x-api-key", "ä".encode("latin-1"), None),
        (b"cookie", b"alpha", None),
    ],
)
def test_a_key_is_known_by_its_header_and_whole_value(name: bytes, value: bytes, owner: str | None) -> None:
    assert KEYS.owner([(b"accept", b"*/*"), (name, value)]) == owner


def test_one_accepted_key_is_enough_where_a_client_sends_two() -> None:
    assert KEYS.owner([(b"authorization", b"Bearer none"), (b"x-api-key", b"alpha")]) == "key 0"


def test_no_keys_know_nobody() -> None:
    assert not Keys([]) and Keys([]).owner([(b"x-api-key", b"")]) is None


def test_keys_are_not_kept_in_the_clear() -> None:
    assert "alpha" not in repr(vars(KEYS))
