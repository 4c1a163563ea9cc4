"""Admission by arithmetic: what can never fit is refused with numbers, what does not fit now waits, nothing else."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.test_loop import Clock, Run, request_of
from tests.fakes import STOP, HashModel, slow_twin
from treadle.cache import geometry
from treadle.config import Config
from treadle.engine.device import memory_limit
from treadle.engine.loop import Loop
from treadle.engine.memory import LEAST_CHUNK, Ledger
from treadle.errors import ConfigError, MemoryRefused
from treadle.models.capabilities import new_layers
from treadle.runtime import DeviceFacts
from treadle.types import Batching, Footprint

PRINT = Footprint(row_bytes=1000, windows=((100, 500),), state_bytes=2000, step_bytes=300, score_bytes=2)


@pytest.fixture(autouse=True)
def steps_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here buffers grow token by token, so that limits can be as small as the models."""
    monkeypatch.setattr(geometry, "STEP", 1)


def test_rows_are_counted_by_what_their_buffers_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "STEP", 256)
    ledger = Ledger(Footprint(row_bytes=10), 0, 10**6)
    assert [ledger.rows(n) for n in (1, 256, 257)] == [2560, 2560, 5120]
    ledger.promise("short", ledger.need(20, 10))
    assert ledger.free == 10**6 - 2560


def test_rows_windows_and_state_add_up() -> None:
    assert PRINT.rows(40) == 40 * 1500 + 2000
    assert PRINT.rows(400) == 400 * 1000 + 100 * 500 + 2000


def test_what_cannot_fit_alone_is_refused_with_both_numbers_and_no_word_of_context() -> None:
    ledger = Ledger(PRINT, base=1_000_000, limit=3_000_000)
    with pytest.raises(MemoryRefused) as caught:
        ledger.check(50_000, 10)
    assert (
        "51.7 MB" in caught.value.message and "2.0 MB" in caught.value.message and "context" not in caught.value.message
    )
    assert caught.value.status == 503 and caught.value.retry_after_s
    ledger.check(1_000, 10)


@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 500)), max_size=12))
def test_promises_never_pass_the_limit_except_for_a_single_request(sizes: list[tuple[int, int]]) -> None:
    ledger = Ledger(PRINT, base=500_000, limit=5_000_000)
    running: list[int] = []
    for i, (prompt, room) in enumerate(sizes):
        need = ledger.need(prompt, room)
        if ledger.fits(need):
            ledger.promise(str(i), need)
            running.append(need)
        assert 500_000 + sum(running) <= 5_000_000 or len(running) == 1


@given(st.integers(1, 4096), st.integers(1, 100_000), st.integers(1_000_000, 10_000_000))
def test_a_chunk_shrinks_until_its_activations_fit(most: int, context: int, limit: int) -> None:
    ledger = Ledger(PRINT, base=100_000, limit=limit)
    n = ledger.chunk(most, context)
    assert min(most, LEAST_CHUNK // 2) <= n <= most
    assert n <= LEAST_CHUNK or PRINT.chunk(n, context) <= limit - 100_000


def test_measured_activations_correct_the_estimate() -> None:
    ledger = Ledger(PRINT, base=0, limit=10**9)
    before = ledger.need(1000, 0)
    ledger.observe(100, 1000, peak=10 * PRINT.chunk(100, 1000))
    assert ledger.need(1000, 0) > before
    for _ in range(100):
        ledger.observe(100, 1000, peak=0)
    assert ledger.need(1000, 0) == before


def test_requests_that_do_not_fit_together_run_one_after_the_other() -> None:
    model = HashModel()
    ledger = Ledger(Footprint(row_bytes=1000), base=0, limit=70_000)
    run = Run(Loop(model, model.caps, Config(), partial(new_layers, model, model.caps), ledger, clock=Clock()))
    asked = [request_of(f"r{i}", [i + 1] * 30, 12) for i in range(5)]
    for request in asked:
        run.loop.submit(request)
    most = 0
    while run.loop.busy:
        run.turn()
        most = max(most, run.loop.num_running)
    assert most == 1
    for request in asked:
        assert run.text(request.id) == slow_twin(model, request, 512)
    assert ledger.fits(70_000) and not ledger._promised


def test_what_long_replies_take_is_counted_in_every_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.engine.memory.FORESEEN", 4)
    monkeypatch.setattr("treadle.engine.loop.CLEAR_EVERY", 8)
    model = HashModel()
    caps = replace(model.caps, batching=Batching.NEVER)
    ledger = Ledger(Footprint(row_bytes=1), base=0, limit=10**9)
    run = Run(Loop(model, caps, Config(), partial(new_layers, model, caps), ledger, clock=Clock()))
    for i in range(2):
        run.loop.submit(request_of(f"r{i}", [5 + i, 6, 7], 60, logit_bias=((STOP, -100.0),)))
    while run.loop.busy:
        run.turn()
        groups = run.loop.groups
        assert all(ledger._promised[row.id] >= row.computed for group in groups for row in group.rows)


def facts(backend: str, memory: float, working: float) -> DeviceFacts:
    return DeviceFacts(backend, "x", int(memory * 1e9), int(working * 1e9), {})  # type: ignore[arg-type]


def test_unified_memory_leaves_room_for_the_system() -> None:
    assert memory_limit(Config(), facts("metal", 64, 62)) == int(64e9 - 0.15 * 64e9)
    assert memory_limit(Config(), facts("metal", 16, 11)) == int(11e9)
    assert memory_limit(Config(), facts("cuda", 80, 72)) == int(72e9)
    assert memory_limit(Config(memory_limit_gb=3), facts("cpu", 24, 18)) == int(3e9)


def test_a_limit_above_the_device_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError) as caught:
        memory_limit(Config(memory_limit_gb=100), facts("cpu", 24, 18))
    assert caught.value.param == "memory_limit_gb"


def test_a_request_that_ended_in_a_fault_takes_no_memory_again_when_its_step_is_counted() -> None:
    ledger = Ledger(PRINT, base=0, limit=10**9)
    ledger.promise("a", 5)
    ledger.release("a")
    ledger.grow("a", 1000)
    assert ledger.free == 10**9


def test_models_of_one_process_share_the_limit() -> None:
    peers: list[Ledger] = []
    one = Ledger(Footprint(row_bytes=10), base=400, limit=1000, peers=peers)
    other = Ledger(Footprint(row_bytes=10), base=300, limit=1000, peers=peers)
    assert one.free == other.free == 300
    assert one.fits(300) and other.fits(10**6)  # nothing runs: the check at the door said what can fit
    one.promise("a", 200)
    assert other.free == 100 and other.fits(100) and not other.fits(101)
    with pytest.raises(MemoryRefused):
        other.check(40, 0)
    one.release("a")
    one.close()
    other.check(40, 0)
    assert other.free == 700
