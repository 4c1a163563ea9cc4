"""Tiny real architectures with the prefix cache: warm equals cold at any branch point, alone and in a batch."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tests.engine.test_loop import Run
from tests.engine.test_reuse import finish_of
from tests.fakes import slow_twin
from tests.tiny import CONFIGS, VOCAB, tiny
from treadle.cache.budget import Budget
from treadle.cache.report import cache_report
from treadle.cache.store import Settings, Store
from treadle.config import Config
from treadle.engine.loop import Loop
from treadle.engine.reuse import Reuse
from treadle.models.capabilities import new_layers
from treadle.types import Request, Sampling


class Time:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def cached_run(name: str, **cache: int) -> tuple[Run, Store, Time]:
    model, caps = tiny(name)
    clock = Time()
    store = Store(Settings(Budget(10**9), 10**12, **cache), now=clock, active_memory=lambda: 0)
    reuse = Reuse(store, caps, 16)
    return Run(Loop(model, caps, Config(), partial(new_layers, model, caps), None, reuse)), store, clock


def request_of(id: str, tokens: list[int], boundaries: tuple[int, ...] = (), n: int = 8) -> Request:
    return Request(id, np.array(tokens, np.int64), Sampling(temperature=0.0), n, boundaries=boundaries)


def random_ids(n: int, seed: int = 0) -> list[int]:
    return [int(x) for x in np.random.default_rng(seed).integers(0, VOCAB, n)]


@pytest.mark.parametrize("name", CONFIGS)
def test_turns_branches_and_repeats_give_the_cold_text(name: str) -> None:
    model, caps = tiny(name)
    run, store, _ = cached_run(name)
    base = random_ids(50)
    asked = [request_of("first", base, (20, 36))]
    texts = [finish_of(run, asked[0])[0]]
    turn = [*base, *texts[0], *random_ids(6, 1)]
    for id, tokens in (
        ("repeat", base),
        ("turn", turn),
        *[(f"branch{at}", [*base[:at], *random_ids(7, at)]) for at in (3, 7, 8, 9, 21, 36, 44, 49)],
        ("turn again", [*turn, *random_ids(3, 2)]),
    ):
        asked.append(request_of(id, tokens, (20, 36)))
        texts.append(finish_of(run, asked[-1])[0])
        store.tree.check()
    for request, text in zip(asked, texts, strict=True):
        assert text == slow_twin(model, request, caps.context_length)
    assert run.outputs["repeat"][-1].usage.cached_tokens == 49
    assert run.outputs["turn"][-1].usage.cached_tokens >= 57
    assert run.outputs["branch36"][-1].usage.cached_tokens == 36
    assert run.outputs["branch44"][-1].usage.cached_tokens >= 36


@pytest.mark.parametrize("name", CONFIGS)
def test_requests_that_share_a_prefix_and_run_together_give_the_cold_text(name: str) -> None:
    model, caps = tiny(name)
    run, _, _ = cached_run(name)
    base = random_ids(40)
    asked = [request_of(f"r{i}", [*base, *random_ids(3 + i, i)], (20, 40), 6 + i) for i in range(4)]
    for request in asked:
        run.loop.submit(request)
        run.turn()
    run.until_idle()
    for request in asked:
        assert run.text(request.id) == slow_twin(model, request, caps.context_length)


@pytest.mark.parametrize("bits", [8, 4])
def test_idle_prefixes_are_quantised_and_still_serve(bits: int) -> None:
    run, store, clock = cached_run("wide heads", bits=bits, min_tokens=32)
    base = random_ids(300)
    first, _ = finish_of(run, request_of("a", base))
    exact = store.tree.totals.nbytes
    assert not store.tidy()
    clock.now += 60
    while store.tidy():
        pass
    report = cache_report(store)
    assert report.bytes_by_tier["quantised"] == report.used_bytes < (0.30 if bits == 8 else 0.17) * exact
    store.tree.check()
    again, cached = finish_of(run, request_of("b", [*base[:200], 5]))
    assert cached == 200 and len(again) == 8
    if bits == 8:
        assert finish_of(run, request_of("c", base))[0][:1] == first[:1]


def test_layers_that_cannot_be_quantised_stay_exact() -> None:
    run, store, clock = cached_run("attention", bits=4, min_tokens=32)
    base = random_ids(100)
    first, _ = finish_of(run, request_of("a", base))
    clock.now += 60
    while store.tidy():
        pass
    assert finish_of(run, request_of("b", base)) == (first, 99)


def test_reported_bytes_are_those_of_the_device() -> None:
    import gc

    import mlx.core as mx

    run, store, _ = cached_run("wide heads")
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    for i in range(6):
        finish_of(run, request_of(f"r{i}", random_ids(200 + 10 * i, i)))
    gc.collect()
    held = mx.get_active_memory() - before
    assert abs(store.tree.totals.nbytes - held) <= 0.02 * held + 4096


def test_a_budget_holds_however_many_prompts_come() -> None:
    model, caps = tiny("wide heads")
    store = Store(Settings(Budget(600_000), 10**12), active_memory=lambda: 0)
    run = Run(Loop(model, caps, Config(), partial(new_layers, model, caps), None, Reuse(store, caps, 512)))
    for i in range(40):
        finish_of(run, request_of(f"r{i}", random_ids(60, i), n=2))
        assert store.tree.totals.nbytes <= 600_000
    assert cache_report(store).evictions["budget"] > 0


def test_the_first_progress_report_has_what_the_cache_had() -> None:
    run, _, _ = cached_run("attention")
    base = random_ids(50)
    for id, tokens in (("first", base), ("again", [*base, *random_ids(7, 1)])):
        finish_of(run, request_of(id, tokens))
    for id in ("first", "again"):
        told = [output.prefilled for output in run.outputs[id] if output.prefilled is not None]
        assert told[0] == run.outputs[id][-1].usage.cached_tokens
