"""From a configuration and a catalogue to models that can be loaded, and what they will weigh."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from tests.models.gguf_files import make, write_folder, write_gguf
from treadle.config import Config
from treadle.errors import ConfigError, LoadError
from treadle.models.catalogue import parse_catalogue
from treadle.models.folder_model import load_folder
from treadle.models.prepare import offer
from treadle.models.sources import resolve
from treadle.models.weigh import weight_bytes
from treadle.native import build

PLENTY = 10**12


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "tiny", make("llama"), write_gguf(tmp_path / "tiny.gguf", make("llama")))


def nbytes(model: nn.Module) -> int:
    return sum(value.nbytes for _, value in tree_flatten(model.parameters()))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("free", [PLENTY, 0])
def test_a_folder_weighs_what_it_takes(
    folder: Path, dtype: mx.Dtype, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(folder, make("llama"), folder.parent / "tiny.gguf", dtype)
    for backend in ("cpu", "metal"):
        monkeypatch.setattr("treadle.system.free_memory", lambda: free)
        taken = nbytes(load_folder(folder, backend, "auto")[0])  # type: ignore[arg-type]
        guess = weight_bytes(resolve(str(folder)), backend, free)  # type: ignore[arg-type]
        assert 0.95 * taken <= guess <= 1.05 * taken


def test_packed_weights_are_counted_as_they_will_be_held(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config, _ = load_folder(folder, "metal", "packed")
    nn.quantize(model, group_size=32, bits=4)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps({**config, "quantization": {"group_size": 32, "bits": 4}}))
    source = resolve(str(folder))
    assert weight_bytes(source, "metal", PLENTY) == nbytes(model)
    monkeypatch.setattr(build, "kernels", object)
    kept, _, dense = load_folder(folder, "cpu", "auto")
    assert not dense and weight_bytes(source, "cpu", PLENTY) == nbytes(kept)
    monkeypatch.setattr(build, "kernels", lambda: None)
    expanded, _, dense = load_folder(folder, "cpu", "dense")
    assert dense and weight_bytes(source, "cpu", PLENTY) == nbytes(expanded)


def test_a_gguf_file_is_counted_dense_where_it_becomes_so(folder: Path) -> None:
    file = folder.parent / "tiny.gguf"
    stored = weight_bytes(resolve(str(file)), "metal", PLENTY)
    assert stored == file.stat().st_size
    assert 0 < weight_bytes(resolve(str(file)), "cpu", PLENTY) <= stored


def test_a_damaged_file_is_told_before_anything_is_loaded(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 40)
    with pytest.raises(LoadError, match="is damaged"):
        weight_bytes(resolve(str(folder)), "cpu", PLENTY)


def test_an_entry_is_loaded_as_it_says(folder: Path) -> None:
    text = f"""[models.own]
source = "{folder}"
context_length = 99
chat_template = "{{{{ messages[0].content }}}}<|end|>"
sampling = {{ temperature = 0.3 }}
"""
    models = offer(Config(model="own"), parse_catalogue(text, folder / "models.toml"))
    prepared = models.first.prepare()
    loaded = prepared.load()
    assert (loaded.name, loaded.caps.context_length, loaded.defaults) == ("own", 99, {"temperature": 0.3})
    assert loaded.chat_template == loaded.tokenizer.chat_template == "{{ messages[0].content }}<|end|>"
    assert loaded.tokenizer.convert_tokens_to_ids("<|end|>") in loaded.stop_ids
    assert prepared.num_bytes == pytest.approx(nbytes(loaded.model), rel=0.05)


@pytest.mark.parametrize("header", [[1], {"a": 5}, {"a": {}}, {"a": {"shape": [2], "data_offsets": [0]}}])
def test_a_header_that_describes_no_tensors_is_damage(folder: Path, header: Any) -> None:
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(LoadError, match=r"model\.safetensors is damaged; download the model again\."):
        weight_bytes(resolve(str(folder)), "cpu", PLENTY)


def test_the_model_of_the_command_line_comes_first_by_any_of_its_names(folder: Path) -> None:
    catalogue = parse_catalogue("[models.a]\nsource='x'\naliases=['b']\n[models.c]\nsource='y'", Path("models.toml"))
    assert [(recipe.name, recipe.source) for recipe in offer(Config(model="c"), catalogue).others] == [("a", "x")]
    assert offer(Config(model="b"), catalogue).first.name == "a"
    models = offer(Config(model=str(folder)), catalogue)
    assert (models.first.name, models.first.aliases) == ("tiny", (str(folder),))
    assert [recipe.name for recipe in models.others] == ["a", "c"]


def test_rules_may_name_the_model_of_the_command_line_but_nobody_unknown() -> None:
    catalogue = parse_catalogue("[rules]\n'claude-*' = 'smollm2'", Path("models.toml"))
    assert offer(Config(), catalogue).rules == {"claude-*": "smollm2"}
    with pytest.raises(ConfigError, match=r"models\.toml, line 2: rules\.claude-\* names the model 'smollm2', but"):
        offer(Config(model="gemma3-270m"), catalogue)


def test_a_model_at_odds_with_the_server_is_named() -> None:
    catalogue = parse_catalogue("[models.a]\nsource='x'\ndraft_model='y'", Path("models.toml"))
    with pytest.raises(ConfigError, match="The model 'a': draft_model names 'y', but speculation is 'off'"):
        offer(Config(speculation="off"), catalogue)


def test_two_models_of_one_name_are_refused(folder: Path) -> None:
    catalogue = parse_catalogue("[models.tiny]\nsource='x'", Path("models.toml"))
    with pytest.raises(ConfigError, match="has the name 'tiny' of another one"):
        offer(Config(model=str(folder)), catalogue)
