"""A row with a grammar keeps to it in any company, and the rows beside it do not notice."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.test_loop import Clock, FaultyModel, NanModel, Planned, Run, request_of, requests
from tests.fakes import STOP, VOCAB, HashModel, slow_twin
from tests.grammar.letters import grammars, ids_of, text_of
from treadle.config import Config
from treadle.engine.loop import Loop
from treadle.engine.sampling import Sampler
from treadle.models.capabilities import mlx_cache, new_layers
from treadle.types import Constraint, Finish, Language, Output, Reasoning, Request

SHORT = '{"type": "object", "properties": {"a": {"enum": [1, "x"]}, "b": {"type": "boolean"}}, "required": ["a", "b"], \
"additionalProperties": false}'
REGEX = r"[a-d]{2,6}(-[0-9]+)?"
DEAD_END = 'start: "a" X\nX: /[a-c]/ & /[d-f]/'
constraints = st.sampled_from(
    [
        Constraint(Language.JSON_SCHEMA, SHORT),
        Constraint(Language.JSON_OBJECT),
        Constraint(Language.REGEX, REGEX),
        Constraint(Language.REGEX, REGEX, reasoning=Reasoning(tuple(ids_of("q")))),
        Constraint(Language.CHOICE, '["yes", "no", "yesterday"]'),
        Constraint(Language.LARK, 'start: "(" start ")" | /[xy]/'),
    ]
)


def run_of(model: HashModel, **settings: object) -> Run:
    config = Config(**settings)  # type: ignore[arg-type]
    layers = partial(new_layers, model, model.caps)
    return Run(Loop(model, model.caps, config, layers, clock=Clock(), grammars=grammars))


def constrained_twin(model: HashModel, request: Request, context: int) -> tuple[list[int], Finish]:
    """The plain loop with a mask before each draw. The specification."""
    assert request.constraint is not None
    cache = mlx_cache.make_prompt_cache(model)
    sampler = Sampler(VOCAB)
    sampler.join(request.sampling, request.prompt, np.empty(0, np.int64))
    matcher = grammars().matcher(request.constraint, request.stop_ids)
    room = min(context - len(request.prompt), request.max_tokens or context)
    made: list[int] = []
    ids = request.prompt.tolist()
    while True:
        logits = model(mx.array([ids]), cache=cache)[:, -1]
        token = int(sampler.draw(logits, [len(request.prompt) + len(made)], matcher.mask()[None]).tokens.item())
        if token in request.stop_ids:
            return made, Finish.STOP
        made.append(token)
        matcher.accept(token)
        if matcher.finished:
            return made, Finish.STOP
        if len(made) == room:
            return made, Finish.LENGTH
        ids = [token]


@st.composite
def plans(draw: st.DrawFn) -> list[Planned]:
    """Requests with a grammar and without."""
    plan = []
    for index in range(draw(st.integers(1, 6))):
        arrival, abort, request = draw(requests(index))
        if draw(st.booleans()):
            request = replace(request, constraint=draw(constraints), max_tokens=draw(st.integers(1, 30)))
        plan.append((arrival, abort, request))
    return plan


@pytest.mark.parametrize("kinds", [("rows", "rows"), ("window", "state", "rows")], ids="+".join)
@settings(max_examples=15)
@given(plan=plans(), rows=st.integers(1, 5), chunk=st.integers(1, 24))
def test_rows_with_and_without_a_grammar_get_their_own_texts_in_any_mix(
    kinds: tuple[str, ...], plan: list[Planned], rows: int, chunk: int
) -> None:
    model = HashModel(kinds, context=64)
    run = run_of(model, max_rows=rows, prefill_chunk=chunk)
    run.play(plan)
    for _, _, request in plan:
        check(run, model, request, 64)
    assert not list(run.loop.sequences()) and not run.loop.groups


def check(run: Run, model: HashModel, request: Request, context: int) -> None:
    made, finish = run.text(request.id), run.finish(request.id)
    if request.constraint is None:
        expected = slow_twin(model, request, context)
    else:
        expected, expected_finish = constrained_twin(model, request, context)
        assert finish in (expected_finish, Finish.ABORT)
    assert made == (expected[: len(made)] if finish is Finish.ABORT else expected)


@given(seed=st.integers(0, 2**40), temperature=st.sampled_from([0.0, 1.0, 2.0]))
def test_a_finished_reply_validates(seed: int, temperature: float) -> None:
    run = run_of(HashModel())
    constraint = Constraint(Language.JSON_SCHEMA, SHORT)
    sampling = {"temperature": temperature, "seed": seed, "logit_bias": ((STOP, 50.0),)}
    run.loop.submit(replace(request_of("x", [1, 2, 3], 400, **sampling), constraint=constraint))
    run.loop.submit(request_of("free", [4, 5], 20))
    run.until_idle()
    assert run.finish("x") is Finish.STOP
    value = json.loads(text_of(run.text("x")))
    assert value["a"] in (1, "x") and isinstance(value["b"], bool) and len(value) == 2
    assert run.text("free") == slow_twin(HashModel(), request_of("free", [4, 5], 20), 512)


def test_a_grammar_with_nothing_left_ends_the_reply_without_another_step() -> None:
    run = run_of(HashModel())
    request = replace(request_of("x", [1, 2]), constraint=Constraint(Language.REGEX, "abc"))
    run.loop.submit(request)
    run.until_idle()
    last: Output = run.outputs["x"][-1]
    assert text_of(run.text("x")) == "abc" and last.finish is Finish.STOP and last.stop_id is None
    assert last.usage is not None and last.usage.completion_tokens == 3


def test_a_drawn_end_is_counted_and_named() -> None:
    run = run_of(HashModel())
    biased = request_of("x", [1, 2], logit_bias=((STOP, 90.0),))
    run.loop.submit(replace(biased, constraint=Constraint(Language.REGEX, "abc[0-9]*")))
    run.until_idle()
    last = run.outputs["x"][-1]
    assert text_of(run.text("x")) == "abc" and last.stop_id == STOP
    assert last.usage is not None and last.usage.completion_tokens == 4


def test_a_reply_cut_by_its_limit_says_so_unless_it_is_just_complete() -> None:
    for most, finish in ((2, Finish.LENGTH), (3, Finish.STOP)):
        run = run_of(HashModel())
        run.loop.submit(replace(request_of("x", [1, 2], most), constraint=Constraint(Language.REGEX, "abc")))
        run.until_idle()
        assert run.finish("x") is finish and len(run.text("x")) == most


def test_logprobs_are_the_models_own_whatever_the_grammar_allows() -> None:
    run = run_of(HashModel())
    request = replace(request_of("x", [1, 2], logprobs=2), constraint=Constraint(Language.REGEX, "abc"))
    run.loop.submit(request)
    run.until_idle()
    logprobs = [entry for output in run.outputs["x"] for entry in output.logprobs]
    logits = np.array(HashModel()(mx.array([[1, 2]]), mlx_cache.make_prompt_cache(HashModel()))[0, -1])
    scores = logits - np.log(np.exp(logits).sum())
    assert [entry.token for entry in logprobs] == ids_of("abc")
    assert logprobs[0].logprob == pytest.approx(scores[ids_of("a")[0]], abs=1e-4)
    assert logprobs[0].top[0][0] == int(scores.argmax())


def test_a_fault_in_a_shared_step_does_not_lose_the_place_in_a_grammar() -> None:
    class LateFault(HashModel):
        """The seventh shared step fails."""

        shared = 0

        def __call__(self, ids: Any, cache: list[Any]) -> Any:
            if ids.shape[0] > 1:
                self.shared += 1
                if self.shared == 7:
                    raise RuntimeError("out of memory")
            return super().__call__(ids, cache)

    run = run_of(LateFault())
    constraint = Constraint(Language.JSON_SCHEMA, SHORT)
    asked = [request_of(f"r{i}", [i + 1, 2, 3], 40, temperature=1.0, seed=i) for i in range(3)]
    asked = [replace(request, constraint=constraint) if i else request for i, request in enumerate(asked)]
    for request in asked:
        run.loop.submit(request)
    run.until_idle()
    assert run.loop.model.shared >= 7
    for request in asked:
        check(run, HashModel(), request, 512)


def test_every_row_alone_after_a_fault_keeps_its_grammar() -> None:
    run = run_of(FaultyModel())
    asked = [replace(request_of(f"r{i}", [i + 1, 2]), constraint=Constraint(Language.REGEX, REGEX)) for i in range(3)]
    for request in asked:
        run.loop.submit(request)
    run.until_idle()
    for request in asked:
        assert run.text(request.id) == constrained_twin(HashModel(), request, 512)[0]


def test_a_grammar_that_cannot_go_on_ends_its_row_with_a_sentence_and_no_other() -> None:
    run = run_of(HashModel())
    good = replace(request_of("good", [1, 2]), constraint=Constraint(Language.REGEX, REGEX))
    free = request_of("free", [3, 4], 20)
    bad = replace(request_of("bad", [5, 6]), constraint=Constraint(Language.LARK, DEAD_END))
    for request in (good, bad, free):
        run.loop.submit(request)
    run.until_idle()
    last = run.outputs["bad"][-1]
    assert last.finish is Finish.ERROR and last.error is not None and "grammar" in last.error
    assert text_of(run.text("bad")) == "a"
    assert run.text("good") == constrained_twin(HashModel(), good, 512)[0]
    assert run.text("free") == slow_twin(HashModel(), free, 512)


def test_a_grammar_without_a_tokenizer_is_an_error_of_its_request() -> None:
    model = HashModel()
    run = Run(Loop(model, model.caps, Config(), partial(new_layers, model, model.caps), clock=Clock()))
    run.loop.submit(replace(request_of("x", [1, 2]), constraint=Constraint(Language.JSON_OBJECT)))
    run.until_idle()
    assert run.finish("x") is Finish.ERROR and "tokenizer" in (run.outputs["x"][-1].error or "")


def test_nan_is_an_error_under_a_grammar_too() -> None:
    run = run_of(NanModel())
    run.loop.submit(replace(request_of("x", [1, 96]), constraint=Constraint(Language.REGEX, REGEX)))
    run.until_idle()
    assert run.finish("x") is Finish.ERROR and "not numbers" in (run.outputs["x"][-1].error or "")


@settings(max_examples=10)
@given(seed=st.integers(0, 2**40))
def test_thinking_is_free_and_what_follows_the_marker_is_not(seed: int) -> None:
    run = run_of(HashModel())
    marker = tuple(ids_of("z"))
    constraint = Constraint(Language.REGEX, r"[0-9]{3}", reasoning=Reasoning(marker))
    sampling = {"temperature": 1.5, "seed": seed, "logit_bias": ((STOP, -100.0),)}
    sampling["logit_bias"] += ((marker[0], 1.0),)
    plain = request_of("x", [1, 2], 80, **sampling)
    run.loop.submit(replace(plain, constraint=constraint))
    run.until_idle()
    made = run.text("x")
    free = slow_twin(HashModel(), plain, 512)
    end = free.index(marker[0]) + 1 if marker[0] in free else len(free)
    assert made[:end] == free[:end]
    assert run.finish("x") is Finish.LENGTH or re.fullmatch(r"[0-9]{3}", text_of(made[end:]))
