"""Drafts change how many steps a text takes, never the text."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.scripted import ScriptedSpeculation
from tests.engine.test_loop import KINDS, Clock, Run, requests
from tests.fakes import VOCAB, HashModel, slow_twin
from tests.tiny import CONFIGS, tiny
from tests.tiny import VOCAB as TINY_VOCAB
from treadle.bench.speculate_steps import Flat
from treadle.cache.budget import Budget
from treadle.cache.store import Settings, Store
from treadle.config import Config
from treadle.engine.following import Following
from treadle.engine.loop import Loop
from treadle.engine.reuse import Reuse
from treadle.engine.sampling import Sampler
from treadle.engine.speculation import Speculation
from treadle.models.capabilities import new_layers
from treadle.speculate.control import Source
from treadle.speculate.draft_model import DraftModel
from treadle.types import Caps, Finish, Request, Sampling


def scripted(model: Any, caps: Caps, truths: dict[str, list[int]], right: float, **config: Any) -> Run:
    clock = Clock()
    speculation = ScriptedSpeculation(caps, clock)
    speculation.truths, speculation.right = truths, right
    layers = partial(new_layers, model, caps)
    reuse = Reuse(Store(Settings(Budget(2**30), 2**62)), caps, 16)
    return Run(Loop(model, caps, Config(**config), layers, None, reuse, clock, speculation=speculation))


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
@settings(max_examples=15)
@given(data=st.data())
def test_with_any_drafts_in_any_batch_the_text_is_that_of_the_plain_loop(
    kinds: tuple[str, ...], data: st.DataObject
) -> None:
    model = HashModel(kinds, context=48)
    plan = [data.draw(requests(i)) for i in range(data.draw(st.integers(1, 5)))]
    truths = {request.id: slow_twin(model, request, 48) for _, _, request in plan}
    run = scripted(
        model,
        model.caps,
        truths,
        data.draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])),
        max_rows=data.draw(st.integers(1, 4)),
        prefill_chunk=data.draw(st.integers(1, 24)),
    )
    run.play(plan)
    for _, _, request in plan:
        made = run.text(request.id)
        if run.finish(request.id) is Finish.ABORT:
            assert made == truths[request.id][: len(made)]
        else:
            assert made == truths[request.id]
    # What the sequences left in the cache is right as well: a second round starts from it.
    for _, _, request in plan:
        run.outputs.clear()
        run.loop.submit(request)
        run.until_idle()
        assert run.text(request.id) == truths[request.id]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("right", [0.6, 1.0])
def test_tiny_real_models_give_the_same_text_with_drafts(name: str, right: float) -> None:
    model, caps = tiny(name)
    rng = np.random.default_rng(3)
    asked = [
        Request(
            f"r{i}",
            rng.integers(0, TINY_VOCAB, n),
            Sampling(temperature=0.0 if i % 2 else 1.0, seed=i, top_p=0.95, presence_penalty=0.3 * (i % 3), logprobs=2),
            max_tokens=10 + 3 * i,
        )
        for i, n in enumerate((1, 3, 9, 30, 47))
    ]
    truths = {r.id: slow_twin(model, r, caps.context_length) for r in asked}
    run = scripted(model, caps, truths, right, prefill_chunk=16, max_rows=3)
    for request in asked:
        run.loop.submit(request)
        run.turn()
    run.until_idle()
    for request in asked:
        assert run.text(request.id) == truths[request.id]
        logprobs = [p for output in run.outputs[request.id] for p in output.logprobs]
        assert [p.token for p in logprobs] == truths[request.id]


def test_right_drafts_save_steps_and_are_counted() -> None:
    model = HashModel()
    request = Request("x", np.array([5, 6, 7]), Sampling(0.0, logit_bias=((0, -100.0),)), 64)
    truth = slow_twin(model, request, 512)
    run = scripted(model, model.caps, {"x": truth}, 1.0)
    run.loop.submit(request)
    turns = 0
    while run.loop.busy:
        run.turn()
        turns += 1
    usage = run.outputs["x"][-1].usage
    assert run.text("x") == truth and turns < 40
    assert usage is not None and 0 < usage.accepted_tokens == usage.drafted_tokens
    speculation = run.loop.speculation
    assert speculation is not None
    counters = speculation.counters
    assert counters.accepted[Source.LOOKUP] == usage.accepted_tokens and counters.rewinds == 0
    assert counters.verify_tokens + counters.plain_tokens <= 64 and counters.rounds > 0


def test_lookup_finds_text_that_repeats_itself() -> None:
    class Echo(HashModel):
        """Says its prompt's cycle over and over: the next token is a function of the last one."""

        def __call__(self, ids: Any, cache: list[Any]) -> Any:
            import mlx.core as mx

            logits = super().__call__(ids, cache)
            return logits + 100 * (mx.arange(VOCAB) == ((ids % 7) + 1)[..., None])

    model = Echo()
    request = Request("x", np.array([1, 2, 3, 4, 5, 6, 7] * 3), Sampling(0.0), 60)
    clock = Clock()
    loop = Loop(
        model,
        model.caps,
        Config(),
        partial(new_layers, model, model.caps),
        clock=clock,
        speculation=Speculation(model.caps, clock),
    )
    run = Run(loop)
    loop.submit(request)
    turns = 0
    while loop.busy:
        run.turn()
        turns += 1
    assert run.text("x") == slow_twin(model, request, 512)
    assert turns < 45, "with drafts it takes fewer steps than tokens"


def test_a_request_may_forbid_drafts() -> None:
    model = HashModel()
    request = Request("x", np.array([5, 6, 7]), Sampling(0.0), 20, speculation=False)
    run = scripted(model, model.caps, {"x": slow_twin(model, request, 512)}, 1.0)
    run.loop.submit(request)
    run.until_idle()
    assert run.outputs["x"][-1].usage is not None and run.outputs["x"][-1].usage.drafted_tokens == 0


def test_lines_too_close_to_call_are_left_to_plain_steps() -> None:
    """With a noise above every gap no draft is ever kept, and the text is still that of the plain loop."""
    model = HashModel(("rows", "window"))
    request = Request("x", np.array([5, 6, 7]), Sampling(0.0), 20)
    truth = slow_twin(model, request, 512)
    run = scripted(model, model.caps, {"x": truth}, 1.0)
    assert run.loop.speculation is not None
    run.loop.speculation.noise = 1e9
    run.loop.submit(request)
    run.until_idle()
    assert run.text("x") == truth
    assert run.loop.speculation.counters.ties > 0
    assert sum(run.loop.speculation.counters.accepted.values()) == 0


def following(model: Any, caps: Caps, reuse: Reuse) -> Following:
    draft: DraftModel[Any] = DraftModel(model, caps, Sampler(caps.vocab_size))
    return Following(draft, reuse, partial(new_layers, model, caps))


@pytest.mark.parametrize("same", [True, False], ids=["as good as the model", "useless"])
def test_a_draft_model_changes_nothing_but_the_number_of_steps(same: bool) -> None:
    model, caps = tiny("attention")
    small, small_caps = (model, caps) if same else tiny("window")
    rng = np.random.default_rng(5)
    asked = [
        Request(f"r{i}", rng.integers(0, TINY_VOCAB, n), Sampling(0.0 if i % 2 else 0.8, seed=i), 24)
        for i, n in enumerate((2, 70, 20, 45))
    ]
    clock = Clock()
    store = Store(Settings(Budget(2**30), 2**62))
    follow = following(small, small_caps, Reuse(store, small_caps, 16, "draft"))
    speculation = Speculation(caps, clock, lookup=False, following=follow, cost=Flat())
    reuse = Reuse(store, caps, 16, "target")
    config = Config(max_rows=3, prefill_chunk=16)
    run = Run(Loop(model, caps, config, partial(new_layers, model, caps), None, reuse, clock, speculation=speculation))
    for request in asked:
        run.loop.submit(request)
        run.turn()
        run.turn()
    run.until_idle()
    for request in asked:
        assert run.text(request.id) == slow_twin(model, request, caps.context_length)
    drafted, accepted = (sum(c.values()) for c in (speculation.counters.drafted, speculation.counters.accepted))
    assert drafted > 0
    assert accepted > drafted * 0.9 if same else accepted < drafted
    assert not follow.draft.keys and follow.draft.layers is None, "nobody is left behind"
