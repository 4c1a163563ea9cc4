"""A GGUF file computes what the same weights in a folder compute, whatever the family and the type."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import gguf as oracle
import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from tests.models.gguf_files import ARCHITECTURES, Tiny, make, matrices, stored, write_folder, write_gguf
from treadle.errors import LoadError
from treadle.models.folder_model import load_folder
from treadle.models.gguf import read
from treadle.models.gguf_model import build

IDS = mx.array([[5, 17, 250, 99, 3, 4, 120, 121, 7, 8, 9, 200, 201, 202]])


def logits(model: Any) -> NDArray[np.float32]:
    return np.array(model(IDS).astype(mx.float32))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_logits_equal_those_of_the_folder(family: str, tied: bool, tmp_path: Path) -> None:
    tiny = make(family, tie_word_embeddings=tied)
    file = write_gguf(tmp_path / "tiny.gguf", tiny)
    model, config = build(read(file), "cpu", dense=False)
    folder = write_folder(tmp_path / "folder", tiny, file)
    reference, _, _ = load_folder(folder, "cpu", "packed")
    np.testing.assert_allclose(logits(model), logits(reference), atol=2e-5)
    assert config["vocab_size"] == tiny.config["vocab_size"]


def test_biases_of_llama_are_reordered_too(tmp_path: Path) -> None:
    tiny = make("llama", attention_bias=True, mlp_bias=True)
    file = write_gguf(tmp_path / "tiny.gguf", tiny)
    model, _ = build(read(file), "cpu", dense=False)
    reference, _, _ = load_folder(write_folder(tmp_path / "folder", tiny, file), "cpu", "packed")
    np.testing.assert_allclose(logits(model), logits(reference), atol=2e-5)


def rounded(tiny: Tiny, kind: Kind) -> dict[str, NDArray[np.float32]]:
    """The values that a quantised file holds, by its names."""
    keep = matrices(kind)
    return {name: value if keep(name) == Kind.F32 else _round(value, kind) for name, value in stored(tiny).items()}


def _round(value: NDArray[np.float32], kind: Kind) -> NDArray[np.float32]:
    return np.asarray(oracle.quants.dequantize(oracle.quants.quantize(value, kind), kind))


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize(
    "kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.MXFP4, Kind.F16, Kind.BF16]
)
def test_quantised_files_compute_what_their_values_compute(
    kind: Kind, dense: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = make("llama")
    model, config = build(read(write_gguf(tmp_path / "packed.gguf", tiny, matrices(kind))), "cpu", dense=dense)
    held = rounded(tiny, kind)
    monkeypatch.setattr("tests.models.gguf_files.stored", lambda tiny: held)
    reference, _ = build(read(write_gguf(tmp_path / "plain.gguf", tiny)), "cpu", dense=False)
    np.testing.assert_allclose(logits(model), logits(reference), atol=2e-4)
    assert ("quantization" in config) == (not dense and kind not in (Kind.F16, Kind.BF16))


def test_floats_are_half_precision_off_the_cpu(tmp_path: Path) -> None:
    for kind, expected in ((Kind.Q8_0, mx.float16), (Kind.F16, mx.float16), (Kind.BF16, mx.bfloat16)):
        file = write_gguf(tmp_path / f"{kind.name}.gguf", make("qwen3"), matrices(kind))
        model, _ = build(read(file), "metal", dense=False)
        assert model.model.norm.weight.dtype == expected
        assert model(IDS).dtype == expected


def test_norms_of_gemma3_are_rounded_after_their_offset_is_taken_off(tmp_path: Path) -> None:
    tiny = make("gemma3")
    model, _ = build(read(write_gguf(tmp_path / "t.gguf", tiny, matrices(Kind.F16))), "metal", dense=False)
    weight = tiny.weights["model.norm.weight"]
    exact = ((weight + np.float32(1)) - np.float32(1)).astype(np.float16)
    np.testing.assert_array_equal(np.array(model.model.norm.weight), exact)


def test_the_log_tells_what_became_of_each_type(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "treadle.models.gguf_model")
    build(read(write_gguf(tmp_path / "t.gguf", make("llama"), matrices(Kind.Q5_1))), "cpu", dense=False)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "5 x F32 dense" in line
    assert "16 x Q5_1 repacked to 5-bit groups of 32" in line


def test_a_missing_tensor_is_one_sentence(tmp_path: Path) -> None:
    tiny = make("llama")
    del tiny.weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(LoadError, match="do not fit its architecture") as caught:
        build(read(write_gguf(tmp_path / "t.gguf", tiny)), "cpu", dense=False)
    assert "\n" not in caught.value.message
