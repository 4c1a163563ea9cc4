"""A file is read as it was written, by us and by `safetensors`, or it is found damaged: nothing in between."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from treadle.cache.disk_format import ITEM_BYTES, Damaged, Tensor, decode, encode, require_names

KEY = bytes(range(32))
SMALL = [
    Tensor("keys", "BF16", (1, 2, 3), bytes(range(12))),
    Tensor("values", "F16", (2, 3), bytes(range(12, 24))),
    Tensor("empty", "F32", (0, 4), b""),
]


def file_of(tensors, key=KEY):
    return np.frombuffer(b"".join(encode(key, tensors)), np.uint8)


def contents(tensors):
    return [(t.name, t.dtype, t.shape, bytes(t.raw)) for t in tensors]


shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def tensors(draw):
    names = draw(st.lists(st.text(st.characters(max_codepoint=127), max_size=8), unique=True, max_size=6))
    made = []
    for name in names:
        dtype, shape = draw(st.sampled_from(sorted(ITEM_BYTES))), draw(shapes)
        size = math.prod(shape) * ITEM_BYTES[dtype]
        made.append(Tensor(name, dtype, shape, draw(st.binary(min_size=size, max_size=size))))
    return made


@given(tensors(), st.binary(min_size=32, max_size=32))
def test_what_is_decoded_is_what_was_encoded(made, key: bytes) -> None:
    assert contents(decode(key, file_of(made, key))) == contents(made)


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
def test_every_dtype_is_a_safetensors_dtype_and_keeps_its_bytes(dtype: str, tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 2, 6 * ITEM_BYTES[dtype], np.uint8)
    path = tmp_path / "one.safetensors"
    path.write_bytes(file_of([Tensor("x", dtype, (2, 3), data)]).tobytes())
    (tensor,) = decode(KEY, np.fromfile(path, np.uint8))
    assert bytes(tensor.raw) == data.tobytes()
    with safetensors.safe_open(path, framework="numpy") as file:
        assert list(file.keys()) == ["x"]
        assert file.get_slice("x").get_shape() == [2, 3]
        assert file.get_slice("x").get_dtype() == dtype
        assert file.metadata()["key"] == KEY.hex()


def test_safetensors_reads_the_values(tmp_path: Path) -> None:
    numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
    halves = np.arange(8, dtype=np.float16)
    path = tmp_path / "two.safetensors"
    made = [
        Tensor("a", "F32", (2, 3), memoryview(numbers)),
        Tensor("b", "F16", (8,), halves.view(np.uint8)),
    ]
    path.write_bytes(file_of(made).tobytes())
    read = safetensors.numpy.load_file(path)
    np.testing.assert_array_equal(read["a"], numbers)
    np.testing.assert_array_equal(read["b"], halves)


def test_data_begins_aligned_and_is_neither_copied_to_be_written_nor_when_read() -> None:
    data = np.zeros(64, np.uint8)
    pieces = encode(KEY, [Tensor("x", "U8", (64,), data)])
    assert len(pieces[0]) % 64 == 0
    assert np.shares_memory(np.asarray(pieces[1]), data)
    file = file_of([Tensor("x", "U8", (64,), data)])
    assert np.shares_memory(decode(KEY, file)[0].data, file)


def test_a_file_cut_anywhere_is_damaged() -> None:
    file = file_of(SMALL)
    for length in range(len(file)):
        with pytest.raises(Damaged):
            decode(KEY, file[:length])


def test_a_file_with_more_behind_it_is_damaged() -> None:
    with pytest.raises(Damaged, match="does not end"):
        decode(KEY, np.append(file_of(SMALL), np.uint8(0)))


def test_a_flip_of_any_single_bit_is_damage() -> None:
    file = file_of(SMALL).copy()
    for at in range(len(file)):
        for bit in range(8):
            file[at] ^= 1 << bit
            with pytest.raises(Damaged):
                decode(KEY, file)
            file[at] ^= 1 << bit
    assert contents(decode(KEY, file)) == contents(SMALL)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"BF16"', b'"F16" '),
        (b'"F16"', b'"I16"'),
        (b"[1,2,3]", b"[1,3,2]"),
        (b'"keys"', b'"kegs"'),
        (b"treadle-prefix-1", b"treadle-prefix-2"),
        (b"__metadata__", b"__metadara__"),
        (b'"data_offsets":[0,12]', b'"data_offsets":[0,12.'),
        (b'"data_offsets":[12,24]', b'"data_offsets":[0,12] '),
        (b'"shape":[2,3]', b'"shape":[6.0]'),
        (b'"shape":[2,3]', b'"shape":"ab" '),
    ],
)
def test_a_header_that_says_something_else_is_damaged(old: bytes, new: bytes) -> None:
    content = file_of(SMALL).tobytes()
    assert content.count(old) == 1 and len(old) == len(new)
    with pytest.raises(Damaged):
        decode(KEY, np.frombuffer(content.replace(old, new), np.uint8))


def test_a_file_of_another_key_is_damaged() -> None:
    with pytest.raises(Damaged, match="key"):
        decode(bytes(32), file_of(SMALL))


def test_a_sound_safetensors_file_of_someone_else_is_damaged() -> None:
    foreign = safetensors.numpy.save({"keys": np.zeros(4, np.float32)})
    with pytest.raises(Damaged):
        decode(KEY, np.frombuffer(foreign, np.uint8))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 70) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["__metadata__", "dtype", "shape", "data_offsets", "x"]), inner)
    ),
    max_leaves=8,
)


@given(json_values, st.binary(max_size=20))
def test_any_json_in_place_of_the_header_is_damage(value, data: bytes) -> None:
    text = json.dumps(value).encode()
    with pytest.raises(Damaged):
        decode(KEY, np.frombuffer(len(text).to_bytes(8, "little") + text + data, np.uint8))


@given(st.binary(max_size=200))
def test_any_bytes_in_place_of_a_file_are_damage(content: bytes) -> None:
    with pytest.raises(Damaged):
        decode(KEY, np.frombuffer(content, np.uint8))


def test_a_header_nested_without_end_is_damage() -> None:
    text = b"[" * 100_000
    with pytest.raises(Damaged):
        decode(KEY, np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("x", "F8", (1,), b"a"), "unknown dtype"),
        (("x", "U8", (2,), b"a"), "has 1 bytes of data, its shape 2"),
        (("x", "U8", (-1, -1), b"a"), "impossible shape"),
        (("x", "U8", (1.0,), b"a"), "impossible shape"),
        (("ü", "U8", (1,), b"a"), "not ASCII"),
        (("x", "U8", (4,), np.zeros((4, 2), np.uint8)[:, 0]), "not contiguous"),
    ],
)
def test_a_tensor_that_cannot_be_stored_is_refused_at_once(fields, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tensor(*fields)


@pytest.mark.parametrize("names", [("a", "a"), ("__metadata__",)])
def test_names_that_clash_are_refused(names) -> None:
    with pytest.raises(ValueError, match="names of their own"):
        require_names([Tensor(name, "U8", (0,), b"") for name in names])
