"""Whoever offers a job never waits for it; what was accepted is done, in order, also while stopping."""

from __future__ import annotations

from threading import Event, get_ident

import pytest

from treadle.cache.disk_format import Tensor
from treadle.cache.disk_writer import DiskWriter, Job


def job(name: str, nbytes: int = 1) -> Job:
    return Job(name.encode(), [Tensor("x", "U8", (nbytes,), bytes(nbytes))], 0)


class Disk:
    """Stores slowly: each job waits for `go`."""

    def __init__(self) -> None:
        self.go, self.begun = Event(), Event()
        self.stored: list[str] = []
        self.threads: set[int] = set()
        self.tidied = 0

    def store(self, job: Job) -> None:
        self.begun.set()
        assert self.go.wait(10)
        self.stored.append(job.key.decode())
        self.threads.add(get_ident())

    def tidy(self) -> None:
        self.tidied += 1


@pytest.fixture
def disk():
    return Disk()


@pytest.fixture
def writer(disk: Disk):
    writer = DiskWriter(disk.store, disk.tidy, max_jobs=2, max_bytes=100)
    writer.start()
    yield writer
    disk.go.set()
    writer.stop()


def busy(writer: DiskWriter, disk: Disk, first: Job) -> None:
    assert writer.offer(first)
    assert disk.begun.wait(10)


def test_accepted_jobs_are_done_in_order_by_one_other_thread_before_stop_returns(writer, disk) -> None:
    busy(writer, disk, job("a"))
    assert writer.offer(job("b")) and writer.offer(job("c"))
    disk.go.set()
    writer.stop()
    assert disk.stored == ["a", "b", "c"]
    assert len(disk.threads) == 1 and get_ident() not in disk.threads
    assert disk.tidied >= 3


def test_a_full_queue_refuses(writer, disk) -> None:
    busy(writer, disk, job("a"))
    assert writer.offer(job("b")) and writer.offer(job("c"))
    assert not writer.offer(job("d"))
    assert len(writer) == 2


def test_too_many_bytes_in_memory_are_refused_also_while_they_are_being_written(writer, disk) -> None:
    busy(writer, disk, job("a", 60))
    assert not writer.offer(job("b", 41))
    assert writer.offer(job("c", 40))
    writer.forget()
    assert writer.offer(job("d", 40))


def test_a_key_is_known_while_it_waits_and_while_it_is_written(writer, disk) -> None:
    busy(writer, disk, job("a"))
    writer.offer(job("b"))
    assert b"a" in writer and b"b" in writer and b"c" not in writer
    writer.forget()
    assert b"a" in writer and b"b" not in writer


def test_a_key_that_waits_is_not_queued_twice(writer, disk) -> None:
    busy(writer, disk, job("a"))
    assert writer.offer(job("b")) and writer.offer(job("b"))
    disk.go.set()
    writer.stop()
    assert disk.stored == ["a", "b"]


def test_nothing_is_accepted_before_start_and_after_stop(disk) -> None:
    writer = DiskWriter(disk.store, disk.tidy, max_jobs=2, max_bytes=100)
    assert not writer.offer(job("a"))
    writer.start()
    writer.stop()
    writer.stop()
    assert not writer.offer(job("a"))


def test_it_can_be_started_again_but_not_twice(writer, disk) -> None:
    with pytest.raises(RuntimeError):
        writer.start()
    disk.go.set()
    writer.stop()
    writer.start()
    assert writer.offer(job("a"))
    writer.stop()
    assert disk.stored == ["a"]
