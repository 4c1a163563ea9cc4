"""The names under which rows and states of a prefix lie on disk: chained hashes. Pure; any thread.

    root ---> key of block 0 ---> key of block 1 ---> ...        a block is BLOCK tokens
                      \\---> key of a state inside block 1

A key depends on the root and on *every* id before its end, so equal keys mean equal rows, whatever the tree looked
like when they were written. Its last bytes say how deep it lies: whoever evicts needs that, as a block without those
before it is of no use.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from treadle.types import Ids

BLOCK = 256  # tokens
KEY_BYTES = 32
_DEPTH_BYTES = 4
_HASH_BYTES = KEY_BYTES - _DEPTH_BYTES


def block_keys(root: bytes, ids: Ids) -> list[bytes]:
    """The key of every full block of `ids` [n], n // BLOCK of them.

    `root` tells apart what must never mix: model revision, KV format, salt, dtypes and layout of the rows.
    Raises ValueError for ids that are not one int64 array.
    """
    data = _bytes_of(ids)
    stride = BLOCK * 8
    key = root_key(root)
    keys = []
    for depth in range(1, len(ids) // BLOCK + 1):
        key = _key(b"block", depth, key, data[(depth - 1) * stride : depth * stride])
        keys.append(key)
    return keys


def state_key(root: bytes, keys: Sequence[bytes], ids: Ids, tag: str) -> bytes:
    """The key of the states after exactly `ids` [n]; `tag` tells apart several at one position.

    `keys` are those of `block_keys` for these ids or more of the same sequence: only the remainder is hashed.
    """
    depth = len(ids) // BLOCK
    if len(keys) < depth:
        raise ValueError(f"{len(ids)} ids have {depth} full blocks, but there are {len(keys)} keys.")
    below = keys[depth - 1] if depth else root_key(root)
    remainder = _bytes_of(ids[depth * BLOCK :])
    return _key(b"state", depth, below, len(remainder).to_bytes(2, "little"), remainder, tag.encode())


def root_key(root: bytes) -> bytes:
    """What the first block is chained to."""
    return _key(b"root", 0, root)


def depth_of(key: bytes) -> int:
    """How many full blocks of tokens end at or before the position of a key."""
    return int.from_bytes(key[_HASH_BYTES:], "big")


def _key(person: bytes, depth: int, *parts: bytes) -> bytes:
    digest = blake2b(digest_size=_HASH_BYTES, person=person)  # kinds of keys never collide
    for part in parts:
        digest.update(part)
    return digest.digest() + depth.to_bytes(_DEPTH_BYTES, "big")


def _bytes_of(ids: Ids) -> bytes:
    if ids.dtype != np.int64 or ids.ndim != 1:
        raise ValueError(f"Key ids must be one int64 array, not {ids.ndim}-d {ids.dtype}.")
    return ids.astype("<i8", copy=False).tobytes()  # the same on every machine
