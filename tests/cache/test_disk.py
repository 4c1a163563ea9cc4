"""The disk tier: what it returns is what was put, across restarts and whatever happens to its files; no failure of
the disk reaches a caller."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
from pathlib import Path
from threading import Event

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.cache.disk import RESCAN_S, DiskTier
from treadle.cache.disk_folder import DiskFolder
from treadle.cache.disk_format import Tensor
from treadle.cache.disk_keys import BLOCK, block_keys
from treadle.errors import ConfigError

A, B = (block_keys(root, np.zeros(6 * BLOCK, np.int64)) for root in (b"a", b"b"))


class Clock:
    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def rows(key: bytes, nbytes: int = 1000) -> list[Tensor]:
    """Tensors whose content tells which key they belong to."""
    data = np.resize(np.frombuffer(key, np.uint8), nbytes)
    return [Tensor("keys", "U8", (nbytes,), data), Tensor("values", "BF16", (2, 2), key[:8])]


def contents(tensors) -> list | None:
    return None if tensors is None else [(t.name, t.dtype, t.shape, bytes(t.raw)) for t in tensors]


def put_all(tier: DiskTier, *keys: bytes, nbytes: int = 1000) -> None:
    """Put and wait until all is written."""
    for key in keys:
        assert tier.put(key, rows(key, nbytes))
    tier.stop()
    tier.start()


def on_disk(tier: DiskTier) -> set[bytes]:
    return {bytes.fromhex(path.stem) for path in tier.folder.glob("*.safetensors")}


def path_of(tier: DiskTier, key: bytes) -> Path:
    return tier.folder / f"{key.hex()}.safetensors"


def size_of_one(tmp_path: Path) -> int:
    with_one = DiskTier(tmp_path / "measure", 1 << 30, free_floor_bytes=0)
    with_one.start()
    put_all(with_one, A[0])
    with_one.stop()
    return with_one.snapshot().bytes


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(tmp_path: Path, clock: Clock):
    """Started tiers in one folder, stopped at the end."""
    made: list[DiskTier] = []

    def make_tier(max_bytes: int = 1 << 30, free_floor_bytes: int = 0, **more) -> DiskTier:
        tier = DiskTier(tmp_path / "cache", max_bytes, free_floor_bytes=free_floor_bytes, clock=clock, **more)
        tier.start()
        made.append(tier)
        return tier

    yield make_tier
    for tier in made:
        tier.stop()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch):
    """Writes that wait for `gate`, after saying so by `gate.begun`."""
    gate, real = Event(), DiskFolder.write
    gate.begun = Event()

    def slow(self, *arguments) -> None:
        gate.begun.set()
        assert gate.wait(10)
        real(self, *arguments)

    monkeypatch.setattr(DiskFolder, "write", slow)
    yield gate
    gate.set()


# -- storing and reading


def test_what_was_put_is_read_by_the_next_process(make) -> None:
    tier = make()
    for key in A:
        assert tier.put(key, rows(key))
    tier.stop()  # writes all that waits
    again = make()
    assert again.longest(A) == len(A)
    assert again.missing([*A, *B]) == B
    assert [contents(again.get(key)) for key in A] == [contents(rows(key)) for key in A]
    found = again.snapshot()
    assert (found.files, found.hits, found.misses, found.written) == (6, 6, 0, 0)
    assert found.bytes == sum(path.stat().st_size for path in again.folder.iterdir())


def test_a_key_that_was_never_put_is_a_counted_miss(make) -> None:
    tier = make()
    assert tier.get(A[0]) is None
    assert tier.longest(A) == 0
    assert tier.snapshot().misses == 1


def test_putting_never_waits_for_the_disk_and_what_waits_is_neither_missing_nor_stored(make, gate) -> None:
    tier = make()
    assert tier.put(A[0], rows(A[0])) and tier.put(A[1], rows(A[1]))
    assert gate.begun.wait(10)
    assert tier.missing(A[:3]) == [A[2]]
    assert tier.longest(A) == 0 and tier.get(A[0]) is None
    assert tier.snapshot().queued == 1
    gate.set()
    tier.stop()
    assert tier.longest(A) == 2


def test_a_full_queue_skips_and_counts(make, gate) -> None:
    tier = make(queue_files=1)
    assert tier.put(A[0], rows(A[0]))
    assert gate.begun.wait(10)
    assert tier.put(A[1], rows(A[1]))
    assert not tier.put(A[2], rows(A[2]))
    assert tier.put(A[1], rows(A[1]))  # waits already
    gate.set()
    tier.stop()
    assert on_disk(tier) == set(A[:2])
    assert (tier.snapshot().written, tier.snapshot().skipped) == (2, 1)


def test_a_key_that_is_stored_is_not_written_again(make) -> None:
    tier = make()
    put_all(tier, A[0], A[0])
    put_all(tier, A[0])
    assert tier.snapshot().written == 1


def test_a_stopped_tier_accepts_nothing_but_can_be_read(make) -> None:
    tier = make()
    put_all(tier, A[0])
    tier.stop()
    assert not tier.put(A[1], rows(A[1]))
    assert contents(tier.get(A[0])) == contents(rows(A[0]))


def test_misuse_is_told_at_once(make) -> None:
    tier = make()
    with pytest.raises(ValueError, match="32 bytes"):
        tier.put(b"short", [])
    with pytest.raises(ValueError, match="names of their own"):
        tier.put(A[0], rows(A[0]) * 2)


# -- room


def test_the_least_recently_used_goes_first_and_of_a_chain_the_end(make, clock, tmp_path) -> None:
    one = size_of_one(tmp_path)
    tier = make(max_bytes=5 * one)
    put_all(tier, *A[:3])
    clock.now += 10
    put_all(tier, *B[:2])
    clock.now += 10
    assert tier.longest(A[:2]) == 2
    clock.now += 10
    put_all(tier, B[2])
    assert on_disk(tier) == {*A[:2], *B[:3]}
    assert tier.missing(B[:4]) == [B[3]]  # a use of the first three
    put_all(tier, B[3])
    assert on_disk(tier) == {A[0], *B[:4]}
    assert tier.snapshot().evicted == 2


def test_the_order_of_use_survives_a_restart(make, clock, tmp_path) -> None:
    one = size_of_one(tmp_path)
    tier = make(max_bytes=4 * one)
    put_all(tier, *A[:2])
    clock.now += 10
    put_all(tier, *B[:2])
    clock.now += 10
    assert tier.get(A[0]) is not None
    assert tier.longest(A[:2]) == 2
    tier.stop()
    clock.now += 10
    again = make(max_bytes=4 * one)
    put_all(again, B[2])
    assert on_disk(again) == {*A[:2], B[0], B[2]}


def test_a_smaller_limit_holds_from_the_start(make, tmp_path) -> None:
    one = size_of_one(tmp_path)
    put_all(make(), *A)
    tier = make(max_bytes=2 * one)
    tier.stop()
    assert on_disk(tier) == set(A[:2])


def test_a_file_larger_than_the_tier_is_skipped_and_nothing_goes_for_it(make) -> None:
    tier = make(max_bytes=5000)
    put_all(tier, A[0])
    put_all(tier, A[1], nbytes=6000)
    assert on_disk(tier) == {A[0]}
    assert (tier.snapshot().skipped, tier.snapshot().evicted) == (1, 0)


def test_the_disk_is_not_filled_beyond_the_floor(make, monkeypatch, tmp_path) -> None:
    one = size_of_one(tmp_path)
    free = 10_000 + one
    monkeypatch.setattr(DiskFolder, "free_bytes", lambda self: free)
    tier = make(free_floor_bytes=10_000)
    put_all(tier, A[0])
    free -= 1
    put_all(tier, A[1])
    assert on_disk(tier) == {A[0]}
    assert tier.snapshot().skipped == 1


def test_what_must_go_anyway_makes_room_on_a_full_disk(make, monkeypatch, tmp_path) -> None:
    one = size_of_one(tmp_path)
    monkeypatch.setattr(DiskFolder, "free_bytes", lambda self: 10_000)
    tier = make(max_bytes=one, free_floor_bytes=0)
    put_all(tier, A[0])
    monkeypatch.setattr(DiskFolder, "free_bytes", lambda self: 0)
    put_all(tier, B[0])
    assert on_disk(tier) == {B[0]}


steps = st.lists(st.tuples(st.sampled_from([*A, *B]), st.integers(0, 3000), st.booleans()), max_size=25)


@given(steps)
def test_the_limit_holds_and_nothing_wrong_is_ever_read(tmp_path_factory, sequence) -> None:
    clock = Clock()
    tier = DiskTier(tmp_path_factory.mktemp("tier"), 8000, free_floor_bytes=0, clock=clock)
    sizes, write = [], DiskFolder.write

    def measured(folder: DiskFolder, *arguments) -> None:
        write(folder, *arguments)
        sizes.append(sum(stored.nbytes for stored in folder.scan()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiskFolder, "write", measured)
        put = run(tier, clock, sequence)
    files = list(tier.folder.iterdir())
    assert max(sizes, default=0) <= 8000
    assert tier.snapshot().bytes == sum(path.stat().st_size for path in files)
    assert tier.snapshot().files == len(files)
    assert tier.snapshot().written == len(sizes) >= bool(put)


def run(tier: DiskTier, clock: Clock, sequence) -> dict[bytes, list]:
    """Put and get as told, checking every answer; what was put under each key."""
    tier.start()
    put: dict[bytes, list] = {}
    for key, nbytes, reads in sequence:
        clock.now += 1
        if reads:
            assert contents(tier.get(key)) in (None, *put.get(key, []))
        else:
            put.setdefault(key, []).append(contents(rows(key, nbytes)))
            assert tier.put(key, rows(key, nbytes))
    tier.stop()
    return put


# -- faults


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:5],
        lambda content: content[:100],
        lambda content: content[:-1],
        lambda content: content + b"\0",
        lambda content: content[:-700] + bytes([content[-700] ^ 1]) + content[-699:],
        lambda content: bytes(len(content)),
        lambda content: content.replace(A[0].hex().encode(), A[1].hex().encode()),
    ],
)
def test_a_damaged_file_is_a_miss_is_removed_and_can_be_put_again(make, caplog, damage) -> None:
    tier = make()
    put_all(tier, *A[:2])
    path_of(tier, A[0]).write_bytes(damage(path_of(tier, A[0]).read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert tier.get(A[0]) is None
    assert len(caplog.records) == 1
    assert on_disk(tier) == {A[1]}
    assert tier.longest(A) == 0
    found = tier.snapshot()
    assert (found.damaged, found.misses, found.hits, found.files) == (1, 1, 0, 1)
    assert found.bytes == path_of(tier, A[1]).stat().st_size
    put_all(tier, A[0])
    assert contents(tier.get(A[0])) == contents(rows(A[0]))


def test_a_file_under_the_name_of_another_is_a_miss(make) -> None:
    tier = make()
    put_all(tier, *A[:2])
    path_of(tier, A[0]).write_bytes(path_of(tier, A[1]).read_bytes())
    assert tier.get(A[0]) is None
    assert contents(tier.get(A[1])) == contents(rows(A[1]))


def test_a_file_that_vanished_is_a_miss_and_no_damage(make) -> None:
    tier = make()
    put_all(tier, *A[:2])
    path_of(tier, A[0]).unlink()
    assert tier.get(A[0]) is None
    assert tier.missing(A[:2]) == [A[0]]
    assert (tier.snapshot().misses, tier.snapshot().damaged) == (1, 0)


def test_a_file_that_cannot_be_read_is_a_miss_and_stays(make, monkeypatch, caplog) -> None:
    tier = make()
    put_all(tier, A[0])

    def refuse(self, key):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(DiskFolder, "read", refuse)
    assert tier.get(A[0]) is None
    assert on_disk(tier) == {A[0]}
    assert "Too many open files" in caplog.text


def test_a_link_in_the_place_of_a_file_is_not_followed(make, tmp_path) -> None:
    tier = make()
    put_all(tier, A[0])
    elsewhere = tmp_path / "elsewhere"
    path_of(tier, A[0]).rename(elsewhere)
    path_of(tier, A[0]).symlink_to(elsewhere)
    assert tier.get(A[0]) is None
    assert elsewhere.exists()


def test_a_folder_that_is_gone_fails_writes_quietly_and_is_logged_once(make, caplog) -> None:
    tier = make()
    tier.folder.rmdir()
    for key in A:
        assert tier.put(key, rows(key))
    tier.stop()
    assert tier.snapshot().failed == len(A)
    assert tier.missing(A) == A
    assert sum("(write," in record.getMessage() for record in caplog.records) == 1


def test_a_folder_that_became_read_only_fails_writes_quietly(make) -> None:
    tier = make()
    tier.folder.chmod(0o500)
    if os.access(tier.folder, os.W_OK):
        pytest.skip("this user may write everywhere")
    assert tier.put(A[0], rows(A[0]))
    tier.stop()
    assert tier.snapshot().failed == 1


def test_a_disk_that_fills_up_while_writing_leaves_nothing_behind(make, monkeypatch) -> None:
    tier = make()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    put_all(tier, A[0])
    assert list(tier.folder.iterdir()) == []
    assert (tier.snapshot().failed, tier.snapshot().files) == (1, 0)
    monkeypatch.undo()
    put_all(tier, A[0])
    assert contents(tier.get(A[0])) == contents(rows(A[0]))


# -- the folder


def test_folder_and_files_are_private_whatever_the_umask(make, tmp_path) -> None:
    before = os.umask(0)
    try:
        tier = make()
        put_all(tier, A[0])
    finally:
        os.umask(before)
    assert stat.S_IMODE(tier.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path_of(tier, A[0]).stat().st_mode) == 0o600


def test_the_rights_of_the_given_folder_are_left_alone_and_those_of_ours_restored(tmp_path) -> None:
    tmp_path.chmod(0o755)
    tier = DiskTier(tmp_path, 1000, free_floor_bytes=0)
    tier.folder.mkdir()
    tier.folder.chmod(0o777)
    tier.start()
    tier.stop()
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert stat.S_IMODE(tier.folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("obstacle", ["file", "link"])
def test_a_place_that_is_no_folder_of_ours_is_refused_by_name(tmp_path, obstacle: str) -> None:
    tier = DiskTier(tmp_path / "cache", 1000, free_floor_bytes=0)
    tier.folder.parent.mkdir()
    if obstacle == "file":
        tier.folder.touch()
    else:
        tier.folder.symlink_to(tmp_path)
    with pytest.raises(ConfigError) as caught:
        tier.start()
    assert caught.value.param == "cache_dir"


def test_foreign_files_are_neither_counted_nor_touched(make) -> None:
    tier = make()
    put_all(tier, A[0])
    tier.stop()
    names = [
        "notes.txt",
        "model.safetensors",
        f"{A[1].hex()}.safetensors.bak",
        f"{A[1].hex().upper()}.safetensors",
        f"x{A[1].hex()}.safetensors",
        f"{A[1].hex()}.tmp",
    ]
    for name in names:
        (tier.folder / name).write_text("mine")
    (tier.folder / f"{A[2].hex()}.safetensors").mkdir()
    again = make(max_bytes=1)
    again.stop()
    assert again.clear() == 0
    assert again.snapshot().files == 0 and again.snapshot().evicted == 1
    assert {path.name for path in again.folder.iterdir()} == {*names, f"{A[2].hex()}.safetensors"}


def test_what_a_crash_left_half_written_is_removed_but_not_what_is_being_written(make) -> None:
    tier = make()
    tier.stop()
    dead, alive = (tier.folder / f"{A[0].hex()}.{i:016x}.tmp" for i in (1, 2))
    dead.write_bytes(b"half")
    with alive.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        again = make()
        assert not dead.exists() and alive.exists()
    assert again.snapshot().files == 0


def test_clearing_removes_what_is_stored_what_waits_and_what_is_being_written(make, gate) -> None:
    gate.set()
    tier = make()
    put_all(tier, *A[:3])
    gate.clear()
    gate.begun.clear()
    assert tier.put(B[0], rows(B[0])) and tier.put(B[1], rows(B[1]))
    assert gate.begun.wait(10)
    assert tier.clear() == 3
    assert tier.put(B[2], rows(B[2]))
    gate.set()
    tier.stop()
    assert on_disk(tier) == {B[2]}
    assert tier.longest(B[2:3]) == 1 and tier.longest(A) == tier.longest(B) == 0
    assert tier.snapshot().bytes == path_of(tier, B[2]).stat().st_size


def test_files_of_another_tier_are_found_after_a_while(make, clock) -> None:
    mine, other = make(), make()
    put_all(other, *A[:2])
    assert mine.longest(A) == 0
    clock.now += RESCAN_S
    assert mine.missing(B[:1]) == B[:1]  # any activity
    mine.stop()
    assert contents(mine.get(A[1])) == contents(rows(A[1]))
