"""Steps that are compiled as a whole give the text of steps that are built one by one, and are traced seldom."""

from __future__ import annotations

import logging
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.models.test_blocks import FAMILIES
from tests.tiny import CONFIGS, built
from treadle.cache.columns import SoloColumns
from treadle.cache.geometry import STEP, bucket
from treadle.cache.layers import Layers, Rows
from treadle.cache.traced import Frame
from treadle.engine import compiled
from treadle.engine.compiled import EARLY, TRACE_S, Forward, forward_of, worth
from treadle.models.blocks import Traces
from treadle.models.capabilities import forward, new_layers
from treadle.models.compile import compile_steps
from treadle.types import Batching, Caps, KvFormat

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6] * 3, [2, 7, 1] * 9, [5, 5, 8]]
LONG = 220
MODELS: dict[str, dict[str, Any]] = {**FAMILIES, "sinks": CONFIGS["sinks"], "window": CONFIGS["window"]}


@pytest.fixture(autouse=True)
def always_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind of steps is traced after EARLY of them, however long they take here."""
    monkeypatch.setattr(compiled, "worth", lambda *_: True)


def prefilled(model: Any, caps: Caps, prompt: list[int], kv: KvFormat | None = None) -> Layers:
    layers = new_layers(model, caps, kv)
    forward(model, [prompt], layers)
    mx.eval(layers.arrays())
    return layers


def stepped(own: Forward, layers: Layers, ids: list[list[int]]) -> list[list[int]]:
    """The best token behind each of `ids` [rows, n]; none of them stays."""
    layers.begin([len(line) for line in ids], in_place=True)
    found = mx.argmax(own(mx.array(ids), layers), axis=-1).tolist()
    layers.end()
    return found  # type: ignore[no-any-return]


def texts(own: Forward, caps: Caps, steps: int = LONG, rows: int = 1) -> list[list[int]]:
    layers = prefilled(own.model, caps, PROMPTS[0])
    for prompt in PROMPTS[1:rows]:
        layers.join(prefilled(own.model, caps, prompt))
    lines = [[7] for _ in range(rows)]
    for _ in range(steps):
        for line, (token,) in zip(lines, stepped(own, layers, [line[-1:] for line in lines]), strict=True):
            line.append(token)
    return lines


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("few", [False, True], ids=["as they are", "in few operations"])
def test_a_long_text_is_identical_and_nothing_is_traced_within_a_bucket(name: str, rows: int, few: bool) -> None:
    model, caps = built(MODELS[name])
    if caps.batching is not Batching.RAGGED and rows > 1:
        pytest.skip("one row only")
    if few and not compile_steps(model, "metal", "on"):
        pytest.skip("of another kind")
    wanted = texts(Forward(model), caps, rows=rows)
    own = Forward(model, True)
    assert texts(own, caps, rows=rows) == wanted
    assert own.compiled and sum(trace.run is not None for trace in own._traces.values()) == 1
    before = Traces.count
    assert texts(own, caps, rows=rows) == wanted, "other sequences of the same sizes are served by the same trace"
    assert Traces.count == before


def test_buffers_that_grow_and_longer_reaches_have_traces_of_their_own() -> None:
    model, caps = built(FAMILIES["qwen3"])
    own = Forward(model, True)
    layers = prefilled(model, caps, [1, 2, 3] * 70)
    made = []
    for token in range(400):
        stepped(own, layers, [[token % 50]])
        made.append(sum(trace.run is not None for trace in own._traces.values()))
    assert made[0] == 0 and made[EARLY] == 1 and made[-1] == 3  # ends of buffers: 256, 512, 768
    assert [made.index(n) for n in (1, 2, 3)] == [EARLY, 256 - 210 + EARLY, 512 - 210 + EARLY]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("few", [False, True], ids=["as they are", "in few operations"])
def test_layers_with_windows_have_smaller_buffers_than_those_without(few: bool, rows: int) -> None:
    model, caps = built(FAMILIES["llama with windows"])
    assert not few or compile_steps(model, "metal", "on")
    found = []
    for own in (Forward(model), Forward(model, True)):
        layers = prefilled(model, caps, PROMPTS[0])
        for prompt in PROMPTS[1:rows]:
            layers.join(prefilled(model, caps, prompt))
        found.append([stepped(own, layers, [[(7 * i + row) % 50] for row in range(rows)]) for i in range(1200)])
    assert len({r.keys.shape[2] for r in layers.rows}) == 2
    assert found[0] == found[1] and own.compiled


def test_rows_join_leave_are_checked_and_taken_back() -> None:
    found = []
    model, caps = built(FAMILIES["llama with windows"])
    for own in (Forward(model), Forward(model, True)):
        layers = prefilled(model, caps, PROMPTS[0])
        made = []
        for round in range(4 * EARLY):
            made.append(stepped(own, layers, [[5, 9, 2, 6]] * layers.num_rows))
            for row in range(layers.num_rows):
                layers.rewind(row, 2 + row)
            made.append(stepped(own, layers, [[8]] * layers.num_rows))
            if round == EARLY:
                layers.join(prefilled(model, caps, PROMPTS[1]))
            if round == 3 * EARLY:
                layers.drop(0)
        found.append(made)
    assert found[0] == found[1] and own.compiled
    assert sum(trace.run is not None for trace in own._traces.values()) >= 4


@pytest.mark.parametrize("name", ["delta", "moe", "mla"])
def test_other_models_are_compiled_or_left_as_they_are(name: str) -> None:
    model, caps = built(CONFIGS[name])
    own = Forward(model, True)
    assert texts(own, caps, 30) == texts(Forward(model), caps, 30)
    whole = not new_layers(model, caps).states and not new_layers(model, caps).foreign
    assert (not own._traces) is not whole


def test_packed_rows_gaps_and_places_are_met_as_before() -> None:
    model, caps = built(FAMILIES["qwen3"])
    own = Forward(model, True)
    packed = prefilled(model, caps, PROMPTS[0] * 8, KvFormat(8, 8, 32, 64))
    for _ in range(2 * EARLY):
        stepped(own, packed, [[4]])
    assert not own._traces
    lines = []
    for way in (Forward(model), own):
        layers = prefilled(model, caps, PROMPTS[0])
        made = []
        for i in range(2 * EARLY):
            layers.begin([1], [100])
            made.append(np.array(way(mx.array([[4 + i]]), layers)))
            layers.end()
        lines.append(made)
    layers.begin([1], places=mx.array([[200]], mx.int32))
    assert Frame.of(layers) is None
    assert len(own._traces) == 1
    for wanted, same in zip(*lines, strict=True):
        np.testing.assert_allclose(same, wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("steps", "ahead", "build_ms", "trace_ms", "expected"),
    [
        (5, 200, 1.5, 40, False),
        (6, 200, 1.5, 40, True),  # five times as many would take 45 ms
        (6, 10, 1.5, 40, False),  # no more than ten will follow here
        (17, 10, 1.5, 40, True),
        (26, 0, 1.5, 40, False),
        (27, 0, 1.5, 40, True),  # as much as a trace was lost already
    ],
)
def test_a_trace_has_to_be_worth_it(steps: int, ahead: float, build_ms: float, trace_ms: float, expected: bool) -> None:
    assert worth(steps, ahead, build_ms / 1e3, trace_ms / 1e3) is expected


def test_a_kind_of_steps_is_judged_by_the_quickest_build_and_by_what_is_left_of_its_buckets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, ticks, told = [0.0], [5.0], []

    def clock() -> float:
        now[0] += ticks[0]  # twice for each step that is built, or traced
        return now[0]

    def judged(*terms: float) -> bool:
        told.append(terms)
        return len(told) == 3

    monkeypatch.setattr(compiled.time, "perf_counter", clock)
    monkeypatch.setattr(compiled, "worth", judged)
    model, caps = built(FAMILIES["llama"])
    own = Forward(model, True)
    layers = prefilled(model, caps, [1] * 250)

    def step(width: int, n: int = 1) -> None:
        for _ in range(n):
            stepped(own, layers, [[1] * width])
            layers.rewind(0, width)
            ticks[0] = min(ticks[0], 1.0)  # the first one also builds what others have ready

    step(1, EARLY)
    assert not told
    step(1)
    step(2, EARLY + 1)
    assert told == [(EARLY, 5, 1.0, TRACE_S), (EARLY, 2, 1.0, TRACE_S)], "of 256 columns, 251 and 252 will be used"
    ticks[0] = 7.0  # also builds kernels
    step(2)
    assert told[2:] == [(EARLY + 1, 2, 1.0, TRACE_S)] and len(own._traces) == 1 and own._trace_s == TRACE_S
    ticks[0] = TRACE_S / 2
    with own.at_once():
        step(4)
    assert len(told) == 3 and len(own._traces) == 2 and own._trace_s == pytest.approx(TRACE_S / 2)


def test_traces_that_were_let_go_have_to_be_earned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "MOST_TRACES", 1)
    monkeypatch.setattr(compiled, "MOST_KINDS", 1)
    model, caps = built(FAMILIES["llama"])
    own, layers = Forward(model, True), prefilled(model, caps, PROMPTS[0])
    made = []
    for width in (1, 1, 1, 1, 2, 2, 2, 2, 1, 1, 1, 4, 1, 1, 1, 1):
        stepped(own, layers, [[1] * width])
        layers.rewind(0, width)
        made.append([key[0][1] for key in own._traces])
    assert made[2:5] == [[], [1], [1]] and made[6:8] == [[1], [2]]
    assert made[8:] == [[2]] * 7 + [[1]], "three steps were counted, then forgotten for another kind's"


def test_a_file_that_cannot_be_traced_is_left_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model, caps = built(FAMILIES["llama"])
    original = type(model.model)

    class Curious(original):  # type: ignore[misc, valid-type]
        def __call__(self, inputs: Any, *rest: Any, **more: Any) -> Any:
            assert inputs.sum().item() >= 0
            return super().__call__(inputs, *rest, **more)

    model.model.__class__ = Curious
    own = Forward(model, True)
    assert texts(own, caps, 20) == texts(Forward(model), caps, 20)
    assert not own.compiled and "could not be traced" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "treadle.engine"):
        assert not forward_of(model, caps, "metal", "on").compiled
    assert "its file does not allow it" in caplog.text


@pytest.mark.parametrize(
    ("backend", "mode", "times", "expected"),
    [
        ("metal", "on", (), True),
        ("cuda", "auto", (2.0, 1.0), True),
        ("cuda", "auto", (1.0, 2.0), False),
        ("cpu", "on", (), True),
        ("cpu", "auto", (), False),
        ("metal", "off", (), False),
    ],
)
def test_the_mode_says_whether_steps_are_compiled(
    backend: Any, mode: str, times: tuple[float, ...], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "by_turns", lambda use, measure: (measure() and times[0], times[1]))
    model, caps = built(FAMILIES["qwen3"])
    found = forward_of(model, caps, backend, mode)
    assert found.compiled is expected


def test_results_that_differ_are_found_out(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    model, caps = built(FAMILIES["qwen3"])
    original = Forward._run
    monkeypatch.setattr(Forward, "_run", lambda *all: 1.5 * original(*all))
    with caplog.at_level(logging.INFO, "treadle.engine"):
        assert not forward_of(model, caps, "metal", "on").compiled
    assert "results differ by" in caplog.text


def test_buckets_are_few_and_waste_little() -> None:
    sizes = [bucket(n) for n in range(1, 40000)]
    assert all(n <= size < max(n + STEP, 1.5 * n) for n, size in enumerate(sizes, 1))
    assert len(set(sizes)) < 25
    assert all(size % STEP == 0 for size in sizes)


@pytest.mark.parametrize("tokens", [5, STEP])
def test_what_is_read_from_a_buffer_shares_no_memory_with_it(tokens: int) -> None:
    """Kernels write rows in place; one head, or all columns, would make a slice a view."""
    rows = Rows(SoloColumns(None))
    rows.columns.begin([tokens])
    rows.update_and_fetch(*[mx.ones((1, 1, tokens, 8))] * 2)
    rows.columns.end()
    mx.eval(rows.arrays())
    kept = rows.read(0, 0, tokens)
    mx.eval(kept)
    np.array(rows.keys, copy=False)[:] = 7
    assert (np.array(kept[0]) == 1).all()
