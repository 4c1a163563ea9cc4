"""Packed rows behind the loop: with cache, disk and batches the text is that of a cold request alone.

The hash model's rows cannot be packed but take the same way, so its text must be the exact one, bit for bit.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.test_loop import Clock, Run, request_of
from tests.engine.test_reuse import CONTEXT, GREAT, conversations, finish_of
from tests.engine.test_reuse_disk import flush, tier_at
from tests.fakes import STOP, VOCAB, HashModel, slow_twin
from tests.tiny import tiny
from treadle.cache import disk_keys, formats, geometry, recent_columns, spill
from treadle.cache.budget import Budget
from treadle.cache.spill import Spill
from treadle.cache.store import Settings, Store
from treadle.config import Config
from treadle.engine.loop import Loop
from treadle.engine.reuse import Reuse
from treadle.models.capabilities import new_layers
from treadle.models.packed_attention import install
from treadle.types import EXACT, Finish, KvFormat, Request, Sampling

KV = KvFormat(8, 8, 64, recent=5)
REAL = [KvFormat(8, 4, 64, recent=5), KvFormat(4, 4, 64, recent=5)]
KINDS = [("rows", "rows"), ("rows", "window"), ("state", "rows")]


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "STEP", 8)
    monkeypatch.setattr(geometry, "SLACK", 6)
    monkeypatch.setattr(recent_columns, "BLOCK", 4)
    monkeypatch.setattr(recent_columns, "SPARE", 6)
    monkeypatch.setattr(disk_keys, "BLOCK", 8)
    monkeypatch.setattr(spill, "BLOCK", 8)


def packed_run(model: HashModel, cache: Settings = GREAT, **settings: object) -> tuple[Run, Store]:
    clock = Clock()
    store = Store(cache, now=clock, active_memory=lambda: 0)
    config = Config(**{"checkpoint_every": 16, **settings})  # type: ignore[arg-type]
    caps = replace(model.caps, kv=KV)
    reuse = Reuse(store, caps, config.checkpoint_every)
    loop = Loop(model, caps, config, partial(new_layers, model, caps), None, reuse, clock)
    return Run(loop), store


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
@settings(max_examples=25)
@given(
    plan=conversations(),
    rows=st.integers(1, 4),
    chunk=st.integers(3, 40),
    budget=st.sampled_from([0, 600, 10**9]),
    aborts=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 60)), max_size=2),
)
def test_any_interleaving_of_conversations_gives_the_cold_text(
    kinds: tuple[str, ...], plan: list, rows: int, chunk: int, budget: int, aborts: list
) -> None:
    model = HashModel(kinds, context=CONTEXT)
    run, store = packed_run(model, Settings(Budget(budget, 10.0), 10**12), max_rows=rows, prefill_chunk=chunk)
    asked: list[Request] = []
    for turn, (wait, base, new, keep, sampling) in enumerate(plan):
        for _ in range(wait):
            run.turn()
        old: list[int] = []
        if base >= 0:
            done = asked[base]
            old = [*done.prompt.tolist(), *(run.text(done.id) if done.id in run.outputs else [])]
        prompt = np.array([*old[: len(old) * keep // 100], *new], np.int64)
        bounds = tuple(sorted({len(prompt) // 3, len(prompt) // 2} - {0}))
        asked.append(Request(f"r{turn}", prompt, sampling, 8, frozenset({STOP}), boundaries=bounds))
        run.loop.submit(asked[-1])
        for index, when in aborts:
            if index == turn and when % 2:
                run.turn()
                run.loop.abort(asked[-1].id)
        store.tree.check()
    run.until_idle()
    store.tree.check()
    assert not run.loop.reuse.failures
    for request in asked:
        expected = slow_twin(model, request, CONTEXT)
        made = run.text(request.id)
        assert made == (expected[: len(made)] if run.finish(request.id) is Finish.ABORT else expected)
    store.clear()
    assert store.tree.totals.nbytes == 0 and store.tree.totals.nodes == 0


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
@settings(max_examples=12)
@given(plan=conversations(), budget=st.sampled_from([0, 600, 10**9]), restarts=st.sets(st.integers(0, 8)))
def test_warm_text_equals_cold_text_across_evictions_and_restarts(
    tmp_path_factory: pytest.TempPathFactory, kinds: tuple[str, ...], plan: list, budget: int, restarts: set[int]
) -> None:
    model = HashModel(kinds, context=CONTEXT)
    folder = tmp_path_factory.mktemp("cache")
    texts: list[list[int]] = []
    run, store = packed_run(model, Settings(Budget(budget), 10**12), prefill_chunk=16)
    store.spill = Spill(tier_at(folder), 1)
    for turn, (_, base, new, keep, sampling) in enumerate(plan):
        old = texts[base] if base >= 0 else []
        prompt = np.array([*old[: len(old) * keep // 100], *new], np.int64)
        request = Request(f"r{turn}", prompt, sampling, 8, frozenset({STOP}), boundaries=(len(prompt) // 2,))
        text, _ = finish_of(run, request)
        assert text == slow_twin(model, request, CONTEXT) and not run.loop.reuse.failures
        texts.append([*prompt.tolist(), *text])
        flush(store)
        store.tree.check()
        if turn in restarts:
            store.spill.tier.stop()
            run, store = packed_run(model, Settings(Budget(budget), 10**12), prefill_chunk=16)
            store.spill = Spill(tier_at(folder), 1)
    store.spill.tier.stop()


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_repeats_turns_and_restarts_reuse_what_they_should(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    model = HashModel(kinds)
    run, store = packed_run(model)
    store.spill = Spill(tier_at(tmp_path), 1)
    prompt = [int(x) for x in np.random.default_rng(4).integers(1, VOCAB, 90)]
    first, cached = finish_of(run, request_of("a", prompt, 9))
    assert cached == 0
    assert finish_of(run, request_of("b", prompt, 9)) == (first, 89)
    turn = [*prompt, *first, STOP, 50, 60]
    _, cached = finish_of(run, request_of("c", turn, 9))
    assert cached >= len(prompt) + len(first) - 1
    flush(store)
    store.spill.tier.stop()
    run, store = packed_run(model)
    store.spill = Spill(tier_at(tmp_path), 1)
    again, cached = finish_of(run, request_of("d", prompt, 9))
    assert again == first and cached >= 80
    store.spill.tier.stop()


def real_run(store: Store | None, kv: KvFormat) -> Run:
    model, caps = tiny("wide heads")
    install(model)
    caps = replace(caps, kv=kv)
    return Run(Loop(model, caps, Config(), partial(new_layers, model, caps), None, Reuse(store, caps, 16)))


def asked(id: str, tokens: list[int], boundaries: tuple[int, ...] = (), n: int = 8) -> Request:
    return Request(id, np.array(tokens, np.int64), Sampling(temperature=0.0), n, boundaries=boundaries)


def random_ids(n: int, seed: int) -> list[int]:
    return [int(x) for x in np.random.default_rng(seed).integers(0, 128, n)]


@pytest.mark.parametrize("kv", REAL, ids=str)
def test_rows_that_are_really_packed_give_the_cold_text_warm_from_disk_and_in_a_batch(
    tmp_path: Path, kv: KvFormat
) -> None:
    def started() -> tuple[Run, Store]:
        store = Store(GREAT, active_memory=lambda: 0)
        store.spill = Spill(tier_at(tmp_path), 1)
        return real_run(store, kv), store

    run, store = started()
    base = random_ids(50, 0)
    requests = [asked("first", base, (20, 36))]
    texts = {"first": finish_of(run, requests[0])[0]}
    turn = [*base, *texts["first"], *random_ids(6, 1)]
    plans = {"repeat": base, "turn": turn, **{f"branch{n}": [*base[:n], *random_ids(7, n)] for n in (7, 21, 36, 44)}}
    for id, tokens in plans.items():
        requests.append(asked(id, tokens, (20, 36)))
        texts[id], cached = finish_of(run, requests[-1])
        assert cached >= {"repeat": 49, "turn": 57, "branch36": 36, "branch44": 36}.get(id, 0)
    flush(store)
    store.spill.tier.stop()
    run, store = started()
    for id, tokens in list(plans.items())[:2]:
        text, cached = finish_of(run, asked(id, tokens, (20, 36)))
        assert text == texts[id] and cached >= 40
    together = [asked(f"again {r.id}", r.prompt.tolist(), (20, 36)) for r in requests]
    for request in together:
        run.loop.submit(request)
    run.until_idle()
    assert not run.loop.reuse.failures
    for request, again in zip(requests, together, strict=True):
        cold, _ = finish_of(real_run(None, kv), request)
        assert texts[request.id] == cold == run.text(again.id)
    store.spill.tier.stop()


def test_rows_of_other_formats_are_not_shared() -> None:
    store = Store(GREAT, active_memory=lambda: 0)
    model, caps = tiny("wide heads")
    prompt = random_ids(40, 5)
    for i, kv in enumerate((EXACT, *REAL)):
        caps = replace(caps, kv=kv)
        loop = Loop(model, caps, Config(), partial(new_layers, model, caps), None, Reuse(store, caps, 16))
        assert finish_of(Run(loop), asked(f"a{i}", prompt))[1] == 0
        assert finish_of(Run(loop), asked(f"b{i}", prompt))[1] == 39


def test_files_of_an_earlier_layout_are_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, kv = random_ids(60, 6), REAL[1]

    def cached() -> int:
        store = Store(GREAT, active_memory=lambda: 0)
        store.spill = Spill(tier_at(tmp_path), 1)
        run = real_run(store, kv)
        found = finish_of(run, asked("a", prompt, (40,)))[1]
        flush(store)
        store.spill.tier.stop()
        assert not run.loop.reuse.failures
        return found

    monkeypatch.setattr(formats, "LAYOUT", 1)
    assert cached() == 0 and cached() >= 40
    monkeypatch.setattr(formats, "LAYOUT", 2)
    assert cached() == 0 and cached() >= 40
