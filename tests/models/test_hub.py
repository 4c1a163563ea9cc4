"""A Hugging Face id becomes a complete folder or one sentence. A hub on a local port stands in."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.models.fake_hub import COMMIT, FakeHub, serving
from treadle.errors import LoadError
from treadle.models import hub, sources

WEIGHTS = bytes(range(256)) * 64


def silent(what: str, done: int, total: int | None) -> None:
    pass


def point_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, with the hub allowed online."""
    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    return folder


@pytest.fixture
def fake(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    files = {
        "config.json": b"{}",
        "model.safetensors": WEIGHTS,
        "chat_template.jinja": b"{{ messages }}",
        "pytorch_model.bin": b"never wanted",
        "onnx/model.json": b"never wanted",
    }
    with serving(FakeHub(files)) as it:
        point_at(it.url, monkeypatch)
        yield it


def test_an_id_becomes_a_folder_of_the_wanted_files_at_its_commit(fake: FakeHub) -> None:
    calls: list[tuple[str, int, int | None]] = []
    source = sources.resolve("org/demo", lambda *call: calls.append(call))
    assert (source.name, source.kind, source.revision) == ("org/demo", "folder", COMMIT)
    names = sorted(str(path.relative_to(source.path)) for path in source.path.rglob("*") if path.is_file())
    assert names == ["chat_template.jinja", "config.json", "model.safetensors"]
    assert (source.path / "model.safetensors").read_bytes() == WEIGHTS
    assert calls and {what for what, _, _ in calls} == {"downloading org/demo"}
    assert all(total is None or done <= total for _, done, total in calls)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pause between attempts, and resumption by the thousand bytes rather than by ten million."""
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)


def test_a_dropped_connection_is_resumed_where_it_broke(fake: FakeHub, impatient: None) -> None:
    fake.cut["model.safetensors"], fake.drops = 5000, 1
    path, _ = hub.fetch("org/demo", silent)
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert fake.ranges["model.safetensors"] == [None, "bytes=5000-"]


def test_a_lost_connection_is_one_sentence_and_finished_files_are_kept(fake: FakeHub, impatient: None) -> None:
    fake.cut["model.safetensors"], fake.drops = 5000, 99
    with pytest.raises(LoadError, match=r"Downloading org/demo failed .* run again"):
        hub.fetch("org/demo", silent)
    fake.drops = 0
    path, _ = hub.fetch("org/demo", silent)
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert len(fake.ranges["config.json"]) == 1


def test_a_complete_download_serves_offline_and_unreachable(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    online = hub.fetch("org/demo@main", silent)
    point_at(closed_port(), monkeypatch)
    assert hub.fetch("org/demo@main", silent) == online
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.fetch("org/demo", silent) == online
    assert [(name, path) for name, _, path in hub.downloads()] == [("org/demo", online[0])]


def test_a_partial_download_does_not_serve_offline(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = hub.fetch("org/demo", silent)
    (path / "model.safetensors").unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(LoadError, match="not completely downloaded and offline mode is on"):
        hub.fetch("org/demo", silent)


def closed_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_an_unreachable_hub_is_one_sentence(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point_at(closed_port(), monkeypatch)
    with pytest.raises(LoadError) as caught:
        hub.fetch("org/demo", silent)
    assert caught.value.message == (
        "Hugging Face is unreachable and org/demo is not completely downloaded; "
        "check the network, or pass the path of a folder that you already have."
    )


def test_offline_mode_is_named_when_nothing_is_there(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(LoadError, match="unset HF_HUB_OFFLINE"):
        hub.fetch("org/demo@v1", silent)
    assert hub.downloads() == []


def test_an_unknown_id_a_gated_one_and_an_unknown_revision_say_what_to_do(fake: FakeHub) -> None:
    with pytest.raises(LoadError, match="no model org/other that you may read"):
        hub.fetch("org/other", silent)
    with pytest.raises(LoadError, match="org/demo has no revision 'v9'"):
        hub.fetch("org/demo@v9", silent)
    fake.gated = True
    with pytest.raises(LoadError, match="org/demo is gated"):
        hub.fetch("org/demo", silent)


@pytest.mark.parametrize("name", ["org/.bad", "org/two--dashes", "-org/x"])
def test_an_id_that_the_hub_cannot_have_is_refused_with_its_rule(cache: Path, name: str) -> None:
    with pytest.raises(LoadError, match="failed"):
        hub.fetch(name, silent)
