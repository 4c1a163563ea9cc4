"""A Hugging Face id becomes a complete folder or one sentence. A hub on a local port stands in."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, hf_hub_download

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


def test_a_complete_download_serves_offline_and_unreachable(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    online = hub.fetch("org/demo@main", silent)
    point_at(closed_port(), monkeypatch)
    assert hub.fetch("org/demo@main", silent) == online
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.fetch("org/demo", silent) == online
    assert [(name, path) for name, _, path in hub.downloads()] == [("org/demo", online[0])]


def test_a_complete_download_serves_when_permission_is_gone(fake: FakeHub) -> None:
    allowed = hub.fetch("org/demo", silent)
    fake.gated = True
    assert hub.fetch("org/demo", silent) == allowed


def test_a_complete_download_asks_for_its_commit_alone(fake: FakeHub) -> None:
    hub.fetch("org/demo", silent)
    before = fake.served.copy()
    hub.fetch("org/demo", silent)
    hub.fetch(f"org/demo@{COMMIT}", silent)
    assert fake.served == before


def test_what_other_tools_left_is_found_and_completed(fake: FakeHub) -> None:
    loaded = hf_hub_download("org/demo", "config.json")
    path, _ = hub.fetch("org/demo", silent)
    assert Path(loaded) == path / "config.json" and fake.served["config.json"] == 2
    assert (path / "model.safetensors").read_bytes() == WEIGHTS


def test_other_tools_find_what_was_downloaded(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = hub.fetch("org/demo", silent)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert Path(hf_hub_download("org/demo", "model.safetensors")) == path / "model.safetensors"
    assert (path / "model.safetensors").resolve().name == fake.digest("model.safetensors")


def test_the_token_goes_to_the_hub_and_not_to_the_store(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.fetch("org/demo", silent)
    assert fake.tokens == {"hub": {"Bearer hf_secret"}, "store": {None}}


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
