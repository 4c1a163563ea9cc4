"""A folder says whether its model embeds, and how; what cannot be done right is refused with a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.models.embedders import LAST, MEAN, embedder
from treadle.errors import LoadError
from treadle.models.embedding import embedding_of
from treadle.models.load import load_model
from treadle.models.sources import resolve
from treadle.types import Embedding, Pooling


def found(folder: Path, name: str = "m", *, headless: bool = False, **config: Any) -> Embedding | None:
    return embedding_of(folder, name, config, headless=headless)


def described(folder: Path, pooling: dict[str, Any], stages: tuple[str, ...] = ("Transformer", "Pooling")) -> Path:
    modules = [
        {"idx": i, "path": f"{i}_{stage}", "type": f"sentence_transformers.models.{stage}"}
        for i, stage in enumerate(stages)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def test_a_folder_of_a_model_that_writes_is_none_of_one_that_embeds(tmp_path: Path) -> None:
    assert found(tmp_path, "Qwen3-8B", architectures=["Qwen3ForCausalLM"]) is None


def test_the_pooling_is_the_one_that_the_folder_names(tmp_path: Path) -> None:
    for pooling, kind in ((MEAN, Pooling.MEAN), (LAST, Pooling.LAST), ({"pooling_mode": "mean"}, Pooling.MEAN)):
        embedding = found(described(tmp_path, pooling))
        assert embedding is not None and embedding.pooling is kind


@pytest.mark.parametrize(
    "pooling", [{"pooling_mode_cls_token": True}, {"pooling_mode_max_tokens": True}, MEAN | LAST, {}]
)
def test_another_pooling_is_refused(tmp_path: Path, pooling: dict[str, Any]) -> None:
    embedding = found(described(tmp_path, pooling))
    assert embedding is not None and embedding.pooling is None and "pooling" in embedding.why


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"use_bidirectional_attention": True}, "attend"),
        ({"is_causal": False}, "attend"),
        ({"architectures": ["LlamaBidirectionalModel"]}, "attend"),
        ({"auto_map": {"AutoModel": "modeling.Own"}}, "code of its own"),
    ],
)
def test_a_model_that_reads_in_another_way_is_refused(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    described(tmp_path, MEAN)
    embedding = found(tmp_path, **config)
    assert embedding is not None and embedding.pooling is None and says in embedding.why
    with pytest.raises(LoadError, match=says):
        found(tmp_path, headless=True, **config)


def test_a_stage_that_is_not_built_is_refused_by_its_name(tmp_path: Path) -> None:
    embedding = found(described(tmp_path, MEAN, ("Transformer", "Pooling", "Dense", "Normalize")))
    assert embedding is not None and embedding.pooling is None and "Dense" in embedding.why


def test_a_name_does_where_a_conversion_lost_the_files(tmp_path: Path) -> None:
    embedding = found(tmp_path, "Qwen3-Embedding-0.6B-4bit")
    assert embedding is not None and (embedding.pooling, embedding.least_size) == (Pooling.LAST, 32)


def test_the_folder_says_what_stands_before_texts_and_how_long_they_may_be(tmp_path: Path) -> None:
    described(tmp_path, MEAN)
    settings = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 128}))
    embedding = found(tmp_path, matryoshka_dimensions=[16, 32])
    assert embedding is not None
    assert (embedding.prefix, embedding.context_length, embedding.sizes) == ("query: ", 128, (16, 32))


def test_a_damaged_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text('{"a": 1}')
    with pytest.raises(LoadError, match="not a JSON list"):
        found(tmp_path)


def test_weights_saved_without_their_prefix_are_loaded(tmp_path: Path) -> None:
    made = embedder(tmp_path / "trunk", "llama", MEAN, trunk=True, architectures=["LlamaModel"])
    loaded = load_model(resolve(str(made.folder)), None)
    embedding = loaded.caps.embedding
    assert embedding is not None
    assert (embedding.pooling, embedding.size, embedding.generates) == (Pooling.MEAN, 64, False)


def test_a_model_that_was_not_made_to_embed_says_so_after_loading(tmp_path: Path) -> None:
    made = embedder(tmp_path / "plain", "qwen3", None, architectures=["Qwen3ForCausalLM"])
    assert load_model(resolve(str(made.folder)), None).caps.embedding is None
