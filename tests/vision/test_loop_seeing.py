"""Pictures in the one loop: a text is what the plain loop makes of it, whatever is cached, batched or drafted."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.scripted import ScriptedSpeculation
from tests.engine.test_loop import Clock, Run
from tests.fakes import VOCAB
from tests.vision.seeing import SeeingHashModel, ask, picture, slow_seeing
from treadle.cache import geometry
from treadle.cache.budget import Budget
from treadle.cache.store import Settings, Store
from treadle.config import Config
from treadle.engine.loop import Loop
from treadle.engine.reuse import Reuse
from treadle.models.capabilities import new_layers
from treadle.types import Finish, Request
from treadle.vision.sight import Sight

KINDS = [("rows", "rows"), ("rows", "window"), ("rows", "state")]
CAT, DOG, LAKE = picture("cat", 2, 3), picture("dog", 1, 9), picture("lake", 4, 4)
WORDS = st.integers(1, VOCAB - 3)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "STEP", 8)
    monkeypatch.setattr(geometry, "SLACK", 6)


def run_of(
    model: SeeingHashModel, truths: dict[str, list[int]] | None = None, encoded_bytes: int = 10**6, **config: Any
) -> Run:
    clock = Clock()
    store = Store(Settings(Budget(10**9), 10**12), now=clock, active_memory=lambda: 0)
    speculation = None
    if truths is not None:
        speculation = ScriptedSpeculation(model.caps, clock)
        speculation.truths = truths
    return Run(
        Loop(
            model,
            model.caps,
            Config(**{"checkpoint_every": 16, **config}),
            partial(new_layers, model, model.caps),
            None,
            Reuse(store, model.caps, 16),
            clock,
            speculation=speculation,
            sight=Sight(model, encoded_bytes),
        )
    )


def answer(run: Run, request: Request) -> tuple[list[int], int]:
    """(text, cached tokens)."""
    run.loop.submit(request)
    run.until_idle()
    usage = run.outputs[request.id][-1].usage
    assert usage is not None and run.finish(request.id) is not Finish.ERROR
    return run.text(request.id), usage.cached_tokens


@st.composite
def prompts(draw: st.DrawFn) -> list[Any]:
    """Words and pictures in any order; a word comes first and last."""
    parts: list[Any] = [draw(WORDS)]
    for _ in range(draw(st.integers(0, 4))):
        parts += [draw(st.sampled_from([CAT, DOG, LAKE])), *draw(st.lists(WORDS, min_size=1, max_size=4))]
    return [*parts, *draw(st.lists(WORDS, min_size=1, max_size=6))]


@pytest.mark.parametrize("mrope", [False, True], ids=["plain", "mrope"])
@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
@settings(max_examples=12)
@given(data=st.data())
def test_any_mixture_of_requests_gives_the_text_of_the_plain_loop(
    kinds: tuple[str, ...], mrope: bool, data: st.DataObject
) -> None:
    whole, pauses = data.draw(st.booleans()), data.draw(st.booleans())
    model = SeeingHashModel(kinds, mrope=mrope, whole=whole)
    if mrope:
        pauses = False  # its positions are those of a grid without gaps
    plan = [
        (data.draw(st.integers(0, 20)), ask(f"r{i}", data.draw(prompts()), whole=whole, pauses=pauses))
        for i in range(data.draw(st.integers(1, 5)))
    ]
    truths = {request.id: slow_seeing(model, request) for _, request in plan}
    run = run_of(
        model,
        truths if data.draw(st.booleans()) else None,
        data.draw(st.sampled_from([0, 10**6])),
        max_rows=data.draw(st.integers(1, 4)),
        prefill_chunk=data.draw(st.integers(3, 40)),
    )
    for turn in range(22):
        for arrival, request in plan:
            if arrival == turn:
                run.loop.submit(request)
        run.turn()
    run.until_idle()
    for _, request in plan:
        assert run.finish(request.id) is not Finish.ERROR
        assert run.text(request.id) == truths[request.id]


@pytest.mark.parametrize("mrope", [False, True], ids=["plain", "mrope"])
def test_another_picture_in_the_same_place_gives_another_text(mrope: bool) -> None:
    model = SeeingHashModel(mrope=mrope)
    run = run_of(model)
    first, _ = answer(run, ask("a", [1, picture("a", 2, 3), 2, 3]))
    second, cached = answer(run, ask("b", [1, picture("b", 2, 3), 2, 3]))
    assert first != second
    assert cached == 1


def test_the_same_picture_is_found_in_the_cache_and_not_encoded_again() -> None:
    model = SeeingHashModel(mrope=True)
    run = run_of(model)
    cold, _ = answer(run, ask("a", [1, CAT, 2, DOG, 3, 4]))
    assert model.encoded == [CAT, DOG]
    copy = replace(CAT, inputs={})  # decoded once more
    warm, cached = answer(run, ask("b", [1, copy, 2, DOG, 3, 4]))
    assert warm == cold
    assert cached == 1 + 6 + 1 + 9 + 1
    assert len(model.encoded) == 2


def test_a_turn_of_text_behind_a_picture_computes_nothing_again() -> None:
    model = SeeingHashModel(mrope=True)
    run = run_of(model)
    reply, _ = answer(run, ask("a", [1, CAT, 2, 3]))
    request = ask("b", [1, CAT, 2, 3, *reply, 5, 6])
    text, cached = answer(run, request)
    assert text == slow_seeing(model, request)
    assert cached == 9 + len(reply) - 1
    assert model.encoded == [CAT]


def test_a_known_picture_in_another_prompt_is_not_encoded_again() -> None:
    model = SeeingHashModel()
    run = run_of(model)
    answer(run, ask("a", [1, CAT, 2]))
    text, cached = answer(run, ask("b", [3, CAT, 2]))
    assert cached == 0
    assert model.encoded == [CAT]
    assert text == slow_seeing(model, ask("b", [3, CAT, 2]))


def test_a_changed_picture_misses_from_its_place_on() -> None:
    run = run_of(SeeingHashModel())
    answer(run, ask("a", [1, CAT, 2, DOG, 3, 4]))
    _, cached = answer(run, ask("b", [1, CAT, 2, picture("fox", 1, 9), 3, 4]))
    assert cached == 1 + 6 + 1


def test_only_pictures_of_a_sequence_take_the_time_of_the_encoder() -> None:
    run = run_of(SeeingHashModel())
    answer(run, ask("text", [1, 2, 3]))
    answer(run, ask("seen", [1, CAT, 2]))
    times = [run.outputs[id][-1].usage.vision_s for id in ("text", "seen")]  # type: ignore[union-attr]
    assert times[0] == 0 < times[1]


def test_a_failing_encoder_ends_its_own_request_only() -> None:
    class Blind(SeeingHashModel):
        def encode(self, picture: Any) -> Any:
            raise RuntimeError("no light")

    model = Blind()
    run = run_of(model)
    run.loop.submit(ask("dark", [1, CAT, 2]))
    run.loop.submit(ask("text", [1, 2, 3]))
    run.until_idle()
    assert run.finish("dark") is Finish.ERROR
    assert "no light" in (run.outputs["dark"][-1].error or "")
    assert run.text("text") == slow_seeing(model, ask("text", [1, 2, 3]))


def test_a_restart_after_a_fault_sees_the_pictures_again() -> None:
    class Stumbling(SeeingHashModel):
        steps = 0

        def __call__(self, ids: Any, *args: Any, **more: Any) -> Any:
            self.steps += ids.shape[0] > 1
            if self.steps == 3 and ids.shape[0] > 1:
                raise RuntimeError("stumbled")
            return super().__call__(ids, *args, **more)

    model = Stumbling(mrope=True)
    plan = [ask("a", [1, CAT, 2]), ask("b", [4, DOG, 5, 6])]
    run = run_of(model)
    for request in plan:
        run.loop.submit(request)
    run.until_idle()
    assert model.steps >= 3
    for request in plan:
        assert run.text(request.id) == slow_seeing(SeeingHashModel(mrope=True), request)


def test_prompt_scores_of_a_prompt_with_a_picture_are_those_of_one_step() -> None:
    model = SeeingHashModel(mrope=True)
    request = ask("a", [1, CAT, 2, 3])
    request = replace(request, prompt_logprobs=True, sampling=replace(request.sampling, logprobs=0))
    found = []
    for chunk in (2, 64):
        run = run_of(model, prefill_chunk=chunk)
        answer(run, request)
        found.append([t.logprob for o in run.outputs["a"] for t in o.prompt_logprobs])
    assert len(found[0]) == len(request.prompt) - 1
    np.testing.assert_allclose(found[0], found[1])
