"""Seeing models from their folders: what is found at load, and what is said where something is missing."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.vision.families import CONFIGS, tokenizer
from tests.vision.folders import FLAT, nest, write_folder
from treadle.errors import LoadError
from treadle.models import calibration, vlm, vlm_folder
from treadle.models.load import load_model
from treadle.models.sources import resolve


@pytest.fixture(autouse=True)
def tried_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(calibration, "folder", lambda: tmp_path / "calibration")


def opened(folder: Path) -> Any:
    return load_model(resolve(str(folder)), None)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_folder_of_every_family_is_loaded_and_sees(tmp_path: Path, family: str) -> None:
    model = opened(write_folder(tmp_path / family, family))
    assert model.caps.vision.works, model.caps.vision.why
    assert model.caps.vision.family == family
    assert model.reader is not None and model.card.reader is model.reader
    assert model.caps.vocab_size == 288 and model.caps.context_length == 512


@pytest.mark.parametrize("family", FLAT)
def test_a_folder_as_newer_transformers_write_it_is_the_same_model(tmp_path: Path, family: str) -> None:
    settings = {"rope_theta": 5000.0, "tie_word_embeddings": False}
    flat = opened(write_folder(tmp_path / "flat", family, **settings))
    nested = opened(nest(write_folder(tmp_path / "nested", family, **settings)))
    assert nested.caps.vision.works, nested.caps.vision.why
    assert nested.caps.context_length == 512 and nested.stop_ids == flat.stop_ids
    ids = mx.array([tokenizer().encode("The same words.", add_special_tokens=False)])
    for far in (0, 100):  # positions are turned by the same base and sections
        positions = mx.arange(ids.shape[1])[None, None] * mx.array([1, 2, 3])[:, None, None] + far
        logits = [m.model(ids, m.model.make_cache(), positions=positions) for m in (flat, nested)]
        assert mx.array_equal(*logits).item()


def test_positions_that_are_stretched_in_a_way_mlx_vlm_does_not_know_are_refused(tmp_path: Path) -> None:
    folder = nest(write_folder(tmp_path / "m", "qwen2_vl"))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["rope_parameters"]["rope_type"] = "yarn"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match="rope_scaling type must be"):
        opened(folder)


@pytest.mark.parametrize("weights", ["packed", "dense"])
@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3"])
def test_quantised_weights_see_in_either_form(tmp_path: Path, family: str, weights: Any) -> None:
    folder = write_folder(tmp_path / "m", family, bits=8)
    model = load_model(resolve(str(folder)), None, weights=weights)
    assert model.caps.vision is not None and model.caps.vision.works, model.caps.vision


@pytest.mark.parametrize("family", ["idefics3", "smolvlm"])
def test_without_the_extra_a_model_for_images_alone_is_refused_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr(vlm, "_installed", lambda package: package != "mlx-vlm")
    with pytest.raises(LoadError, match=r"Images need mlx-vlm, .*pip install 'treadle\[vision\]'"):
        opened(write_folder(tmp_path / "m", family))


def test_without_the_extra_a_model_that_mlx_lm_knows_is_loaded_for_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vlm, "_installed", lambda package: False)
    with caplog.at_level(logging.WARNING):
        model = opened(write_folder(tmp_path / "m", "qwen2_vl"))
    assert model.reader is None and not model.caps.vision.works
    assert "Images need mlx-vlm and pillow" in model.caps.vision.why
    assert "for text alone" in caplog.text


def test_a_family_that_is_not_supported_says_so_by_name(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", "llava", model_type="paligemma")
    with pytest.raises(LoadError, match="Images for models of type 'paligemma' are not supported"):
        opened(folder)


def test_without_settings_of_its_processor_a_model_sees_nothing_and_answers_text(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", "llava")
    (folder / "preprocessor_config.json").unlink()
    model = opened(folder)
    assert model.reader is None
    assert "no preprocessor_config.json" in model.caps.vision.why


def test_settings_may_lie_in_the_processor_s_own_file(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", "llava")
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").unlink()
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    assert opened(folder).caps.vision.works


def test_a_template_in_a_file_of_its_own_is_read(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", "llava")
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": tokenizer().chat_template}))
    assert opened(folder).chat_template == tokenizer().chat_template


def test_a_model_whose_logits_differ_is_refused_for_images_with_the_sentence_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vlm.Seeing, "encode", lambda self, picture: (mx.zeros((picture.num_rows, 32)),))
    model = opened(write_folder(tmp_path / "m", "qwen2_vl"))
    assert model.reader is None and not model.caps.vision.works
    assert "its logits differ from mlx-vlm's" in model.caps.vision.why


def test_a_model_whose_encoder_raises_is_refused_for_images_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Any, picture: Any) -> Any:
        raise ValueError("no light")

    monkeypatch.setattr(vlm.Seeing, "encode", broken)
    assert "ValueError: no light" in opened(write_folder(tmp_path / "m", "qwen2_vl")).caps.vision.why


def test_a_folder_with_the_text_part_of_the_weights_alone_has_no_tower(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", "qwen2_vl")
    assert vlm_folder.has_tower(folder)
    weights = {name: a for name, a in mx.load(str(folder / "model.safetensors")).items() if "vision" not in name}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    assert not vlm_folder.has_tower(folder)
    model = opened(folder)
    assert model.reader is None
    assert model.caps.vision.why == "Its folder has no weights of an image encoder."


def test_a_damaged_file_has_no_tower(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 40)
    assert not vlm_folder.has_tower(tmp_path)
