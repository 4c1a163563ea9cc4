"""Memory runs short behind the loop: everybody gets text, and memory in use stays below the limit throughout."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tests.engine.test_loop import Clock, Run, request_of
from tests.fakes import HashModel, slow_twin
from tests.tiny import tiny
from treadle.cache.budget import Budget
from treadle.cache.segments import Packed
from treadle.cache.store import Settings, Store
from treadle.config import Config
from treadle.engine import pressure as pressure_module
from treadle.engine.governor import Act, Level
from treadle.engine.loop import Loop
from treadle.engine.pressure import Pressure
from treadle.engine.reuse import Reuse
from treadle.engine.sequence import Sequence
from treadle.models.capabilities import new_layers
from treadle.models.kv import with_kv
from treadle.types import EXACT, Caps, Finish, KvFormat, Request, Sampling

ENDLESS = {"logit_bias": ((0, -100.0),)}


class Device:
    """Memory that a test sets: `active` bytes of `limit`."""

    active = 0

    def __call__(self) -> int:
        return self.active


def run_of(
    model: object, caps: Caps, device: Device, cache: bool = True, limit: int = 1000, **settings: object
) -> tuple[Run, Pressure]:
    config = Config(**{"prefill_chunk": 32, **settings})  # type: ignore[arg-type]
    store = Store(Settings(Budget(10**9), 10**12, min_tokens=1), active_memory=lambda: 0) if cache else None
    reuse = Reuse(store, caps, 32)
    loop = Loop(model, caps, config, partial(new_layers, model, caps), None, reuse, Clock())
    pressure = Pressure(limit, store, lambda: [loop], active=device)
    pressure.attach(loop)
    return Run(loop), pressure


def asked(id: str, seed: int, n: int = 12, kv: KvFormat | None = None, prompt: int = 40) -> Request:
    ids = np.random.default_rng(seed).integers(1, 97, prompt).astype(np.int64)
    return Request(id, ids, Sampling(temperature=0.0), n, kv=kv)


def decoding(run: Run, count: int) -> None:
    for _ in range(200):
        if sum(len(group.rows) for group in run.loop.groups) == count:
            return
        run.turn()
    raise AssertionError("they never decode")


def packing() -> tuple[object, Caps]:
    model, caps = tiny("wide heads")
    return model, with_kv(model, caps, EXACT, "")


def test_running_rows_go_to_four_bits_all_of_a_group_and_the_replies_go_on() -> None:
    device = Device()
    run, pressure = run_of(*packing(), device)
    for i in range(3):
        run.loop.submit(asked(f"r{i}", i, 20))
    run.loop.submit(asked("exact", 9, 20, EXACT))
    decoding(run, 4)
    device.active = 810
    pressure.relieve()
    assert pressure.governor.counts.done[Act.PACK_LIVE] == 1
    kvs = {row.id: row.kv for group in run.loop.groups for row in group.rows}
    assert {str(kvs[f"r{i}"]) for i in range(3)} == {"4"} and kvs["exact"] == EXACT
    device.active = 0
    run.until_idle()
    assert all(len(run.text(id)) == 20 and run.finish(id) is Finish.LENGTH for id in kvs)


def test_what_is_packed_on_the_way_goes_on_as_if_its_rows_had_been_packed_from_there_on() -> None:
    """Packing a sequence that runs leaves neighbours of other formats alone: their text is the one without pressure."""
    device = Device()
    run, pressure = run_of(*packing(), device)
    alone, _ = run_of(*packing(), Device())
    request = asked("exact", 5, 16, EXACT)
    alone.loop.submit(request)
    alone.until_idle()
    run.loop.submit(request)
    run.loop.submit(asked("other", 6, 16))
    decoding(run, 2)
    device.active = 820
    pressure.relieve()
    run.until_idle()
    assert run.text("exact") == alone.text("exact")


def test_packed_rows_are_not_offered_to_those_who_want_exact_ones() -> None:
    device = Device()
    run, pressure = run_of(*packing(), device)
    run.loop.submit(asked("first", 1, 30))
    decoding(run, 1)
    device.active = 820
    pressure.relieve()
    device.active = 0
    run.until_idle()
    cold, _ = run_of(*packing(), Device())
    for each in (run, cold):
        each.loop.submit(asked("again", 1, 12))
        each.until_idle()
    assert run.text("again") == cold.text("again")


@pytest.mark.parametrize("setting", ["16", "16/16", 16])
def test_rows_stay_exact_where_the_server_is_told_so(setting: str | int) -> None:
    device = Device()
    run, pressure = run_of(*packing(), device, kv_bits=setting)
    run.loop.submit(asked("r", 1, 20))
    decoding(run, 1)
    device.active = 820
    pressure.relieve()
    assert not pressure.governor.counts.done[Act.PACK_LIVE]


@pytest.mark.parametrize("kinds", [("rows", "rows"), ("window", "rows"), ("state", "rows")], ids="+".join)
@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])
def test_the_youngest_waits_again_once_and_its_text_is_what_it_would_have_been(
    kinds: tuple[str, ...], cache: bool
) -> None:
    model, device = HashModel(kinds), Device()
    run, pressure = run_of(model, model.caps, device, cache)
    requests = [request_of(f"r{i}", [i + 1] * 20 + list(range(2, 30)), 24, **ENDLESS) for i in range(3)]
    for request in requests:
        run.loop.submit(request)
    decoding(run, 3)
    device.active = 960
    pressure.relieve()
    assert [s.id for s in run.loop.waiting] == ["r2", "r1"] or [s.id for s in run.loop.waiting] == ["r1", "r2"]
    assert pressure.governor.counts.done[Act.PREEMPT] == 2 and not pressure.open(1)
    for _ in range(5):
        run.turn()
    assert len(run.loop.waiting) == 2
    device.active = 700
    pressure.relieve()
    assert pressure.open(1)
    run.until_idle()
    for request in requests:
        assert run.text(request.id) == slow_twin(model, request, model.caps.context_length)
    assert all(o.usage.completion_tokens == 24 for id in run.outputs for o in run.outputs[id] if o.usage)


@pytest.mark.parametrize("replying", [False, True])
def test_one_that_gave_way_once_gives_way_again_only_without_a_reply(
    replying: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, device = HashModel(), Device()
    run, pressure = run_of(model, model.caps, device, False)
    for id in "ab":
        run.loop.submit(request_of(id, [*range(1, 60)], 24, **ENDLESS))
    decoding(run, 2)
    for _ in range(4):
        run.turn()
    for row in run.loop.sequences():
        row.preempted = True
    if not replying:
        monkeypatch.setattr(Sequence, "num_generated", 0)
    device.active = 960
    pressure.relieve()
    assert pressure.governor.counts.done[Act.PREEMPT] == (0 if replying else 1)


def test_with_nobody_running_one_is_admitted_whatever_the_level() -> None:
    model, device = HashModel(), Device()
    run, pressure = run_of(model, model.caps, device)
    device.active = 930
    pressure.relieve()
    assert pressure.governor.holding
    run.loop.submit(request_of("a", [1, 2, 3], 4, **ENDLESS))
    run.loop.submit(request_of("b", [4, 5, 6], 4, **ENDLESS))
    run.turn()
    assert run.loop.num_running == 1
    run.until_idle()
    assert run.finish("a") is run.finish("b") is Finish.LENGTH


def test_at_the_limit_with_nothing_left_to_do_a_reply_ends_where_it_is() -> None:
    model, device = HashModel(), Device()
    run, pressure = run_of(model, model.caps, device)
    run.loop.submit(request_of("a", [1, 2, 3], 100, **ENDLESS))
    decoding(run, 1)
    for _ in range(4):
        run.turn()
    device.active = 985
    pressure.relieve()
    run.until_idle()
    assert run.finish("a") is Finish.LENGTH and 0 < len(run.text("a")) < 100


def test_idle_prefixes_are_packed_then_evicted_before_anybody_who_runs() -> None:
    device = Device()
    run, pressure = run_of(*packing(), device, limit=10**7)
    run.loop.submit(asked("old", 1))
    run.until_idle()
    store = run.loop.reuse.store
    assert store is not None
    before = store.tree.totals.nbytes
    device.active = 8_100_000
    pressure.relieve()
    assert 0 < store.tree.totals.nbytes < before
    device.active = 8_600_000
    pressure.relieve()
    done = pressure.governor.counts.done
    assert store.tree.totals.nbytes == 0 and done[Act.PACK_IDLE] >= 1 and done[Act.EVICT] == 1
    assert not done[Act.HOLD]


def test_prefixes_of_those_who_ask_for_exact_rows_are_not_packed_while_idle() -> None:
    device = Device()
    run, pressure = run_of(*packing(), device, limit=10**7)
    store = run.loop.reuse.store
    assert store is not None
    texts = {}
    for id, kv in (("named", EXACT), ("open", None)):
        run.loop.submit(asked(id, 1, kv=kv))
        run.until_idle()
        texts[id] = run.text(id)
    device.active = 8_100_000
    pressure.relieve()
    assert pressure.governor.counts.done[Act.PACK_IDLE] == 1
    assert sorted(isinstance(node.payload, Packed) for node in store.tree.nodes()) == [False, True]
    device.active = 0
    run.loop.submit(asked("again", 1, kv=EXACT))
    run.until_idle()
    [usage] = [o.usage for o in run.outputs["again"] if o.usage]
    assert usage.cached_tokens == 39 and run.text("again") == texts["named"] == texts["open"]


def test_where_nothing_can_be_done_buffers_are_not_given_back_at_every_step() -> None:
    model, device = HashModel(), Device()
    run, pressure = run_of(model, model.caps, device)
    run.loop.submit(request_of("a", [1, 2, 3], 60, **ENDLESS))
    device.active = 930
    for _ in range(40):
        run.turn()
        pressure.relieve()
    assert pressure.governor.counts.done[Act.REMEASURE] < 20


def test_packing_that_fails_ends_nobody_but_those_whom_it_concerns(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no memory")

    device = Device()
    run, pressure = run_of(*packing(), device)
    for i in range(2):
        run.loop.submit(asked(f"r{i}", i, 20))
    run.loop.submit(asked("exact", 9, 20, EXACT))
    decoding(run, 3)
    monkeypatch.setattr(pressure_module, "convert", broken)
    device.active = 810
    pressure.relieve()
    device.active = 0
    run.until_idle()
    assert run.finish("exact") is run.finish("r0") is run.finish("r1") is Finish.LENGTH
    assert all(len(run.text(id)) == 20 for id in ("exact", "r0", "r1"))


def test_weights_that_fill_most_of_the_limit_are_no_pressure_by_themselves() -> None:
    model, device = HashModel(), Device()
    run, pressure = run_of(model, model.caps, device)
    run.loop.ledger.base = 900
    device.active = 970
    pressure.relieve()
    assert pressure.governor.level is Level.CALM and pressure.open(10)
    device.active = 985
    pressure.relieve()
    assert pressure.governor.level is Level.EVICT
