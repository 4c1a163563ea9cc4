"""A download that stops goes on from its last byte; what is damaged never gets its name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import WeakFileLock

from tests.models.fake_hub import COMMIT, FakeHub
from tests.models.test_hub import WEIGHTS, cache, fake, silent
from treadle.errors import LoadError
from treadle.models import hub, hub_files
from treadle.models.hub_files import Place

__all__ = ["cache", "fake"]
NAME = "model.safetensors"
SIZE = len(WEIGHTS)
PLACE = Place("org/demo", COMMIT)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_files, "PAUSE_S", 0.0)
    monkeypatch.setattr(hub_files, "LOCK_S", 0.05)


def partial(fake: FakeHub) -> Path:
    return PLACE.blobs / f"{fake.digest(NAME)}.incomplete"


def left_by_a_killed_process(fake: FakeHub, data: bytes) -> None:
    PLACE.blobs.mkdir(parents=True)
    partial(fake).write_bytes(data)


def check_whole() -> None:
    path, _ = hub.fetch("org/demo", silent)
    assert (path / NAME).read_bytes() == WEIGHTS
    assert not list(PLACE.blobs.glob("*.incomplete"))


def test_a_dropped_connection_is_resumed_where_it_broke(fake: FakeHub) -> None:
    fake.cut[NAME], fake.drops = 5000, 1
    check_whole()
    assert fake.ranges[NAME] == [None, f"bytes=5000-{SIZE - 1}"]
    assert fake.served[NAME] == SIZE


def test_a_library_that_knows_another_way_to_large_files_takes_what_is_there(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    check_whole()
    assert fake.ranges[NAME] == [None]


def test_a_new_process_fetches_only_the_rest(fake: FakeHub) -> None:
    left_by_a_killed_process(fake, WEIGHTS[:7001])
    calls: list[tuple[int, int | None]] = []
    hub.fetch("org/demo", lambda _, done, total: calls.append((done, total)))
    check_whole()
    assert fake.served[NAME] == SIZE - 7001
    assert calls[-1] == (SIZE + 2 + 14, SIZE + 2 + 14)


def test_a_process_killed_midway_leaves_what_the_next_one_needs_not_fetch(
    cache: Path, fake: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = bytes(range(256)) * 4096
    fake.files[NAME] = large
    fake.cut[NAME], fake.drops = 600_000, 1
    code = "import time; from treadle.models import hub, hub_files; hub_files.PAUSE_S = 60; "
    code += "hub.fetch('org/demo', lambda *_: None)"
    environment = {**os.environ, "HF_ENDPOINT": fake.url, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0"}
    child = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        deadline = time.monotonic() + 60
        while not (partial(fake).exists() and partial(fake).stat().st_size == 600_000):
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert fake.served[NAME] == 600_000
    path, _ = hub.fetch("org/demo", silent)
    assert (path / NAME).read_bytes() == large
    assert fake.served[NAME] == len(large)


def test_a_lost_connection_is_one_sentence_and_what_has_arrived_is_kept(fake: FakeHub) -> None:
    fake.cut[NAME], fake.drops = 5000, 99
    with pytest.raises(LoadError, match=r"Downloading org/demo failed .* run again \(what has arrived is kept\)"):
        hub.fetch("org/demo", silent)
    assert len(fake.ranges[NAME]) == 1 + hub_files.MOST_FAILURES + 1
    fake.drops = 0
    check_whole()
    assert fake.served[NAME] == SIZE


def test_a_file_that_was_all_there_but_for_its_name_is_not_fetched_again(fake: FakeHub) -> None:
    left_by_a_killed_process(fake, WEIGHTS)
    check_whole()
    assert fake.served[NAME] == 0


def test_a_large_file_comes_in_pieces(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_files, "PIECE", 10_000)
    check_whole()
    assert fake.ranges[NAME] == ["bytes=0-9999", f"bytes=10000-{SIZE - 1}"]


def test_a_file_that_changed_on_the_hub_begins_anew(fake: FakeHub) -> None:
    fake.cut[NAME], fake.drops = 5000, 99
    with pytest.raises(LoadError):
        hub.fetch("org/demo", silent)
    newer = bytes(reversed(WEIGHTS))
    fake.files[NAME], fake.commit, fake.drops = newer, COMMIT[::-1], 0
    path, commit = hub.fetch("org/demo", silent)
    assert commit == COMMIT[::-1] and (path / NAME).read_bytes() == newer
    assert fake.ranges[NAME][-1] is None


def test_a_server_without_ranges_sends_the_whole_file(fake: FakeHub) -> None:
    left_by_a_killed_process(fake, WEIGHTS[:7000])
    fake.takes_ranges = False
    check_whole()
    assert fake.served[NAME] == SIZE


@pytest.mark.parametrize("left", [b"x" * 100, b"x" * SIZE, WEIGHTS + b"x"], ids=["short", "as long", "longer"])
def test_foreign_bytes_in_an_incomplete_file_are_found_by_the_digest(fake: FakeHub, left: bytes) -> None:
    left_by_a_killed_process(fake, left)
    check_whole()


@pytest.mark.parametrize("name", [NAME, "config.json"])
def test_a_damaged_file_is_fetched_once_more(fake: FakeHub, name: str) -> None:
    fake.spoilt[name] = 1
    check_whole()
    assert fake.served[name] == 2 * len(fake.files[name])


@pytest.mark.parametrize("name", [NAME, "config.json"])
def test_a_file_that_stays_damaged_is_named_and_nothing_of_it_is_kept(fake: FakeHub, name: str) -> None:
    fake.spoilt[name] = 99
    with pytest.raises(LoadError, match=f"{name} of org/demo arrived damaged twice"):
        hub.fetch("org/demo", silent)
    assert len(fake.ranges[name]) == 2
    assert not list(PLACE.blobs.glob(f"{fake.digest(name)}*"))
    fake.spoilt.clear()
    check_whole()


def test_a_full_disk_is_told_before_anything_is_fetched(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(LoadError, match=r"needs 0\.0 GB, but only 0\.0 GB are free"):
        hub.fetch("org/demo", silent)
    assert not fake.ranges


def test_two_processes_do_not_write_to_one_file(fake: FakeHub) -> None:
    file = next(f for f in hub_files.listing("org/demo", COMMIT) if f.path == NAME)
    lock = PLACE.lock(file)
    lock.parent.mkdir(parents=True)
    waited = threading.Event()

    def told(what: str, done: int, total: int | None) -> None:
        if what == "waiting for another download of org/demo":
            waited.set()

    with WeakFileLock(lock):
        thread = threading.Thread(target=lambda: hub.fetch("org/demo", told))
        thread.start()
        assert waited.wait(20)
        assert fake.served[NAME] == 0
    thread.join(20)
    assert fake.served[NAME] == SIZE
    check_whole()
