"""Rows that several sequences claim, lose or leave behind: none is given uncomputed, and each byte counts once."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import numpy as np
import pytest

from tests.engine.test_loop import KINDS, Clock, Run, request_of
from tests.engine.test_reuse import CONTEXT, GREAT, cached_run, finish_of
from tests.fakes import HashModel
from treadle.cache import geometry
from treadle.cache.budget import Budget
from treadle.cache.segments import Live
from treadle.cache.store import Lease, Settings, Store
from treadle.config import Config
from treadle.engine.loop import Loop
from treadle.engine.reuse import Reuse
from treadle.models.capabilities import forward, new_layers
from treadle.types import Ids

KEY = ("", "")


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "STEP", 8)
    monkeypatch.setattr(geometry, "SLACK", 6)


def begun(model: HashModel, store: Store, ids: Ids) -> Lease:
    lease = store.acquire(KEY, ids, new_layers(model, model.caps))
    lease.holder.locate = lambda: (lease.layers, 0)
    return lease


def advance(model: HashModel, store: Store, lease: Lease, ids: Ids) -> None:
    """Compute and publish all of `ids` that the layers lack."""
    forward(model, [ids[lease.layers.lengths[0] :].tolist()], lease.layers)
    store.publish(lease.holder, ids)


def arrays_held(store: Store) -> int:
    """Bytes of the different arrays that the tree keeps alive."""
    arrays = {}
    for node in store.tree.nodes():
        own = node.payload.holder.locate()[0].arrays() if isinstance(node.payload, Live) else node.payload.tensors
        kept = [a for checkpoint in node.checkpoints for a in checkpoint.value.arrays()]
        arrays |= {id(a): a for a in [*own, *kept]}
    return sum(a.nbytes for a in arrays.values())


def test_a_sequence_heals_only_what_it_has_computed_itself() -> None:
    model = HashModel()
    store = Store(GREAT, active_memory=lambda: 0)
    ids = np.arange(1, 41, dtype=np.int64)
    lost = begun(model, store, ids)
    advance(model, store, lost, ids[:39])
    store.forget(lost.holder)
    healer = begun(model, store, ids)
    assert healer.length == 0
    advance(model, store, healer, ids[:16])
    assert begun(model, store, ids).length <= 16
    advance(model, store, healer, ids[:39])
    assert begun(model, store, ids).length == 39


def test_layers_lost_to_a_fault_are_let_go_at_once() -> None:
    run, store = cached_run(HashModel(), prefill_chunk=16)
    run.loop.submit(request_of("a", list(range(1, 41))))
    run.turn()
    sequence = next(run.loop.sequences())
    assert sequence.layers is not None
    layers = weakref.ref(sequence.layers)
    run.loop.reuse.forget(sequence)
    del sequence
    run.until_idle()
    gc.collect()
    assert layers() is None and store.tree.totals.nodes > 0


def test_parked_layers_whose_end_another_sequence_took_over_are_not_kept_for_their_beginning() -> None:
    model = HashModel()
    store = Store(GREAT, active_memory=lambda: 0)
    ids = np.arange(1, 61, dtype=np.int64)
    first = begun(model, store, ids[:31])
    advance(model, store, first, ids[:28])
    branch_ids = np.append(ids[:20], [90, 91])
    branch = begun(model, store, branch_ids)
    advance(model, store, branch, branch_ids)
    second = begun(model, store, ids)
    assert second.length == 28
    advance(model, store, first, ids[:30])
    store.release(first.holder, ids[:30])
    advance(model, store, second, ids[:40])
    live = {node.payload.holder for node in store.tree.nodes() if isinstance(node.payload, Live)}
    assert live == {second.holder, branch.holder} and store.tree.totals.nbytes == 0
    store.release(second.holder, ids[:40])
    assert store.tree.totals.nbytes == second.layers.nbytes
    store.tree.check()


@pytest.mark.parametrize("kinds", [*KINDS, ("state",)], ids="+".join)
def test_each_array_counts_once(kinds: tuple[str, ...]) -> None:
    run, store = cached_run(HashModel(kinds))
    tokens = list(range(1, 31))
    for turn in range(3):
        text, _ = finish_of(run, request_of(f"t{turn}", tokens, 12))
        assert store.tree.totals.nbytes == arrays_held(store)
        tokens = [*tokens, *text, 50 + turn, 60]


@pytest.mark.parametrize("kinds", [("state", "rows"), ("window", "rows")], ids="+".join)
def test_a_conversation_with_more_snapshots_than_fit_keeps_its_last_ones(kinds: tuple[str, ...]) -> None:
    model = HashModel(kinds, context=CONTEXT)
    cold, store = cached_run(model, checkpoint_every=16)
    prompt = list(range(1, 61))
    finish_of(cold, request_of("a", prompt, 4))
    budget = store.tree.totals.nbytes - 1
    clock = Clock()
    store = Store(Settings(Budget(budget), 10**12), now=clock, active_memory=lambda: 0)
    layers = partial(new_layers, model, model.caps)
    run = Run(Loop(model, model.caps, Config(), layers, None, Reuse(store, model.caps, 16), clock))
    text, _ = finish_of(run, request_of("a", prompt, 4))
    assert store.tree.totals.nbytes <= budget
    assert finish_of(run, request_of("b", prompt, 4)) == (text, 59)


def test_the_cache_gives_way_between_chunks_when_memory_is_short() -> None:
    pressure = [0]
    run, store = cached_run(HashModel(context=CONTEXT), prefill_chunk=16)
    store.active_memory = lambda: pressure[0]
    finish_of(run, request_of("old", [7, *range(1, 60)], 4))
    assert store.tree.totals.nbytes > 0
    pressure[0] = 10**12
    run.loop.submit(request_of("new", list(range(30, 90)), 4))
    run.turn()
    assert run.loop.num_running == 1 and store.tree.totals.nbytes == 0
