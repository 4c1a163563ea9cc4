"""Drafts beside everything that can go wrong: the text is still that of the plain loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.engine.scripted import ScriptedSpeculation, WillingSpeculation
from tests.engine.test_loop import KINDS, Clock, Run, request_of
from tests.engine.test_speculation import following, scripted
from tests.fakes import STOP, VOCAB, HashModel, slow_twin
from tests.tiny import CONFIGS, built, tiny
from tests.tiny import VOCAB as TINY_VOCAB
from treadle.cache.budget import Budget
from treadle.cache.store import Settings, Store
from treadle.config import Config
from treadle.engine import scheduler
from treadle.engine.loop import Loop
from treadle.engine.reuse import Reuse
from treadle.engine.speculation import Speculation
from treadle.models.capabilities import new_layers
from treadle.types import Batching, Caps, Finish, KvFormat, Request, Sampling


class Padded(HashModel):
    """Wrong when rows of different length are padded: recurrent layers take the padding for tokens."""

    def _state(self, h: Any, layer: Any) -> Any:
        make_mask, layer.make_mask = layer.make_mask, lambda n: None
        try:
            return super()._state(h, layer)
        finally:
            layer.make_mask = make_mask


@pytest.mark.parametrize("batching", list(Batching))
@pytest.mark.parametrize("right", [0.3, 0.7])
def test_models_that_cannot_be_padded_draft_alone_and_never_meet_a_ragged_step(
    batching: Batching, right: float
) -> None:
    model = HashModel(("state", "rows")) if batching is Batching.RAGGED else Padded(("state", "rows"))
    caps = replace(model.caps, batching=batching)
    asked = [request_of(f"r{i}", [5 + i, 6, 7 + i], 40, logit_bias=((STOP, -100.0),)) for i in range(4)]
    truths = {r.id: slow_twin(model, r, 512) for r in asked}
    run = scripted(model, caps, truths, right)
    for request in asked:
        run.loop.submit(request)
        for _ in range(4):
            run.turn()
    run.until_idle()
    assert {r.id: run.text(r.id) for r in asked} == truths
    assert run.loop.speculation is not None and run.loop.speculation.counters.rounds > 0


class Failing(HashModel):
    """Raises in a step over several rows that brings drafts, once it is told to."""

    armed = False
    failures = 0

    def __call__(self, ids: Any, cache: list[Any]) -> Any:
        if self.armed and ids.shape[0] > 1 and ids.shape[1] > 1:
            self.failures += 1
            raise RuntimeError("out of memory")
        return super().__call__(ids, cache)


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_a_fault_in_a_checked_step_is_computed_again_alone(kinds: tuple[str, ...]) -> None:
    model = Failing(kinds)
    asked = [request_of(f"r{i}", [5 + i, 6, 7], 30, presence_penalty=0.4, logprobs=1) for i in range(3)]
    truths = {r.id: slow_twin(model, r, 512) for r in asked}
    run = scripted(model, model.caps, truths, 0.8)
    for request in asked:
        run.loop.submit(request)
    for _ in range(8):
        run.turn()
    model.armed = True
    run.until_idle()
    assert model.failures > 0
    assert {r.id: run.text(r.id) for r in asked} == truths


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
@pytest.mark.parametrize("turn", range(1, 12))
def test_an_abort_between_two_rounds_leaves_a_prefix_and_right_rows(kinds: tuple[str, ...], turn: int) -> None:
    model = HashModel(kinds)
    asked = [request_of(f"r{i}", [5 + i, 6, 7], 40, logit_bias=((STOP, -100.0),)) for i in range(2)]
    truths = {r.id: slow_twin(model, r, 512) for r in asked}
    run = scripted(model, model.caps, truths, 0.7)
    for request in asked:
        run.loop.submit(request)
    for _ in range(turn):
        run.turn()
    run.loop.abort("r0")
    run.until_idle()
    said = run.text("r0")
    assert said == truths["r0"][: len(said)] and run.text("r1") == truths["r1"]
    again = Request("r0", np.array([5, 6, 7, *said], np.int64), asked[0].sampling, 20)
    run.outputs.clear()
    truths["r0"] = slow_twin(model, again, 512)
    run.loop.submit(again)
    run.until_idle()
    assert run.text("r0") == truths["r0"]


class Ends(HashModel):
    """An end comes behind the token at position `length`, whatever that is."""

    length = 20

    def __call__(self, ids: Any, cache: list[Any]) -> Any:
        start = cache[0].offset
        logits = super().__call__(ids, cache)
        due = (start + mx.arange(ids.shape[1])) == self.length
        return logits + 1000.0 * mx.broadcast_to(due, ids.shape)[..., None] * (mx.arange(VOCAB) == STOP)


@pytest.mark.parametrize("behind", [0, 1, 5])
def test_an_end_id_inside_an_accepted_run_cuts_it_there(behind: int) -> None:
    model = Ends()
    request = request_of("x", [5, 6, 7], 60, logit_bias=((STOP, -100.0),))
    truth = slow_twin(model, request, 512)
    assert 3 < len(truth) < 40
    run = scripted(model, model.caps, {"x": [*truth, STOP, *range(1, behind + 1)]}, 1.0)
    run.loop.submit(request)
    run.until_idle()
    last = run.outputs["x"][-1]
    assert run.text("x") == truth
    assert (last.finish, last.stop_id) == (Finish.STOP, STOP)
    assert last.usage is not None and last.usage.completion_tokens == len(truth) + 1


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
@pytest.mark.parametrize("room", range(1, 9))
def test_drafts_never_go_beyond_the_room_of_a_reply_or_the_context(kinds: tuple[str, ...], room: int) -> None:
    class Narrow(HashModel):
        def __call__(self, ids: Any, cache: list[Any]) -> Any:
            assert ids.shape[0] > 1 or seen() + ids.shape[1] <= 32, "beyond the context"
            return super().__call__(ids, cache)

    def seen() -> int:
        return max((row.computed for row in run.loop.sequences()), default=0)

    model = Narrow(kinds, context=32)
    request = request_of("x", list(range(1, 33 - room)), None, logit_bias=((STOP, -100.0),))
    truth = slow_twin(HashModel(kinds, context=32), request, 32)
    assert len(truth) == room
    run = scripted(model, model.caps, {"x": [*truth, *range(30)]}, 1.0)
    assert run.loop.speculation is not None
    for tokens in range(1, 16):
        run.loop.speculation.cost.observe(tokens, 1.0)
    run.loop.speculation.cost.observe(16, 0.1)  # so that every step would be padded if it could
    run.loop.submit(request)
    run.until_idle()
    assert run.text("x") == truth and run.finish("x") is Finish.LENGTH


@pytest.mark.parametrize("name", ["attention", "window", "delta", "mamba"])
@pytest.mark.parametrize("rows", [1, 3])
def test_values_that_are_not_numbers_in_refused_drafts_leave_nothing_behind(name: str, rows: int) -> None:
    sound, caps = tiny(name)
    model, _ = built(CONFIGS[name])
    bad = 99
    weight = model.model.embed_tokens.weight
    model.model.embed_tokens.weight = mx.where((mx.arange(TINY_VOCAB) == bad)[:, None], mx.nan, weight)
    bias = ((bad, -1000.0),)
    asked = [
        Request(f"r{i}", np.arange(1 + i, 9 + 2 * i), Sampling(0.0, logit_bias=bias, logprobs=0), 24)
        for i in range(rows)
    ]
    truths = {r.id: slow_twin(sound, r, 512) for r in asked}
    run = scripted(model, caps, truths, 0.7)
    speculation = run.loop.speculation
    assert isinstance(speculation, ScriptedSpeculation)
    speculation.spoilt = bad
    for request in asked:
        run.loop.submit(request)
    run.until_idle()
    assert {r.id: run.text(r.id) for r in asked} == truths
    assert speculation.counters.rewinds > 0


@pytest.mark.parametrize("recent", [1, 8, 64])
@pytest.mark.parametrize("rows", [1, 3])
def test_packed_rows_take_refused_drafts_back(recent: int, rows: int) -> None:
    model, exact = tiny("wide heads")
    caps = replace(exact, kv=KvFormat(8, 8, 64, recent))
    asked = [Request(f"r{i}", np.arange(1, 50 + 7 * i) % 128, Sampling(0.0), 90) for i in range(rows)]
    plain = Run(Loop(model, caps, Config(prefill_chunk=16), partial(new_layers, model, caps), clock=Clock()))
    truths = {}
    for request in asked:
        plain.loop.submit(request)
        plain.until_idle()
        truths[request.id] = plain.text(request.id)
    run = scripted(model, caps, truths, 0.7, prefill_chunk=16)
    for request in asked:
        run.loop.submit(request)
    run.until_idle()
    assert {r.id: run.text(r.id) for r in asked} == truths


# The draft model


def drafting(
    model: Any, caps: Caps, small: Any, small_caps: Caps, store: Store, **config: Any
) -> tuple[Run, Speculation]:
    """A loop whose drafts all come from `small`, as many as there may be."""
    clock = Clock()
    follow = following(small, small_caps, Reuse(store, small_caps, 16, "draft"))
    speculation = WillingSpeculation(caps, clock, lookup=False, following=follow)
    settings = Config(**{"max_rows": 3, "prefill_chunk": 16, **config})
    layers = partial(new_layers, model, caps)
    reuse = Reuse(store, caps, 16, "target")
    return Run(Loop(model, caps, settings, layers, None, reuse, clock, speculation=speculation)), speculation


def new_store() -> Store:
    return Store(Settings(Budget(2**30), 2**62))


def some_requests(count: int = 4, tokens: int = 24) -> list[Request]:
    rng = np.random.default_rng(5)
    lengths = (2, 70, 20, 45)[:count]
    return [
        Request(f"r{i}", rng.integers(0, TINY_VOCAB, n), Sampling(0.0 if i % 2 else 0.8, seed=i), tokens)
        for i, n in enumerate(lengths)
    ]


def served(run: Run, asked: list[Request]) -> None:
    for request in asked:
        run.loop.submit(request)
        run.turn()
        run.turn()
    run.until_idle()


@pytest.mark.parametrize("small", ["attention", "window"])
def test_rows_that_the_draft_model_leaves_in_the_cache_are_its_own_right_ones(small: str) -> None:
    """They would be those of the same model served by itself: it must say what it says without any cache."""
    model, caps = tiny("mla")
    draft, draft_caps = tiny(small)
    store = new_store()
    asked = some_requests()
    run, speculation = drafting(model, caps, draft, draft_caps, store)
    served(run, asked)
    assert sum(speculation.counters.drafted.values()) > 0
    reuse = Reuse(store, draft_caps, 16, "draft")
    alone = Run(Loop(draft, draft_caps, Config(), partial(new_layers, draft, draft_caps), None, reuse, Clock()))
    for request in asked:
        text = run.text(request.id)
        assert text == slow_twin(model, request, 512)
        for cut in (1, len(text) // 2, len(text)):
            prompt = np.array([*request.prompt.tolist(), *text[:cut]], np.int64)
            after = Request(f"{request.id}-{cut}", prompt, Sampling(0.0), 8)
            alone.loop.submit(after)
            alone.until_idle()
            usage = alone.outputs[after.id][-1].usage
            assert alone.text(after.id) == slow_twin(draft, after, 512)
            assert usage is not None and (usage.cached_tokens > 0 or len(request.prompt) < 4)


def test_rows_of_two_groups_share_one_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "SHORT", 8)
    model, caps = tiny("attention")
    run, speculation = drafting(model, caps, model, caps, new_store())
    asked = some_requests(4, 40)
    groups = 0
    for request in asked:
        run.loop.submit(request)
    while run.loop.busy:
        run.turn()
        groups = max(groups, len(run.loop.groups))
    assert groups > 1
    for request in asked:
        assert run.text(request.id) == slow_twin(model, request, 512)
    assert sum(speculation.counters.accepted.values()) > 0


@pytest.mark.parametrize("sizes", [(128, 160), (160, 128)], ids=["larger", "smaller"])
def test_a_draft_model_may_have_more_or_fewer_padded_ids(sizes: tuple[int, int]) -> None:
    (model, caps), (small, small_caps) = (_with_vocabulary(n) for n in sizes)
    run, speculation = drafting(model, caps, small, small_caps, new_store())
    asked = [replace(r, sampling=replace(r.sampling, temperature=1.5, logit_bias=((7, 3.0),))) for r in some_requests()]
    if sizes[0] > sizes[1]:  # ids that the draft model does not know
        asked = [replace(r, prompt=np.append(r.prompt, 150), sampling=replace(r.sampling, seed=9)) for r in asked]
    served(run, asked)
    for request in asked:
        assert run.text(request.id) == slow_twin(model, request, 512)
    assert sum(speculation.counters.drafted.values()) > 0


def _with_vocabulary(size: int) -> tuple[Any, Caps]:
    model, caps = built({"model_type": "llama", "vocab_size": size})
    return model, replace(caps, vocab_size=size)


class Broken:
    """A draft model that fails after some calls; everything else is that of `model`."""

    def __init__(self, model: Any, calls: int) -> None:
        self.model = model
        self.calls = calls

    def make_cache(self) -> list[Any]:
        return list(self.model.make_cache())

    @property
    def layers(self) -> Any:
        return self.model.layers

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.calls -= 1
        if self.calls < 0:
            raise RuntimeError("out of memory")
        return self.model(*given, **named)


@pytest.mark.parametrize("calls", [0, 1, 3, 9, 25])
def test_a_draft_model_that_fails_is_given_up_and_nobody_notices(calls: int) -> None:
    model, caps = tiny("attention")
    store = new_store()
    run, speculation = drafting(model, caps, Broken(model, calls), caps, store)
    asked = some_requests()
    served(run, asked)
    for request in asked:
        assert run.text(request.id) == slow_twin(model, request, 512)
        assert run.finish(request.id) is Finish.LENGTH
    assert speculation.following is None and "out of memory" in speculation.fault
    store.tree.check()


@pytest.mark.parametrize("context", [20, 64, 100])
def test_a_draft_model_with_a_shorter_context_drafts_as_far_as_it_reaches(context: int) -> None:
    model, caps = tiny("attention")
    short = replace(caps, context_length=context)
    fed: list[int] = []

    def watched(calls: Callable[..., Any]) -> Callable[..., Any]:
        def call(ids: Any, cache: list[Any]) -> Any:
            offset = cache[0].offset
            fed.append(int(mx.max(mx.array(offset)).item()) + ids.shape[1])
            return calls(ids, cache=cache)

        return call

    small: Any = Broken(model, 10**9)
    small.model = type("Watched", (), {"__call__": staticmethod(watched(model)), "layers": model.layers})()
    run, speculation = drafting(model, caps, small, short, new_store())
    follow = speculation.following
    assert follow is not None
    follow.new_layers = partial(new_layers, model, short)
    asked = some_requests(4, 60)
    served(run, asked)
    for request in asked:
        assert run.text(request.id) == slow_twin(model, request, 512)
    assert speculation.following is follow and not speculation.fault
    assert max(fed, default=0) <= context
    assert not follow.draft.keys and not follow.lagging()


@pytest.mark.parametrize("turn", range(2, 14, 2))
def test_aborts_and_faults_leave_the_draft_model_in_order(turn: int) -> None:
    class Once(Broken):
        failed = False

        def __call__(self, ids: Any, cache: list[Any]) -> Any:
            if self.calls < 0 and not self.failed and ids.shape[0] > 1:
                self.failed = True
                raise RuntimeError("out of memory")
            return self.model(ids, cache=cache)

    model, caps = tiny("attention")
    target = Once(model, 0)
    run, speculation = drafting(target, caps, model, caps, new_store())
    asked = some_requests(3, 40)
    for request in asked:
        run.loop.submit(request)
    for _ in range(turn):
        run.turn()
    target.calls = -1
    run.turn()
    run.loop.abort("r1")
    run.until_idle()
    for request in (asked[0], asked[2]):
        assert run.text(request.id) == slow_twin(model, request, 512)
    assert speculation.following is not None and not speculation.following.draft.keys
    assert not speculation.following.lagging()
