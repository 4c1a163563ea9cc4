"""A model on disk becomes a `LoadedModel`, or one sentence that says why not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf as oracle
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from mlx.utils import tree_flatten

from tests.models.builtin import builtin
from tests.models.gguf_files import TEMPLATE, Tiny, make, matrices, write_folder, write_gguf
from treadle.errors import ConfigError, LoadError
from treadle.models.architectures import model_classes
from treadle.models.folder_model import load_folder, load_folder_tokenizer
from treadle.models.load import fingerprint, load_model, sampling_defaults
from treadle.models.placement import hold_dense
from treadle.models.sources import ResolvedSource
from treadle.native import build
from treadle.runtime import mlx_lm_module

IDS = mx.array([[5, 17, 250, 99, 3, 4, 120]])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", make("llama"), matrices(Kind.Q4_1))


@pytest.fixture
def folder(tmp_path: Path, file: Path) -> Path:
    return write_folder(tmp_path / "folder", make("llama"), file)


def source(path: Path) -> ResolvedSource:
    return ResolvedSource(path.stem, "folder" if path.is_dir() else "gguf", path, "r1")


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


def test_a_gguf_file_is_ready_to_serve(file: Path) -> None:
    loaded = load_model(source(file), None)
    assert (loaded.name, loaded.source) == ("tiny", str(file))
    assert (loaded.caps.context_length, loaded.caps.vocab_size) == (256, len(loaded.tokenizer))
    assert loaded.chat_template == TEMPLATE
    assert loaded.stop_ids == {0, 2}  # the declared end, and the one that the template writes
    assert loaded.model(IDS).shape == (1, IDS.size, loaded.caps.vocab_size)


def test_a_folder_is_ready_to_serve(folder: Path) -> None:
    (folder / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "top_k": 20, "eos_token_id": [0, 9]})
    )
    loaded = load_model(source(folder), None)
    assert loaded.caps.context_length == 256
    assert loaded.stop_ids == {0, 2, 9}
    assert loaded.defaults == {"temperature": 0.6, "top_k": 20}
    assert loaded.chat_template == TEMPLATE
    assert loaded.tokenizer.is_fast


def test_sampling_settings_of_a_gguf_file_become_defaults(tmp_path: Path) -> None:
    def extra(writer: oracle.GGUFWriter) -> None:
        writer.add_sampling_temp(0.5)
        writer.add_sampling_top_k(40)

    tiny = make("llama")
    path = write_gguf(tmp_path / "s.gguf", Tiny(tiny.family, tiny.config, tiny.weights, extra))
    assert load_model(source(path), None).defaults == {"temperature": 0.5, "top_k": 40}


def test_defaults_are_empty_where_the_model_does_not_sample() -> None:
    assert sampling_defaults({"do_sample": False, "temperature": 0.7}) == {}
    assert sampling_defaults({"temperature": None, "top_p": 0.9, "max_length": 20}) == {"top_p": 0.9}


def test_the_context_can_be_lowered_but_not_raised(file: Path) -> None:
    assert load_model(source(file), 100).caps.context_length == 100
    with pytest.raises(ConfigError, match=r"300 tokens.*256") as caught:
        load_model(source(file), 300)
    assert caught.value.param == "context_length"


def test_a_model_without_a_context_length_asks_for_one(folder: Path) -> None:
    edit_config(folder, max_position_embeddings=None)
    with pytest.raises(ConfigError, match="context_length"):
        load_model(source(folder), None)
    assert load_model(source(folder), 64).caps.context_length == 64


@pytest.mark.parametrize(
    ("form", "backend", "parameters", "dense"),
    [
        ("auto", "cpu", 62, True),
        ("auto", "cpu", 63, False),
        ("auto", "cuda", 1, False),
        ("auto", "metal", 1, False),
        ("dense", "cuda", 1000, True),
        ("packed", "cpu", 1, False),
    ],
)
def test_weights_are_dense_where_that_is_faster_and_fits(
    form: Any, backend: Any, parameters: int, dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "kernels", object)
    assert hold_dense(form, backend, parameters, free_bytes=1000) is (form == "dense")
    monkeypatch.setattr(build, "kernels", lambda: None)
    assert hold_dense(form, backend, parameters, free_bytes=1000) is dense


def test_packed_and_dense_forms_of_a_file_agree(file: Path) -> None:
    packed, dense = (load_model(source(file), None, weights=form) for form in ("packed", "dense"))
    assert "quantization" in packed.config
    assert "quantization" not in dense.config
    np.testing.assert_allclose(np.array(packed.model(IDS)), np.array(dense.model(IDS)), atol=2e-4)
    assert packed.revision != dense.revision


def quantised_folder(folder: Path, dtype: Any) -> Path:
    """The folder's model with 4-bit weights, the way mlx-lm saves one."""
    model, config, _ = load_folder(folder, "metal", "packed")
    model.set_dtype(dtype)
    nn.quantize(model, group_size=32, bits=4)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    edit_config(folder, quantization={"group_size": 32, "bits": 4})
    assert config["model_type"] == "llama"
    return folder


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_packed_folders_get_float32_scales_on_a_cpu(folder: Path, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    quantised_folder(folder, dtype)
    model, _, dense = load_folder(folder, "cpu", "packed")
    assert not dense
    kinds = {value.dtype for _, value in tree_flatten(model.parameters())}
    assert kinds == {mx.uint32, mx.float32}
    monkeypatch.setattr(build, "kernels", lambda: None)
    expanded, _, dense = load_folder(folder, "cpu", "auto")
    assert dense
    assert {value.dtype for _, value in tree_flatten(expanded.parameters())} == {mx.float32}
    np.testing.assert_allclose(np.array(model(IDS)), np.array(expanded(IDS)), atol=2e-4)


def test_packed_folders_stay_as_they_are_elsewhere(folder: Path) -> None:
    quantised_folder(folder, mx.float16)
    model, _, dense = load_folder(folder, "metal", "auto")
    assert not dense
    assert {value.dtype for _, value in tree_flatten(model.parameters())} == {mx.uint32, mx.float16}


def test_half_precision_folders_compute_in_float32_on_a_cpu(tmp_path: Path, file: Path) -> None:
    folder = write_folder(tmp_path / "half", make("llama"), file, mx.bfloat16)
    model, _, _ = load_folder(folder, "cpu", "auto")
    assert model(IDS).dtype == mx.float32


def cut_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def rename_a_weight(folder: Path) -> None:
    arrays = mx.load(str(folder / "model.safetensors"))
    arrays["model.layers.0.other.weight"] = arrays.pop("model.layers.0.mlp.up_proj.weight")
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[]"), "not a JSON object"),
        (lambda folder: edit_config(folder, model_type=None), "names no model_type"),
        (lambda folder: edit_config(folder, model_type="no_such_model"), "'no_such_model' are not supported"),
        (lambda folder: edit_config(folder, hidden_size=None), "cannot be loaded"),
        (lambda folder: (folder / "model.safetensors").unlink(), "safetensors"),
        (cut_weights, "cannot be"),
        (rename_a_weight, "cannot be loaded"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer"),
        (lambda folder: (folder / "generation_config.json").write_text("no"), "generation_config.json"),
    ],
)
def test_a_damaged_folder_is_refused_with_one_sentence(folder: Path, damage: Any, words: str) -> None:
    damage(folder)
    with pytest.raises(LoadError, match=words) as caught:
        load_model(source(folder), None)
    assert "\n" not in caught.value.message


def test_a_folder_whose_architecture_transformers_does_not_know_still_has_its_tokenizer(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    edit_config(folder, model_type="known_to_nobody")
    assert load_folder_tokenizer(folder).encode("a") != []


def test_a_model_file_that_exits_when_imported_is_an_error_and_no_exit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def leave(config: dict[str, Any]) -> Any:
        raise SystemExit(1)

    monkeypatch.setattr(mlx_lm_module("utils"), "_get_classes", leave)
    with pytest.raises(LoadError, match="'olmo' cannot be used: it tried to exit"):
        model_classes({"model_type": "olmo"})


def test_code_that_comes_with_a_model_is_not_run(folder: Path) -> None:
    (folder / "custom.py").write_text("raise SystemExit('ran')")
    edit_config(folder, model_file="custom.py")
    with pytest.raises(LoadError, match="custom module"):
        load_model(source(folder), None)


def test_the_revision_follows_names_sizes_and_contents(tmp_path: Path) -> None:
    paths = (tmp_path / "a.bin", tmp_path / "b.bin")
    for path in paths:
        path.write_bytes(bytes(200_000))
    first = fingerprint(paths, "packed")
    assert first == fingerprint(paths, "packed")
    paths[1].write_bytes(bytes(199_999) + b"x")
    second = fingerprint(paths, "packed")
    shutil.move(paths[1], tmp_path / "c.bin")
    third = fingerprint((paths[0], tmp_path / "c.bin"), "packed")
    assert len({first, second, third, fingerprint(paths[:1], "packed")}) == 4


def test_the_built_in_model_knows_the_capital_of_france() -> None:
    loaded = load_model(builtin(), None)
    cache = mlx_lm_module("models.cache").make_prompt_cache(loaded.model)
    ids = loaded.tokenizer.encode("The capital of France is")
    logits = loaded.model(mx.array([ids]), cache=cache)
    assert loaded.tokenizer.decode([mx.argmax(logits[0, -1]).item()]) == " Paris"
    assert loaded.caps.context_length == 8192
    assert loaded.stop_ids == {2}
