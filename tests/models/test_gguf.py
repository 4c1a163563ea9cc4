"""A GGUF file is read exactly, or refused with one sentence: never a crash."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf as oracle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models.gguf_files import TOKENS, Tiny, make, matrices, write_gguf
from treadle.errors import LoadError
from treadle.models.gguf import BLOCK_TYPES, architecture_of, read


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return write_gguf(path, make("llama"), matrices(oracle.GGMLQuantizationType.Q8_0))


def test_the_table_of_block_types_is_the_format_s() -> None:
    sizes = {number.value: pair for number, pair in oracle.GGML_QUANT_SIZES.items()}
    for number, kind in BLOCK_TYPES.items():
        assert oracle.GGMLQuantizationType(number).name == kind.name
        assert sizes[number] == (kind.elements, kind.size)


def test_metadata_and_tensors_are_what_the_oracle_reads(file: Path) -> None:
    opened, reference = read(file), oracle.GGUFReader(file)
    fields = {key: field.contents() for key, field in reference.fields.items() if not key.startswith("GGUF.")}
    assert opened.metadata == fields
    assert opened.require("tokenizer.ggml.tokens") == TOKENS
    assert list(opened.tensors) == [tensor.name for tensor in reference.tensors]
    for tensor in reference.tensors:
        ours = opened.tensors[tensor.name]
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert ours.type.name == tensor.tensor_type.name
        np.testing.assert_array_equal(ours.raw.ravel(), np.asarray(tensor.data).view(np.uint8).ravel())


def test_all_kinds_of_metadata_are_read(tmp_path: Path) -> None:
    values = {"u8": 200, "i8": -3, "u16": 60000, "i16": -300, "u32": 1 << 31, "i32": -5, "u64": 1 << 40}

    def extra(writer: oracle.GGUFWriter) -> None:
        for name, value in values.items():
            kind = oracle.GGUFValueType[name.replace("u", "UINT").replace("i", "INT")]
            writer.add_key_value(f"x.{name}", value, kind)
        writer.add_int64("x.i64", -(1 << 40))
        writer.add_float32("x.f32", 0.5)
        writer.add_float64("x.f64", 0.1)
        writer.add_bool("x.bool", True)
        writer.add_string("x.text", "größe")
        writer.add_array("x.list", [1, 2, 3])

    tiny = make("qwen3")
    metadata = read(write_gguf(tmp_path / "m.gguf", Tiny(tiny.family, tiny.config, tiny.weights, extra))).metadata
    expected = {**values, "i64": -(1 << 40), "f32": 0.5, "f64": 0.1, "bool": True, "text": "größe"}
    assert {key: metadata[f"x.{key}"] for key in expected} == expected
    assert metadata["x.list"] == [1, 2, 3]


def test_version_2_is_read_like_version_3(file: Path, tmp_path: Path) -> None:
    data = bytearray(file.read_bytes())
    data[4:8] = struct.pack("<I", 2)
    older = tmp_path / "v2.gguf"
    older.write_bytes(data)
    assert read(older).metadata == read(file).metadata


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"", "cannot be read"),
        (b"GGUF", "truncated"),
        (b"PK\x03\x04" + bytes(40), "is not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "damaged"),
    ],
)
def test_what_is_not_a_readable_file_is_refused(tmp_path: Path, head: bytes, words: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(head)
    with pytest.raises(LoadError, match=words):
        read(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="cannot be read"):
        read(tmp_path / "none.gguf")


@given(data=st.data())
def test_a_file_cut_anywhere_is_refused(
    data: st.DataObject, file: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = file.read_bytes()
    path = tmp_path_factory.mktemp("cut") / "cut.gguf"
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 33))])  # at most 31 bytes are padding
    with pytest.raises(LoadError):
        read(path)


@given(data=st.data())
def test_damaged_bytes_are_read_or_refused_but_never_crash(
    data: st.DataObject, file: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    damaged = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, 12000))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        opened = read(path)
    except LoadError as error:
        assert error.message.count("\n") == 0
    else:
        assert all(tensor.raw.sum() >= 0 for tensor in opened.tensors.values())


def test_a_split_set_is_read_from_any_of_its_parts(tmp_path: Path) -> None:
    tiny = make("llama")
    whole = read(write_gguf(tmp_path / "whole.gguf", tiny))
    write_gguf(tmp_path / "split.gguf", tiny, split_max_tensors=7)
    parts = sorted(tmp_path.glob("split-*-of-*.gguf"))
    assert len(parts) > 1
    for part in parts:
        opened = read(part)
        assert opened.paths == tuple(parts)
        assert opened.architecture == "llama"
        assert set(opened.tensors) == set(whole.tensors)
        for name, tensor in opened.tensors.items():
            np.testing.assert_array_equal(tensor.raw, whole.tensors[name].raw)


def test_a_split_set_with_a_missing_part_is_refused_by_the_part_s_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "split.gguf", make("llama"), split_max_tensors=7)
    first, second, *_ = sorted(tmp_path.glob("split-*.gguf"))
    second.unlink()
    with pytest.raises(LoadError, match=second.name):
        read(first)


def test_missing_metadata_is_named(file: Path) -> None:
    opened = read(file)
    with pytest.raises(LoadError, match=r"no\.such\.key"):
        opened.require("no.such.key")
    with pytest.raises(LoadError, match=r"llama\.expert_count"):
        opened.size("expert_count")
    with pytest.raises(LoadError, match=r"blk\.9\.attn_q"):
        opened.tensor("blk.9.attn_q.weight")


def test_the_architecture_is_read_without_what_follows_it(file: Path, tmp_path: Path) -> None:
    assert architecture_of(file) == read(file).architecture
    begun = tmp_path / "begun.gguf"
    begun.write_bytes(file.read_bytes()[:200])
    assert architecture_of(begun) == read(file).architecture
    begun.write_bytes(file.read_bytes()[:30])
    with pytest.raises(LoadError, match=r"damaged|truncated"):
        architecture_of(begun)
