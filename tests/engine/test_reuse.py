"""A warm text equals the cold one, whatever the cache did in between; and what should be cached is cached."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.test_loop import KINDS, Clock, Run, request_of, samplings
from tests.fakes import STOP, VOCAB, HashModel, slow_twin
from treadle.cache import geometry
from treadle.cache.budget import Budget
from treadle.cache.store import Settings, Store
from treadle.config import Config
from treadle.engine.loop import Loop
from treadle.engine.reuse import Reuse
from treadle.models.capabilities import new_layers
from treadle.types import Finish, Request

CONTEXT = 400
GREAT = Settings(Budget(10**9), 10**12)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "STEP", 8)
    monkeypatch.setattr(geometry, "SLACK", 6)


def cached_run(model: HashModel, cache: Settings = GREAT, **settings: object) -> tuple[Run, Store]:
    clock = Clock()
    store = Store(cache, now=clock, active_memory=lambda: 0)
    config = Config(**{"checkpoint_every": 16, **settings})  # type: ignore[arg-type]
    reuse = Reuse(store, model.caps, config.checkpoint_every)
    loop = Loop(model, model.caps, config, partial(new_layers, model, model.caps), None, reuse, clock)
    return Run(loop), store


def finish_of(run: Run, request: Request) -> tuple[list[int], int]:
    """(text, cached tokens) of one request run to its end."""
    run.loop.submit(request)
    run.until_idle()
    return run.text(request.id), run.outputs[request.id][-1].usage.cached_tokens


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[int, int, list[int], int, object]]:
    """(wait in turns, which earlier text to build on or -1, new tokens, how much of it to keep in %, sampling)."""
    n = draw(st.integers(2, 9))
    return [
        (
            draw(st.integers(0, 12)),
            draw(st.integers(-1, i - 1)),
            draw(st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=25)),
            draw(st.sampled_from([100, 100, 100, 60, 30, 5])),
            draw(samplings),
        )
        for i in range(n)
    ]


@pytest.mark.parametrize("kinds", [*KINDS, ("window", "window"), ("state",)], ids="+".join)
@settings(max_examples=30)
@given(
    plan=conversations(),
    rows=st.integers(1, 4),
    chunk=st.integers(3, 40),
    budget=st.sampled_from([0, 300, 2000, 10**9]),
    idle=st.sampled_from([0.02, 10.0]),
    aborts=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 60)), max_size=2),
)
def test_any_interleaving_of_conversations_gives_the_cold_text(
    kinds: tuple[str, ...], plan: list, rows: int, chunk: int, budget: int, idle: float, aborts: list
) -> None:
    model = HashModel(kinds, context=CONTEXT)
    cache = Settings(Budget(budget, idle), 10**12)
    run, store = cached_run(model, cache, max_rows=rows, prefill_chunk=chunk)
    asked: list[Request] = []
    for turn, (wait, base, new, keep, sampling) in enumerate(plan):
        for _ in range(wait):
            run.turn()
        old: list[int] = []
        if base >= 0:
            done = asked[base]
            old = [*done.prompt.tolist(), *(run.text(done.id) if done.id in run.outputs else [])]
        prompt = [*old[: len(old) * keep // 100], *new]
        bounds = tuple(sorted({len(prompt) // 3, len(prompt) // 2} - {0}))
        ids = np.array(prompt, np.int64)
        request = Request(f"r{turn}", ids, sampling, 8, frozenset({STOP}), boundaries=bounds)
        asked.append(request)
        run.loop.submit(request)
        for index, when in aborts:
            if index == turn and when % 2:
                run.turn()
                run.loop.abort(request.id)
        store.tree.check()
    run.until_idle()
    store.tree.check()
    for request in asked:
        expected = slow_twin(model, request, CONTEXT)
        made = run.text(request.id)
        assert made == (expected[: len(made)] if run.finish(request.id) is Finish.ABORT else expected)
    assert all(node.pins == 0 for node in store.tree.nodes())
    assert store.tree.totals.nbytes <= max(budget, 0) or budget == 10**9
    store.clear()
    assert store.tree.totals.nbytes == 0 and store.tree.totals.nodes == 0


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_an_exact_repeat_computes_one_token(kinds: tuple[str, ...]) -> None:
    run, _ = cached_run(HashModel(kinds))
    prompt = list(range(1, 41))
    first, cached = finish_of(run, request_of("a", prompt))
    assert cached == 0
    for i in range(3):
        again, cached = finish_of(run, request_of(f"b{i}", prompt))
        assert again == first and cached == 39


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_the_next_turn_reuses_the_prompt_and_the_reply(kinds: tuple[str, ...]) -> None:
    run, _ = cached_run(HashModel(kinds))
    tokens, known = list(range(1, 31)), 0
    for turn in range(5):
        text, cached = finish_of(run, request_of(f"t{turn}", tokens, 12))
        assert cached >= known
        known = len(tokens) + len(text) - 1
        tokens = [*tokens, *text, STOP, 50 + turn, 60]


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_two_branches_by_turns_keep_their_shared_prefix(kinds: tuple[str, ...]) -> None:
    run, _ = cached_run(HashModel(kinds))
    shared = list(range(1, 41))
    branches = {"a": [*shared, 70], "b": [*shared, 80]}
    for turn in range(4):
        for name, tokens in branches.items():
            request = request_of(f"{name}{turn}", tokens, 6)
            request = Request(**{**{f: getattr(request, f) for f in request.__slots__}, "boundaries": (40,)})
            text, cached = finish_of(run, request)
            assert cached >= 40 or (turn == 0 and name == "a")
            if turn:
                assert cached >= len(tokens) - 4
            branches[name] = [*tokens, *text, 90, 91]


def test_a_burst_with_one_long_system_prompt_computes_it_once() -> None:
    model = HashModel(("rows", "rows"))
    run, store = cached_run(model, prefill_chunk=16, max_rows=8)
    shared = [int(x) for x in np.random.default_rng(1).integers(1, VOCAB, 200)]
    for i in range(8):
        run.loop.submit(request_of(f"r{i}", [*shared, i + 1, i + 2], 5))
    run.until_idle()
    cached = sorted(run.outputs[f"r{i}"][-1].usage.cached_tokens for i in range(8))
    assert cached[0] == 0 and all(c >= 200 for c in cached[1:])
    assert store.reuse.computed <= 202 + 7 * 2 + 7


def test_three_branches_on_one_prefix_store_it_once() -> None:
    model = HashModel(("rows", "rows"))
    run, store = cached_run(model)
    shared = [int(x) for x in np.random.default_rng(1).integers(1, VOCAB, 300)]
    for i in range(3):
        finish_of(run, request_of(f"r{i}", [*shared, i + 1, i + 2], 5))
    row_bytes = 2 * 2 * 4  # two layers, keys and values, one uint32 each
    assert store.tree.totals.nbytes <= (300 + 3 * 8) * row_bytes + 2 * 8 * row_bytes


def test_different_salts_share_nothing() -> None:
    run, _ = cached_run(HashModel())
    prompt = list(range(1, 31))
    finish_of(run, request_of("a", prompt))
    request = request_of("b", prompt)
    salted = Request(request.id, request.prompt, request.sampling, 5, request.stop_ids, cache_salt="other")
    assert finish_of(run, salted)[1] == 0
    assert finish_of(run, request_of("c", prompt))[1] == 29


def test_an_aborted_prefill_leaves_what_it_computed() -> None:
    run, _ = cached_run(HashModel(), prefill_chunk=10)
    prompt = list(range(1, 81))
    run.loop.submit(request_of("a", prompt))
    for _ in range(3):
        run.turn()
    run.loop.abort("a")
    run.until_idle()
    text, cached = finish_of(run, request_of("b", prompt))
    assert cached == 30 and text == slow_twin(HashModel(), request_of("b", prompt), 512)


def test_a_fault_poisons_nothing_and_is_healed_by_the_next_request() -> None:
    model = HashModel()
    run, _ = cached_run(model)
    prompt = list(range(1, 41))
    run.loop.submit(request_of("a", prompt))
    run.turn()
    run.loop.reuse.forget(next(run.loop.sequences()))
    run.until_idle()
    assert finish_of(run, request_of("b", prompt)) == (slow_twin(model, request_of("b", prompt), 512), 0)
    assert finish_of(run, request_of("c", prompt))[1] == 39


@pytest.mark.parametrize("kinds", [*KINDS, ("window", "window")], ids="+".join)
def test_a_branch_at_any_point_near_or_far_from_a_window_gives_the_cold_text(kinds: tuple[str, ...]) -> None:
    model = HashModel(kinds, context=CONTEXT)
    shared = [int(x) for x in np.random.default_rng(2).integers(1, VOCAB, 60)]
    for at in range(1, 60, 3):
        run, _ = cached_run(model, prefill_chunk=64)
        finish_of(run, request_of("first", shared, 9))
        branch = request_of("branch", [*shared[:at], 96, 95], 9)
        assert finish_of(run, branch)[0] == slow_twin(model, branch, CONTEXT)
        again = request_of("again", shared, 9)
        assert finish_of(run, again)[0] == slow_twin(model, again, CONTEXT)


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "in a batch"])
def test_a_reply_that_was_cut_off_can_be_continued_from_its_last_token(kinds: tuple[str, ...], beside: bool) -> None:
    """A step is under way when the abort comes; its token must not be part of what is kept."""
    model = HashModel(kinds, context=CONTEXT)
    endless = {"logit_bias": ((STOP, -100.0),)}
    run, _ = cached_run(model)
    if beside:
        run.loop.submit(request_of("other", [9, 8, 7], 300, **endless))
    run.loop.submit(request_of("cut", list(range(1, 31)), 100, **endless))
    while "cut" not in run.outputs or len(run.text("cut")) < 5:
        run.turn()
    run.loop.abort("cut")
    run.turn()
    tokens = [*range(1, 31), *run.text("cut"), 77, 78]
    request = request_of("next", tokens, 9)
    run.loop.submit(request)
    while not run.outputs.get("next") or run.outputs["next"][-1].finish is None:
        run.turn()
    assert run.text("next") == slow_twin(model, request, CONTEXT)
    assert run.outputs["next"][-1].usage.cached_tokens >= len(tokens) - 3


@pytest.mark.parametrize("broken", ["acquire", "publish", "release", "keep", "make_room"])
def test_a_failure_inside_the_cache_is_a_miss(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = HashModel()
    run, store = cached_run(model, prefill_chunk=10)
    prompt = list(range(1, 41))
    first, _ = finish_of(run, request_of("a", prompt))

    def fail(*args: object, **rest: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(Store, broken, fail)
    assert finish_of(run, request_of("b", prompt))[0] == first
    assert run.loop.reuse.failures and "broken" in run.loop.reuse.note
    monkeypatch.undo()
    assert finish_of(run, request_of("c", prompt))[0] == first
    assert all(node.pins == 0 for node in store.tree.nodes())
