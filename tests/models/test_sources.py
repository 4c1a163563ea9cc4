"""What a user types is found, or one sentence says what to do; nothing partial passes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.wheels import build_model
from treadle.errors import LoadError
from treadle.models import packages, sources
from treadle.models.folders import cache_folder
from treadle.models.registry import PACKAGED, SMOLLM2


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))


def folder(path: Path, shards: list[str], index: list[str] | None = None) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    for shard in shards:
        (path / shard).write_bytes(b"weights")
    if index is not None:
        names = {f"tensor{i}": name for i, name in enumerate(index)}
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return path


def refusal(name: str | Path) -> str:
    with pytest.raises(LoadError) as caught:
        sources.resolve(str(name))
    assert "\n" not in caught.value.message
    return caught.value.message


def test_a_folder_is_found_and_its_revision_follows_its_weights(tmp_path: Path) -> None:
    path = folder(tmp_path / "demo", ["a.safetensors"], index=["a.safetensors"])
    first = sources.resolve(str(path))
    assert (first.name, first.kind, first.path) == ("demo", "folder", path)
    assert sources.resolve(str(path)) == first
    (path / "a.safetensors").write_bytes(b"other weights")
    assert sources.resolve(str(path)).revision != first.revision


def test_a_gguf_file_is_found_by_its_path_and_named_by_its_stem(tmp_path: Path) -> None:
    path = tmp_path / "Some.Model.Q4_1.gguf"
    path.write_bytes(b"GGUF")
    source = sources.resolve(str(path))
    assert (source.name, source.kind, source.path) == ("Some.Model.Q4_1", "gguf", path)


def test_a_home_relative_path_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder(tmp_path / "demo", ["model.safetensors"])
    assert sources.resolve("~/demo").path == tmp_path / "demo"


def test_a_local_folder_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    folder(tmp_path / "org" / "demo", ["model.safetensors"])
    assert sources.resolve("org/demo").name == "demo"


def test_an_incomplete_folder_is_refused_by_the_missing_part(tmp_path: Path) -> None:
    assert "b.safetensors is missing" in refusal(
        folder(tmp_path / "half", ["a.safetensors"], index=["a.safetensors", "b.safetensors"])
    )
    assert "no *.safetensors" in refusal(folder(tmp_path / "none", []))
    bare = tmp_path / "bare"
    bare.mkdir()
    assert "no config.json" in refusal(bare)
    (bare / "model.gguf").write_bytes(b"GGUF")
    assert "bare/model.gguf" in refusal(bare)
    broken = folder(tmp_path / "broken", ["a.safetensors"])
    (broken / "model.safetensors.index.json").write_text("{]")
    assert "not a readable index" in refusal(broken)


def test_a_broken_link_to_weights_counts_as_missing(tmp_path: Path) -> None:
    path = folder(tmp_path / "demo", ["a.safetensors"], index=["a.safetensors", "b.safetensors"])
    (path / "b.safetensors").symlink_to(tmp_path / "nowhere")
    assert "b.safetensors is missing" in refusal(path)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("smolm2", "There is no model 'smolm2'; did you mean smollm2?"),
        ("SmolLM2", "There is no model 'SmolLM2'; did you mean smollm2?"),
        ("gemma", "There is no model 'gemma'; did you mean gemma3-270m?"),
        ("./nothing", "There is no file or folder ./nothing."),
        ("nothing.gguf", "There is no file or folder nothing.gguf."),
        ("/a/b/c", "There is no file or folder /a/b/c."),
    ],
)
def test_a_wrong_name_gets_close_matches_or_is_named(name: str, sentence: str) -> None:
    assert refusal(name) == sentence


def test_a_name_like_nothing_known_gets_the_list(tmp_path: Path) -> None:
    assert refusal("zzzzzz").endswith("known names are smollm2, gemma3-270m.")
    assert refusal("") == refusal("")
    other = tmp_path / "model.bin"
    other.write_bytes(b"x")
    assert "is not a model" in refusal(other)


def test_a_packaged_model_resolves_to_its_verified_file_and_is_listed_with_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_model(tmp_path / "index", "demo", [b"GGUF and more"])
    monkeypatch.setitem(PACKAGED, "demo", model)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    before = {known.name: known for known in sources.known_models()}["demo"]
    assert (before.downloaded, before.path, before.num_bytes) == (False, None, model.wheels[0].size)
    source = sources.resolve("demo")
    assert (source.name, source.kind, source.revision) == ("demo", "gguf", model.sha256[:12])
    assert source.path.read_bytes() == b"GGUF and more"
    after = {known.name: known for known in sources.known_models()}["demo"]
    assert (after.downloaded, after.path, after.num_bytes) == (True, source.path, 13)


def test_the_cache_folder_follows_the_platform_and_the_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_CACHE", "~/elsewhere")
    assert cache_folder() == Path.home() / "elsewhere"
    monkeypatch.delenv("TREADLE_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/treadle")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "treadle"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_folder() == Path.home() / "Library" / "Caches" / "treadle"


def test_every_registered_model_is_named_and_pinned() -> None:
    for name, model in PACKAGED.items():
        assert name == model.name
        for digest in (model.sha256, *(wheel.sha256 for wheel in model.wheels)):
            assert len(digest) == 64 and int(digest, 16) >= 0
        assert 0.5 * model.size < sum(wheel.size for wheel in model.wheels) < 1.1 * model.size


def test_resolving_imports_no_mlx() -> None:
    code = "import sys; from treadle.models import sources; sources.known_models(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "treadle.models.packages" in loaded and "mlx.core" not in loaded


def test_the_folder_of_a_model_lies_in_the_cache_folder() -> None:
    assert packages.folder(SMOLLM2) == cache_folder() / "models" / "smollm2"
