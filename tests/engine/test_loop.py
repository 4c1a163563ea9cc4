"""Whatever happens around a request, its text is what the plain loop makes of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import STOP, VOCAB, HashModel, slow_twin
from treadle.config import Config
from treadle.engine.loop import Loop
from treadle.models.capabilities import new_layers
from treadle.types import Batching, Finish, Output, Request, Sampling

Planned = tuple[int, int | None, Request]  # the turn of its arrival, how much later it is aborted, if it is


class Clock:
    """Time moves a little at each look, so that the pacer's decisions are the same in every run."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


@dataclass
class Run:
    """A loop over a hash model, what came out per request, and the turn of the loop."""

    loop: Loop
    outputs: dict[str, list[Output]] = field(default_factory=dict)

    def turn(self) -> None:
        for output in self.loop.step():
            self.outputs.setdefault(output.id, []).append(output)

    def until_idle(self) -> None:
        for _ in range(5000):
            if not self.loop.busy:
                return
            self.turn()
        raise AssertionError("the loop never came to rest")

    def play(self, plan: list[Planned]) -> None:
        """Submit and abort in the turns that were planned, then go on until all is done."""
        for turn in range(60):
            for arrival, abort, request in plan:
                if arrival == turn:
                    self.loop.submit(request)
                if abort is not None and arrival + abort == turn:
                    self.loop.abort(request.id)
            self.turn()
        self.until_idle()

    def text(self, id: str) -> list[int]:
        return [t for output in self.outputs[id] for t in output.tokens]

    def finish(self, id: str) -> Finish | None:
        finishes = [o.finish for o in self.outputs[id] if o.finish is not None]
        assert len(finishes) == 1 and self.outputs[id][-1].finish is not None
        return finishes[0]


def run_of(model: HashModel, **settings: object) -> Run:
    config = Config(**settings)  # type: ignore[arg-type]
    layers = partial(new_layers, model, model.caps)
    return Run(Loop(model, model.caps, config, layers, clock=Clock()))


def request_of(id: str, prompt: list[int], max_tokens: int | None = 12, **sampling: object) -> Request:
    sampling.setdefault("temperature", 0.0)
    return Request(
        id,
        np.array(prompt, np.int64),
        Sampling(**sampling),  # type: ignore[arg-type]
        max_tokens,
        frozenset({STOP}),
    )


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.9]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    top_k=st.sampled_from([0, 1, 5, 80]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.7]),
    logit_bias=st.sampled_from([(), ((3, 4.0), (STOP, -100.0))]),
    seed=st.integers(0, 2**40),
    logprobs=st.sampled_from([None, None, 0, 3]),
)


@st.composite
def requests(draw: st.DrawFn, index: int) -> Planned:
    prompt = draw(st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=40))
    request = Request(
        f"r{index}", np.array(prompt, np.int64), draw(samplings), draw(st.integers(1, 14)), frozenset({STOP})
    )
    return draw(st.integers(0, 25)), draw(st.sampled_from([None, None, None, 3, 17])), request


KINDS = [("rows", "rows"), ("window", "rows"), ("state", "rows"), ("window", "state", "rows")]


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
@settings(max_examples=15)
@given(data=st.data())
def test_any_mix_of_joins_leaves_aborts_and_chunks_gives_the_text_of_the_plain_loop(
    kinds: tuple[str, ...], data: st.DataObject
) -> None:
    model = HashModel(kinds, context=48)
    plan = [data.draw(requests(i)) for i in range(data.draw(st.integers(1, 6)))]
    run = run_of(
        model,
        max_rows=data.draw(st.integers(1, 5)),
        prefill_chunk=data.draw(st.integers(1, 24)),
        on_busy=data.draw(st.sampled_from(["batch", "batch", "queue"])),
    )
    run.play(plan)
    for _, _, request in plan:
        expected = slow_twin(model, request, 48)
        made = run.text(request.id)
        if run.finish(request.id) is Finish.ABORT:
            assert made == expected[: len(made)]
        else:
            assert made == expected
    assert not list(run.loop.sequences()) and not run.loop.groups


def test_a_seeded_row_gives_the_same_text_alone_and_beside_a_hot_row() -> None:
    model = HashModel()
    seeded = request_of("seeded", [5, 6, 7], temperature=1.0, seed=42)
    greedy = request_of("greedy", [9, 9, 8])
    alone = run_of(model)
    alone.loop.submit(seeded)
    alone.until_idle()
    crowd = run_of(model)
    for request in (seeded, greedy, request_of("hot", [1, 2], temperature=1.9, seed=3)):
        crowd.loop.submit(request)
    crowd.until_idle()
    assert crowd.text("seeded") == alone.text("seeded")
    assert crowd.text("greedy") == slow_twin(model, greedy, 512)


def test_the_first_token_can_be_the_end() -> None:
    model = HashModel()
    prompt = next(
        [a, b] for a in range(1, 97) for b in range(1, 97) if not slow_twin(model, request_of("x", [a, b]), 9)
    )
    run = run_of(model)
    run.loop.submit(request_of("x", prompt))
    run.until_idle()
    assert run.text("x") == [] and run.finish("x") is Finish.STOP
    assert run.outputs["x"][-1].stop_id == STOP and run.outputs["x"][-1].usage.completion_tokens == 1


def test_without_max_tokens_a_sequence_runs_to_the_end_of_the_context() -> None:
    model = HashModel(context=40)
    run = run_of(model)
    request = replace(request_of("x", [4] * 10, None, logit_bias=((STOP, -100.0),)))
    run.loop.submit(request)
    run.until_idle()
    assert len(run.text("x")) == 30 and run.finish("x") is Finish.LENGTH


def test_zero_tokens_asked_for_is_an_end_at_once() -> None:
    run = run_of(HashModel())
    run.loop.submit(request_of("x", [4], 0))
    run.until_idle()
    assert run.text("x") == [] and run.finish("x") is Finish.LENGTH


def test_preempt_mode_ends_the_running_request() -> None:
    run = run_of(HashModel(), on_busy="preempt")
    run.loop.submit(request_of("old", [4, 5, 6], 100, logit_bias=((STOP, -100.0),)))
    for _ in range(5):
        run.turn()
    run.loop.submit(request_of("new", [7, 8]))
    run.until_idle()
    assert run.finish("old") is Finish.ABORT and len(run.text("old")) < 100
    assert run.finish("new") in (Finish.LENGTH, Finish.STOP)


class NanModel(HashModel):
    """Makes NaN for rows that just read token 96."""

    def __call__(self, ids: object, cache: list[object]) -> object:
        import mlx.core as mx

        logits = super().__call__(ids, cache)
        return mx.where((ids == 96)[..., None], mx.nan, logits)


def test_a_row_of_nans_ends_with_an_error_and_leaves_the_others_alone() -> None:
    model = NanModel()
    run = run_of(model)
    good = request_of("good", [1, 2, 3], logit_bias=((96, -100.0),))
    run.loop.submit(good)
    run.loop.submit(request_of("bad", [1, 96]))
    run.until_idle()
    assert run.finish("bad") is Finish.ERROR and "not numbers" in run.outputs["bad"][-1].error
    assert run.text("good") == slow_twin(HashModel(), good, 512)


class FaultyModel(HashModel):
    """Raises whenever more than `most` rows step together, or when a row reads token 95."""

    most = 1

    def __call__(self, ids: object, cache: list[object]) -> object:
        if ids.shape[0] > self.most:
            raise RuntimeError("out of memory")
        return super().__call__(ids, cache)


def test_a_fault_in_a_shared_step_is_computed_again_alone() -> None:
    model = FaultyModel()
    run = run_of(model)
    asked = [request_of(f"r{i}", [i + 1, 2, 3], temperature=1.0, seed=i) for i in range(3)]
    for request in asked:
        run.loop.submit(request)
    run.until_idle()
    for request in asked:
        assert run.text(request.id) == slow_twin(HashModel(), request, 512)


def test_a_fault_of_one_sequence_alone_ends_it_with_a_sentence() -> None:
    model = FaultyModel()
    model.most = 0
    run = run_of(model)
    run.loop.submit(request_of("x", [1, 2]))
    run.until_idle()
    assert run.finish("x") is Finish.ERROR and "out of memory" in run.outputs["x"][-1].error
    model.most = 9
    run.loop.submit(request_of("y", [1, 2]))
    run.until_idle()
    assert run.finish("y") in (Finish.STOP, Finish.LENGTH)


def test_a_family_that_cannot_batch_steps_each_sequence_by_itself() -> None:
    model = FaultyModel()
    model.caps = replace(model.caps, batching=Batching.NEVER)
    run = run_of(model)
    asked = [request_of(f"r{i}", [i + 1, 2, 3]) for i in range(3)]
    for request in asked:
        run.loop.submit(request)
    run.until_idle()
    for request in asked:
        assert run.text(request.id) == slow_twin(HashModel(), request, 512)
