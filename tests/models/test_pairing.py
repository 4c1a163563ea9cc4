"""A small model drafts for a large one of its own family and vocabulary, and for no other."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.models.gguf_files import make, write_folder, write_gguf
from tests.tiny import CONFIGS, tiny
from treadle.config import Config
from treadle.errors import ConfigError, LoadError
from treadle.models import pairing
from treadle.models.catalogue import Entry
from treadle.models.load import LoadedModel, load_model
from treadle.models.prepare import load_entry, prepare
from treadle.models.sources import KnownModel, ResolvedSource, resolve
from treadle.types import Batching, LayerKind

LARGE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., ResolvedSource]:
    """Writes a tiny model's folder by its name."""
    tokenizer = write_gguf(tmp_path / "tokenizer.gguf", make("llama"))

    def written(name: str, family: str = "llama", **sizes: Any) -> ResolvedSource:
        return resolve(str(write_folder(tmp_path / name, make(family, **sizes), tokenizer)))

    return written


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Says which models are known."""

    def are(*sources: ResolvedSource, downloaded: bool = True) -> None:
        known = [
            KnownModel(source.name, "", downloaded, 100 + i, source.path if downloaded else None)
            for i, source in enumerate(sources)
        ]
        monkeypatch.setattr(pairing, "known_models", lambda: known)

    return are


def refusal(target: ResolvedSource, named: ResolvedSource) -> str:
    with pytest.raises(LoadError) as caught:
        pairing.draft_source(target, str(named.path), None)
    assert "\n" not in caught.value.message
    assert caught.value.message.startswith(f"{named.name} cannot draft for large: ")
    return caught.value.message


def other_words(source: ResolvedSource) -> ResolvedSource:
    """The same model with two tokens that have changed places."""
    path = source.path / "tokenizer.json"
    told = json.loads(path.read_text())
    vocabulary = told["model"]["vocab"]
    a, b = list(vocabulary)[20:22]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    path.write_text(json.dumps(told))
    return source


def test_a_named_model_that_fits_is_taken(write: Callable[..., ResolvedSource]) -> None:
    large, small = write("large", **LARGE), write("small")
    assert pairing.draft_source(large, str(small.path), None) == small


def test_a_named_model_that_does_not_fit_is_refused_with_the_reason(write: Callable[..., ResolvedSource]) -> None:
    large, small = write("large", **LARGE), write("small")
    assert "family qwen3, not llama" in refusal(large, write("other", "qwen3"))
    assert "more than a quarter" in refusal(large, write("twin", **LARGE))
    words = refusal(large, other_words(small))
    assert "vocabularies differ (id " in words


def test_what_cannot_be_found_or_read_is_refused(write: Callable[..., ResolvedSource], tmp_path: Path) -> None:
    large, small = write("large", **LARGE), write("small")
    with pytest.raises(LoadError, match="There is no file or folder"):
        pairing.draft_source(large, str(tmp_path / "nowhere"), None)
    (small.path / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(LoadError, match="damaged"):
        pairing.draft_source(large, str(small.path), None)


def test_one_that_is_here_is_found_by_itself_the_smallest_first(
    write: Callable[..., ResolvedSource], on_disk: Callable[..., None]
) -> None:
    large, first, second = write("large", **LARGE), write("first"), write("second")
    wrong = [write("other", "qwen3"), write("twin", **LARGE), other_words(write("words")), large]
    broken = write("broken")
    (broken.path / "model.safetensors").write_bytes(b"junk")
    on_disk(*wrong, broken, second, first)
    found = pairing.draft_source(large, "auto", None)
    assert found is not None and (found.name, found.path) == ("second", second.path)
    on_disk(*wrong, broken)
    assert pairing.draft_source(large, "auto", None) is None
    assert pairing.draft_source(large, "none", None) is None


def test_nothing_is_ever_downloaded_for_it(
    write: Callable[..., ResolvedSource], on_disk: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    large = write("large", **LARGE)
    on_disk(write("small"), downloaded=False)
    monkeypatch.setattr("treadle.models.hub.fetch", lambda *_: pytest.fail("it asked the Hub"))
    assert pairing.draft_source(large, "auto", None) is None


def test_a_gguf_file_drafts_for_a_folder_of_the_same_words(
    write: Callable[..., ResolvedSource], tmp_path: Path
) -> None:
    large = write("large", **LARGE)
    small = resolve(str(write_gguf(tmp_path / "small.gguf", make("llama"))))
    assert pairing.draft_source(large, str(small.path), None) == small


def loaded(write: Callable[..., ResolvedSource]) -> LoadedModel:
    return load_model(write("large", **LARGE), None)


def test_a_loaded_pair_is_checked_again(write: Callable[..., ResolvedSource], tmp_path: Path) -> None:
    large, small = loaded(write), write("small")
    draft = pairing.checked(large, partial(load_model, small, None), "small", True)
    assert draft is not None and draft.name == "small"


def test_a_recurrent_model_cannot_draft(write: Callable[..., ResolvedSource]) -> None:
    large, small = loaded(write), write("small")
    recurrent = _recurrent(small)
    with pytest.raises(LoadError, match="small cannot draft for large: its recurrent layers"):
        pairing.checked(large, lambda: recurrent, "small", True)
    assert pairing.checked(large, lambda: recurrent, "small", False) is None


@pytest.mark.parametrize("name", CONFIGS)
def test_recurrent_models_and_those_that_cannot_be_padded_are_unfit(name: str) -> None:
    _, caps = tiny(name)
    reason = pairing.unfit(caps)
    if LayerKind.STATE in caps.layers or caps.batching is not Batching.RAGGED:
        assert reason is not None and ("recurrent" in reason or "different length" in reason)
    else:
        assert reason is None


def _recurrent(source: ResolvedSource) -> LoadedModel:
    model, caps = tiny("mamba")
    return replace(load_model(source, None), model=model, caps=caps)


def test_one_that_was_only_found_and_cannot_be_loaded_is_left_out(write: Callable[..., ResolvedSource]) -> None:
    large, small = loaded(write), write("small")
    (small.path / "model.safetensors").write_bytes(b"junk")
    assert pairing.checked(large, partial(load_model, small, None), "small", False) is None
    with pytest.raises(LoadError):
        pairing.checked(large, partial(load_model, small, None), "small", True)


def test_a_pair_is_prepared_and_weighed_together(
    write: Callable[..., ResolvedSource], on_disk: Callable[..., None]
) -> None:
    large, small = write("large", **LARGE), write("small")
    entry = Entry("large", str(large.path))
    on_disk(small)
    alone = prepare(entry, Config(speculation="lookup"))
    found = prepare(entry, Config())
    named = prepare(entry, Config(draft_model=str(small.path)))
    assert alone.num_bytes < found.num_bytes == named.num_bytes
    assert found.lighter is not None and found.lighter.num_bytes == alone.num_bytes
    assert named.lighter is None and alone.lighter is None
    both = found.load()
    assert both.draft is not None and both.draft.name == "small"
    assert both.footprint.row_bytes == both.caps.footprint.row_bytes + both.draft.caps.footprint.row_bytes
    assert found.lighter.load().draft is None and load_entry(large, entry, Config()).draft is None


def test_drafts_of_a_model_need_a_model(write: Callable[..., ResolvedSource], on_disk: Callable[..., None]) -> None:
    large = write("large", **LARGE)
    on_disk()
    with pytest.raises(LoadError, match="No model that is here can draft for large"):
        prepare(Entry("large", str(large.path)), Config(speculation="draft"))
    with pytest.raises(ConfigError):
        Config(speculation="draft", draft_model="none")
