"""A prompt of which parts are left out: what is computed stands at its place, and nothing else learns of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.test_loop import Clock, Run, request_of, samplings
from tests.fakes import STOP, VOCAB, HashModel, slow_twin
from tests.vision.seeing import IMAGE, SeeingHashModel, ask, picture, rows_of
from treadle.cache.budget import Budget
from treadle.cache.node import MatchKind
from treadle.cache.store import Settings, Store
from treadle.config import Config
from treadle.engine.loop import Loop
from treadle.engine.memory import Ledger
from treadle.engine.reuse import Reuse
from treadle.engine.sampling import Sampler
from treadle.engine.skim import Skim, Terms
from treadle.engine.speculation import Speculation
from treadle.models.capabilities import new_layers
from treadle.sparse import select
from treadle.speculate.draft_model import DraftModel
from treadle.types import Finish, Footprint, Request, SparsePrefill
from treadle.vision.sight import Inlay, Sight

CONTEXT = 2048
Score = Callable[[Any, Any, int], Any]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"CHUNK": 4, "FIRST": 3, "LAST": 5, "ANCHOR_EVERY": 10**6, "SMOOTHING": 1}.items():
        monkeypatch.setattr(select, name, value)


def by_token(_model: Any, layers: Any, _token: int) -> Any:
    """A score that the test can foresee: it rises and falls along the prompt."""
    places = np.arange(layers.lengths[0] + 1)
    return (1 + np.cos(places / 7)).astype(np.float32) ** 4


def skimming_run(
    model: HashModel,
    terms: Terms = Terms(),
    score: Score = by_token,
    speculation: bool = False,
    small: HashModel | None = None,
    **settings: object,
) -> tuple[Run, Store]:
    clock = Clock()
    store = Store(Settings(Budget(10**9), 10**12), now=clock, active_memory=lambda: 0)
    config = Config(**{"prefill_chunk": 64, **settings})  # type: ignore[arg-type]
    small = small or HashModel(("rows",), context=CONTEXT)
    skim = Skim(
        DraftModel(small, small.caps, Sampler(VOCAB)),
        partial(new_layers, small, small.caps),
        Reuse(store, small.caps, config.checkpoint_every, "small"),
        terms,
        clock=clock,
        score=score,
    )
    reuse = Reuse(store, model.caps, config.checkpoint_every, "large")
    guessing = Speculation(model.caps, clock) if speculation else None
    layers = partial(new_layers, model, model.caps)
    loop = Loop(model, model.caps, config, layers, None, reuse, clock, speculation=guessing, skim=skim)
    return Run(loop), store


def model_of() -> HashModel:
    return HashModel(context=CONTEXT)


def prompt_of(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, n).tolist()


def asked(id: str, prompt: list[int], sparse: bool | None = True, **rest: Any) -> Request:
    return replace(request_of(id, prompt), sparse=sparse, **rest)


def twin(model: HashModel, request: Request, places: list[int]) -> list[int]:
    """The plain loop over the tokens at `places`: each run without a gap in a step that is told where it stands."""
    layers = new_layers(model, model.caps)
    sampler = Sampler(VOCAB)
    sampler.join(request.sampling, request.prompt, np.empty(0, np.int64))
    gaps = np.array(places) - np.arange(len(places))
    runs = [np.array(places)[gaps == gap] for gap in np.unique(gaps)]
    steps = [(int(run[0]), request.prompt[run].tolist()) for run in runs]
    made: list[int] = []
    while len(made) < (request.max_tokens or 0):
        for place, tokens in steps:
            layers.begin([len(tokens)], [place - layers.lengths[0]])
            logits = model(mx.array([tokens]), cache=layers.caches)[:, -1]
            layers.end()
        token = int(sampler.draw(logits, [len(request.prompt) + len(made)]).tokens.item())
        if token in request.stop_ids:
            break
        made.append(token)
        steps = [(len(request.prompt) + len(made) - 1, [token])]
    return made


def places_of(request: Request, keep: float, cached: int = 0) -> list[int]:
    """The tokens that the loop should compute, and those before them that it need not."""
    scores = (1 + np.cos(np.arange(len(request.prompt)) / 7)).astype(np.float32) ** 4
    kept = select.needed(request.prompt, request.boundaries, request.spans, (), keep)
    return [*range(cached), *select.select(scores, kept, cached, keep).places.tolist()]


def outcome(run: Run, id: str) -> SparsePrefill:
    found = run.outputs[id][-1].usage.sparse
    assert found is not None
    return found


def finished(run: Run, request: Request) -> list[int]:
    run.loop.submit(request)
    run.until_idle()
    return run.text(request.id)


@settings(max_examples=12)
@given(
    st.lists(st.tuples(st.integers(40, 300), st.sampled_from([0.2, 0.5, 0.8]), samplings), min_size=1, max_size=4),
    st.booleans(),
)
def test_kept_tokens_stand_at_their_places_alone_in_batches_and_with_drafts(
    asked_for: list[tuple[int, float, Any]], speculation: bool
) -> None:
    model = model_of()
    run, _ = skimming_run(model, speculation=speculation)
    requests = [
        replace(asked(f"r{i}", prompt_of(n, seed=i % 2), keep=keep), sampling=sampling)
        for i, (n, keep, sampling) in enumerate(asked_for)
    ]
    dense = request_of("dense", prompt_of(50, seed=9))
    for request in (*requests, dense):
        run.loop.submit(request)
    run.until_idle()
    for request in requests:
        assert request.keep is not None
        places = places_of(request, request.keep)
        assert run.text(request.id) == twin(model, request, places)
        usage = run.outputs[request.id][-1].usage
        assert usage.prompt_tokens == len(request.prompt)
        assert (usage.sparse.engaged, usage.sparse.kept) == (True, len(places))
    assert run.text("dense") == slow_twin(model, dense, CONTEXT)


def test_all_of_a_prompt_is_the_prompt() -> None:
    model = model_of()
    run, _ = skimming_run(model)
    request = asked("a", prompt_of(200), keep=1.0)
    assert finished(run, request) == slow_twin(model, request, CONTEXT)
    assert (outcome(run, "a").engaged, outcome(run, "a").kept) == (False, 200)


def test_what_is_cached_exactly_is_used_first() -> None:
    model = model_of()
    run, _ = skimming_run(model)
    head = prompt_of(80)
    finished(run, asked("dense", head, sparse=False))
    request = asked("sparse", head[:70] + prompt_of(150, seed=3), keep=0.3)
    text = finished(run, request)
    assert text == twin(model, request, places_of(request, 0.3, cached=70))
    found = outcome(run, "sparse")
    assert (found.tokens, run.outputs["sparse"][-1].usage.cached_tokens) == (150, 70)


def test_rows_behind_gaps_serve_the_same_selection_and_nobody_else() -> None:
    model = model_of()
    run, _ = skimming_run(model)
    prompt = prompt_of(200)
    first = asked("first", prompt, keep=0.4)
    again = replace(first, id="again")
    dense = asked("dense", prompt, sparse=False)
    other = asked("other", prompt, keep=0.7)
    text = finished(run, first)
    assert finished(run, again) == text
    kept = outcome(run, "again").kept
    assert run.outputs["again"][-1].usage.cached_tokens == kept - 1
    assert finished(run, dense) == slow_twin(model, dense, CONTEXT)
    assert run.outputs["dense"][-1].usage.cached_tokens <= 3  # those before the first gap are the same rows
    assert finished(run, other) == twin(model, other, places_of(other, 0.7, cached=199))


def test_a_longer_prefix_that_is_cached_exactly_goes_before_own_rows() -> None:
    model = model_of()
    run, _ = skimming_run(model)
    prompt = prompt_of(600)
    finished(run, asked("head", prompt[:150], sparse=False))
    finished(run, asked("sparse", prompt[:200], keep=0.3))
    finished(run, asked("more", prompt[:400], sparse=False))
    request = asked("last", prompt, keep=0.3)
    assert finished(run, request) == twin(model, request, places_of(request, 0.3, cached=400))
    assert run.outputs["last"][-1].usage.cached_tokens == 400


def test_the_small_model_reads_its_own_cached_prefix_once() -> None:
    model = model_of()
    run, store = skimming_run(model)
    prompt = prompt_of(200)
    finished(run, asked("first", prompt, keep=0.4))
    reused = store.reuse.reused
    finished(run, asked("second", [*prompt[:150], *prompt_of(60, seed=5)], keep=0.4))
    assert store.reuse.reused - reused >= 150


def test_a_small_model_with_recurrent_layers_goes_on_from_its_checkpoints() -> None:
    small = HashModel(("rows", "state"), context=CONTEXT)
    run, store = skimming_run(model_of(), small=small, checkpoint_every=50)
    prompt = prompt_of(200)
    finished(run, asked("first", prompt, keep=0.4))
    reused = store.reuse.reused
    finished(run, asked("second", [*prompt[:150], *prompt_of(60, seed=5)], keep=0.4))
    assert store.reuse.reused - reused >= 150


@pytest.mark.parametrize(
    ("terms", "request_", "reason"),
    [
        (Terms(threshold=100), asked("a", prompt_of(120), sparse=False), "wants all of the prompt"),
        (Terms(threshold=100), asked("a", prompt_of(100), sparse=None), "No more than 100 tokens are not cached (100)"),
        (Terms(threshold=100, automatic=False), asked("a", prompt_of(120), sparse=None), "only where a request asks"),
        (Terms(threshold=100, doubt="Too large."), asked("a", prompt_of(120), sparse=None), "Too large."),
        (Terms(threshold=100, fault="It cannot."), asked("a", prompt_of(120), sparse=True), "It cannot."),
        (Terms(threshold=100), asked("a", prompt_of(120), prompt_logprobs=True), "Every token"),
        (Terms(threshold=100, keep=0.95), asked("a", prompt_of(120), sparse=None), "would be kept in any case"),
    ],
)
def test_what_stands_against_it_is_told_and_the_prompt_is_read_whole(
    terms: Terms, request_: Request, reason: str
) -> None:
    model = model_of()
    run, _ = skimming_run(model, terms)
    assert finished(run, request_) == slow_twin(model, request_, CONTEXT)
    found = outcome(run, "a")
    assert not found.engaged and reason in found.reason
    assert found.kept == found.tokens == len(request_.prompt)


def test_the_small_model_is_not_asked_where_its_answer_would_change_nothing() -> None:
    def never(_model: Any, _layers: Any, _token: int) -> Any:
        raise AssertionError("it was asked")

    model = model_of()
    run, _ = skimming_run(model, score=never)
    prompt = prompt_of(200)
    finished(run, asked("whole", prompt, keep=1.0))
    request = asked("nearly cached", [*prompt, *prompt_of(4, seed=1)], keep=0.1)
    assert finished(run, request) == slow_twin(model, request, CONTEXT)
    for id in ("whole", "nearly cached"):
        assert outcome(run, id).reason == "All of it would be kept."
        assert not any(output.skimmed is not None for output in run.outputs[id])


def test_how_far_the_small_model_is_is_told_before_anything_is_computed() -> None:
    run, _ = skimming_run(model_of(), prefill_chunk=32)
    finished(run, asked("a", prompt_of(200), keep=0.5))
    outputs = run.outputs["a"]
    told = [output.skimmed for output in outputs if output.skimmed is not None]
    assert told == [32, 64, 96, 128, 160, 192]
    first = next(i for i, output in enumerate(outputs) if output.prefilled is not None)
    assert all(output.skimmed is None for output in outputs[first:])
    assert all(output.finish is None and not output.tokens for output in outputs[:first])


def test_a_prompt_that_ends_while_it_is_read_tells_so_and_what_that_took() -> None:
    run, _ = skimming_run(model_of(), prefill_chunk=32)
    run.loop.submit(asked("a", prompt_of(200), keep=0.5))
    run.turn()
    run.turn()
    run.loop.abort("a")
    run.until_idle()
    found = outcome(run, "a")
    assert (found.engaged, found.tokens, found.kept) == (False, 200, 200)
    assert "ended while" in found.reason and found.score_s > 0


def test_a_prompt_that_ends_half_computed_left_out_what_it_had_passed() -> None:
    run, _ = skimming_run(model_of(), prefill_chunk=32)
    request = asked("a", prompt_of(600), keep=0.5)
    places = places_of(request, 0.5)
    run.loop.submit(request)
    while not [s for s in run.loop.prefilling if s.computed >= 64]:
        run.turn()
    (sequence,) = run.loop.prefilling
    run.loop.abort("a")
    run.until_idle()
    computed = sequence.computed
    assert 0 < computed < len(places)
    found = outcome(run, "a")
    assert found.engaged and found.tokens - found.kept == places[computed] - computed


def test_rows_that_were_found_under_another_root_count_as_found() -> None:
    run, store = skimming_run(model_of())
    head = prompt_of(80)
    finished(run, asked("dense", head, sparse=False))
    before = dict(store.tree.kinds)
    finished(run, asked("sparse", head[:70] + prompt_of(150, seed=3), keep=0.3))
    grown = {kind: n - before[kind] for kind, n in store.tree.kinds.items() if n > before[kind]}
    assert grown == {MatchKind.BRANCH: 1, MatchKind.MISS: 1}  # the miss is the small model's own
    assert run.outputs["sparse"][-1].usage.cached_tokens == 70


def test_a_prompt_in_which_nothing_stands_out_is_read_whole_unless_asked() -> None:
    model = model_of()
    flat: Score = lambda _model, layers, _token: np.ones(layers.lengths[0] + 1, np.float32)  # noqa: E731
    run, _ = skimming_run(model, Terms(threshold=100), flat)
    finished(run, asked("a", prompt_of(200), sparse=None))
    assert "Nothing in the prompt stands out" in outcome(run, "a").reason
    finished(run, asked("b", prompt_of(200, seed=1), sparse=True))
    assert outcome(run, "b").engaged


def test_a_failing_small_model_costs_nobody_the_answer() -> None:
    def broken(_model: Any, _layers: Any, _token: int) -> Any:
        raise RuntimeError("lost")

    model = model_of()
    run, _ = skimming_run(model, score=broken)
    request = asked("a", prompt_of(200))
    assert finished(run, request) == slow_twin(model, request, CONTEXT)
    assert "lost" in outcome(run, "a").reason


@pytest.mark.parametrize("turns", range(1, 12, 2))
def test_an_abort_at_any_moment_leaves_nothing_behind(turns: int) -> None:
    model = model_of()
    run, store = skimming_run(model, prefill_chunk=32)
    run.loop.submit(asked("a", prompt_of(200), keep=0.5))
    for _ in range(turns):
        run.turn()
    run.loop.abort("a")
    run.until_idle()
    assert run.finish("a") in (Finish.ABORT, Finish.LENGTH, Finish.STOP)
    assert not any(node.pins for node in store.tree.nodes())
    store.tree.check()
    request = asked("b", prompt_of(200), keep=0.5)
    assert finished(run, request) == twin(model, request, places_of(request, 0.5))


def test_a_sequence_that_starts_again_keeps_its_selection() -> None:
    model = model_of()
    run, _ = skimming_run(model)
    request = asked("a", prompt_of(200), keep=0.5)
    run.loop.submit(request)
    while not run.outputs.get("a") or not any(o.tokens for o in run.outputs["a"]):
        run.turn()
    (sequence,) = run.loop.sequences()
    run.loop.land(run.loop.groups[0])
    run.loop.reuse.forget(sequence)
    run.loop.take_out(sequence)
    run.loop.requeue(sequence)
    run.until_idle()
    assert run.text("a") == twin(model, request, places_of(request, 0.5))
    assert STOP not in run.text("a")


def test_room_for_the_pictures_stays_promised() -> None:
    model = SeeingHashModel()
    model.caps = replace(model.caps, context_length=CONTEXT)
    run, _ = skimming_run(model)
    run.loop.sight = Sight(model, 10**6)
    run.loop.ledger = Ledger(Footprint(row_bytes=1, look_bytes=1000), 0, 10**9)
    words = [1 + word % 90 for word in prompt_of(150)]
    run.loop.submit(ask("a", [*words[:60], picture("cat", 2, 3), *words[60:]], sparse=True, keep=0.3))
    while not (held := [s for s in run.loop.prefilling if s.places is not None]):
        run.turn()
    assert held[0].picture == 6
    assert run.loop.ledger.promised > 6000


def test_pictures_stay_whole_at_their_places() -> None:
    model = SeeingHashModel()
    model.caps = replace(model.caps, context_length=CONTEXT)
    run, _ = skimming_run(model)
    run.loop.sight = Sight(model, 10**6)
    words = prompt_of(150)
    words = [1 + word % 90 for word in words]
    cat, dog = picture("cat", 2, 3), picture("dog", 1, 9)
    request = ask("a", [*words[:60], cat, *words[60:100], dog, *words[100:]], sparse=True, keep=0.3)
    text = finished(run, request)
    kept = places_of(request, 0.3)
    assert set(np.flatnonzero(request.prompt == IMAGE)) <= set(kept)
    assert outcome(run, "a").kept == len(kept) < len(request.prompt)
    layers, made = new_layers(model, model.caps), []
    ids, places = request.prompt[kept], mx.array([kept], mx.int32)
    rows = mx.array(np.concatenate([rows_of(span.picture) for span in request.spans]))
    given: dict[str, Any] = {"pictures": Inlay(mx.array(np.flatnonzero(ids == IMAGE).astype(np.int32)), (rows,))}
    for _ in range(len(text)):
        layers.begin([len(ids)], places=places)
        logits = model(mx.array(ids)[None], cache=layers.caches, **given)[:, -1]
        layers.end()
        made.append(int(mx.argmax(logits).item()))
        ids, places = made[-1:], mx.array([[len(request.prompt) + len(made) - 1]], mx.int32)
        given = {}
    assert text == made
    assert len(model.encoded) == 2


def test_the_small_models_rows_are_promised_while_it_reads_and_no_longer() -> None:
    model = model_of()
    run, _ = skimming_run(model, prefill_chunk=32)
    ledger, skim = Ledger(Footprint(row_bytes=1), 0, 10**6), run.loop.skim
    assert skim is not None
    run.loop.ledger = skim._ledger = ledger
    skim._small.caps = replace(skim._small.caps, footprint=Footprint(row_bytes=100))
    run.loop.submit(asked("a", prompt_of(200), keep=0.5))
    run.turn()
    assert ledger.promised >= 100 * 200
    run.until_idle()
    assert ledger.promised == 0 and outcome(run, "a").engaged
    skim._small.caps = replace(skim._small.caps, footprint=Footprint(row_bytes=10**5))
    request = asked("b", prompt_of(200, seed=1), keep=0.5)
    assert finished(run, request) == slow_twin(model, request, CONTEXT)
    assert "no memory" in outcome(run, "b").reason


def test_a_prompt_that_is_being_read_gives_way_when_memory_is_short() -> None:
    model = model_of()
    run, store = skimming_run(model, prefill_chunk=32)
    request = asked("a", prompt_of(200), keep=0.5)
    run.loop.submit(request)
    run.turn()
    assert run.loop.skim is not None
    run.loop.skim.give_way()
    run.until_idle()
    assert run.text("a") == slow_twin(model, request, CONTEXT)
    assert "Memory ran short" in outcome(run, "a").reason
    assert not any(node.pins for node in store.tree.nodes())


def test_what_the_small_model_read_drives_nothing_else_out_of_the_cache() -> None:
    model = model_of()
    run, store = skimming_run(model)
    head = prompt_of(150)
    finished(run, asked("dense", head, sparse=False))
    full = store.tree.totals.nbytes
    store.settings = replace(store.settings, budget=Budget(int(full * 1.1)))
    request = asked("sparse", [*head, *prompt_of(150, seed=3)], keep=0.3)
    assert finished(run, request) == twin(model, request, places_of(request, 0.3, cached=150))
    assert run.outputs["sparse"][-1].usage.cached_tokens == 150


def test_a_small_model_that_failed_is_not_asked_again() -> None:
    calls: list[int] = []

    def broken(_model: Any, _layers: Any, _token: int) -> Any:
        calls.append(1)
        raise RuntimeError("lost")

    run, _ = skimming_run(model_of(), score=broken)
    for name in ("a", "b"):
        finished(run, asked(name, prompt_of(200, seed=ord(name))))
        assert "lost" in outcome(run, name).reason
    assert len(calls) == 1
