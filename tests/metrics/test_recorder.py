"""Everything is learned from requests, outputs and a look a second, counted once, and never counted back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.metrics.counters import Histogram
from treadle.metrics.gauges import Gauges, MemoryGauge, SequenceGauge
from treadle.metrics.recorder import FINISHED, Recorder
from treadle.metrics.snapshot import FinishedRequest
from treadle.types import Finish, Output, Request, SparsePrefill, Usage


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Bench:
    """A recorder whose time is a number."""

    clock: Clock = field(default_factory=Clock)
    recorder: Recorder = field(init=False)

    def __post_init__(self) -> None:
        self.recorder = Recorder(self.clock, lambda: 1e9 + self.clock.now)

    def submit(self, id: str, prompt: int, model: str = "m") -> None:
        self.recorder.submitted(Request(id, np.zeros(prompt, np.int64)), model)

    def out(self, at: float, *outputs: Output) -> None:
        self.clock.now = 100.0 + at
        self.recorder.turn(outputs, 0.01)

    def second(self) -> dict[str, float | None]:
        """End the second; its point."""
        self.recorder.tick(0, 0)
        return self.recorder._history.newest

    def look(self, *sequences: SequenceGauge) -> None:
        self.recorder.measured(Gauges(sequences=sequences))


def test_a_request_from_queue_to_end() -> None:
    bench = Bench()
    bench.submit("r", 100)
    [live] = bench.recorder.live()
    assert (live.state, live.prompt_tokens, live.tokens_per_s) == ("waiting", 100, None)
    bench.out(0.5, Output("r", prefilled=60))
    bench.look(SequenceGauge("r", "prefill", 60, 40))
    [live] = bench.recorder.live()
    assert (live.state, live.prompt_computed, live.cached_tokens, live.age_s) == ("prefill", 60, 40, 0.5)
    bench.out(1.0, Output("r", (1,)))
    bench.out(1.2, Output("r", (2,)))
    bench.out(1.6, Output("r", (3, 4)))
    [live] = bench.recorder.live()
    assert (live.state, live.generated_tokens, live.tokens_per_s) == ("decode", 4, 5.0)
    bench.out(2.0, Output("r", finish=Finish.STOP, stop_id=9, usage=Usage(100, 5, 40, 0.1, 0.9, 1.0)))
    assert bench.recorder.live() == []
    assert bench.recorder.finished() == [
        FinishedRequest(
            id="r",
            model="m",
            finish="stop",
            ended=1e9 + 102.0,
            prompt_tokens=100,
            cached_tokens=40,
            computed_tokens=60,
            generated_tokens=5,
            queue_s=0.1,
            ttft_s=1.0,
            duration_s=2.0,
            prefill_tokens_per_s=66.67,
            decode_tokens_per_s=5.0,
        )
    ]
    latency = bench.recorder.latency()
    assert (latency.ttft_s.p50, latency.inter_token_s.p50, latency.queue_s.p99) == (1.0, 0.2, 0.1)


def test_the_seconds_add_up_to_the_request() -> None:
    bench = Bench()
    bench.submit("r", 100)
    bench.out(0.9, Output("r", prefilled=60))
    bench.look(SequenceGauge("r", "prefill", 60, 40))
    bench.clock.now = 101.0
    first = bench.second()
    bench.out(1.5, Output("r", (1,)))
    bench.out(2.0, Output("r", (2, 3), finish=Finish.LENGTH, usage=Usage(100, 3, 40)))
    second = bench.second()
    assert (first["prefill_tokens_per_s"], first["cached_share"], first["ttft_s"]) == (20.0, 0.666667, None)
    assert (second["prefill_tokens_per_s"], second["decode_tokens_per_s"]) == (40.0, 3.0)
    assert (second["ttft_s"], second["inter_token_p50_s"], second["batch"]) == (1.5, 0.25, 1.0)


def test_a_prompt_that_is_cut_off_counts_what_was_computed() -> None:
    bench = Bench()
    bench.submit("r", 1000)
    bench.out(0.5, Output("r", prefilled=300))
    bench.out(0.6, Output("r", finish=Finish.ABORT, usage=Usage(1000, 0, 100)))
    counters = bench.recorder.counters().of("m")
    assert (counters.cached_tokens, counters.computed_tokens, counters.finished["abort"]) == (100, 200, 1)
    [record] = bench.recorder.finished()
    assert (record.ttft_s, record.decode_tokens_per_s, record.computed_tokens) == (None, None, 200)


def test_a_request_that_ends_in_the_queue_counts_no_tokens() -> None:
    bench = Bench()
    bench.submit("r", 1000)
    bench.out(0.6, Output("r", finish=Finish.ABORT, usage=Usage(1000, 0)))
    counters = bench.recorder.counters().of("m")
    assert (counters.cached_tokens, counters.computed_tokens, counters.generated_tokens) == (0, 0, 0)


def test_a_reply_that_ends_with_its_first_token_has_a_time_to_it() -> None:
    bench = Bench()
    bench.submit("r", 10)
    bench.out(0.25, Output("r", finish=Finish.STOP, stop_id=0, usage=Usage(10, 1)))
    [record] = bench.recorder.finished()
    assert (record.ttft_s, record.computed_tokens, record.generated_tokens) == (0.25, 10, 1)


def test_a_fault_of_the_engine_ends_everything_with_an_error() -> None:
    bench = Bench()
    bench.submit("a", 10, "one")
    bench.submit("b", 10, "two")
    bench.recorder.fault()
    counters = bench.recorder.counters()
    assert counters.faults == 1 and bench.recorder.live() == []
    assert [counters.of(model).finished["error"] for model in ("one", "two")] == [1, 1]


def test_speculation_is_counted_from_the_usage() -> None:
    bench = Bench()
    bench.submit("r", 10)
    usage = Usage(10, 6, drafted_tokens=8, accepted_tokens=4)
    bench.out(0.5, Output("r", (1, 2, 3, 4, 5, 6), finish=Finish.LENGTH, usage=usage))
    assert bench.second()["acceptance"] == 0.5
    counters = bench.recorder.counters().of("m")
    assert (counters.drafted_tokens, counters.accepted_tokens) == (8, 4)


def test_outputs_of_strangers_change_nothing() -> None:
    bench = Bench()
    bench.out(0.5, Output("who", (1, 2)), Output("who", finish=Finish.STOP))
    assert bench.recorder.counters().models == {}
    assert bench.recorder.finished() == []


def test_a_look_is_due_once_a_second_and_keeps_the_highest_memory() -> None:
    bench = Bench()
    assert bench.recorder.due
    for at, active, peak in ((0.0, 10, 50), (1.0, 70, 60), (2.0, 20, 20)):
        bench.clock.now = 100.0 + at
        assert bench.recorder.due
        bench.recorder.measured(Gauges(memory=MemoryGauge(100, active, peak, 0)))
        assert not bench.recorder.due
    assert bench.recorder.peak_bytes == 70


def test_a_sequence_that_is_computed_again_is_not_counted_again() -> None:
    """After a fault in a shared step a sequence starts from nothing; its tokens are pending again."""
    bench = Bench()
    bench.submit("r", 100)
    for computed in (80, 0, 50):
        bench.look(SequenceGauge("r", "prefill", computed, 20))
    bench.out(1.0, Output("r", (1,), finish=Finish.LENGTH, usage=Usage(100, 1, 20)))
    counters = bench.recorder.counters().of("m")
    assert (counters.cached_tokens, counters.computed_tokens) == (20, 80)


def test_a_prompt_that_a_small_model_reads_first() -> None:
    bench = Bench()
    bench.submit("r", 100)
    bench.out(0.5, Output("r", skimmed=60))
    bench.look(SequenceGauge("r", "prefill", 0, 0))
    [live] = bench.recorder.live()
    assert (live.state, live.prompt_skimmed, live.prompt_computed) == ("skim", 60, 0)
    bench.out(0.6, Output("r", prefilled=0))
    [live] = bench.recorder.live()
    assert (live.state, live.prompt_skimmed) == ("prefill", 60)


@pytest.mark.parametrize(
    ("told", "sparse", "computed", "skipped"),
    [
        (Output("r", skimmed=60), SparsePrefill(False, "", 100, 100, 0.5), 0, 0),
        (Output("r", prefilled=80), SparsePrefill(True, "", 100, 70, 0.5), 50, 30),  # 30 of the first 80 were left out
        (Output("r", (1,)), SparsePrefill(True, "", 100, 40, 0.5), 40, 60),
    ],
)
def test_what_was_computed_of_an_aborted_prompt_is_counted(
    told: Output, sparse: SparsePrefill, computed: int, skipped: int
) -> None:
    bench = Bench()
    bench.submit("r", 100)
    bench.out(0.5, told)
    bench.out(1.0, Output("r", finish=Finish.ABORT, usage=Usage(100, len(told.tokens), 0, sparse=sparse)))
    counters = bench.recorder.counters().of("m")
    assert (counters.computed_tokens, counters.skipped_tokens, counters.skim_s) == (computed, skipped, 0.5)
    assert counters.sparse_prompts[sparse.engaged] == 1


def test_the_listener_hears_of_every_end_once() -> None:
    bench, heard = Bench(), list[str]()
    bench.recorder.listener = lambda record: heard.append(record.id)
    for i in range(FINISHED + 10):
        bench.submit(f"r{i}", 5)
        bench.out(0.1 * i, Output(f"r{i}", (1,)))
        bench.out(0.1 * i, Output(f"r{i}", finish=Finish.STOP, usage=Usage(5, 1)))
    assert heard == [f"r{i}" for i in range(FINISHED + 10)]
    assert [record.id for record in bench.recorder.finished()] == heard[10:]
    assert len(bench.recorder.finished(since=1e9 + 100.0 + 0.1 * (FINISHED + 7) + 0.01)) == 2


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number inside counters, with where it stands."""
    if isinstance(value, Histogram):
        yield path + ".total", value.total
        yield from ((f"{path}[{i}]", n) for i, n in enumerate(value.counts))
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers(inner, f"{path}[{key}]")
    elif isinstance(value, int | float):
        yield path, value
    else:
        for name in value.__dataclass_fields__:
            yield from numbers(getattr(value, name), f"{path}.{name}")


@dataclass
class Story:
    """One request: its prompt, how much of it is cached, how it is computed and decoded, and how it ends."""

    prompt: int
    cached: int
    chunks: list[int]
    steps: list[int]
    finish: Finish


@st.composite
def stories(draw: st.DrawFn) -> Story:
    prompt = draw(st.integers(1, 50))
    cached = draw(st.integers(0, prompt - 1))
    return Story(
        prompt,
        cached,
        sorted(draw(st.sets(st.integers(cached, prompt - 1), max_size=3))),
        draw(st.lists(st.integers(1, 4), max_size=4)),
        draw(st.sampled_from(list(Finish))),
    )


def told(id: str, story: Story) -> Iterator[tuple[Output | None, SequenceGauge]]:
    """Its outputs in order, with what a look would see just after each."""
    for chunk in story.chunks:
        yield Output(id, prefilled=chunk), SequenceGauge(id, "prefill", chunk, story.cached)
    made = 0
    for step in story.steps:
        made += step
        yield Output(id, (1,) * step), SequenceGauge(id, "decode", story.prompt + made - 1, story.cached)
    cached = story.cached if story.chunks or story.steps else 0
    yield (
        Output(id, finish=story.finish, usage=Usage(story.prompt, made, cached)),
        SequenceGauge(id, "done", 0, 0),
    )


@given(st.lists(stories(), max_size=6), st.randoms(use_true_random=False))
def test_counters_only_grow_and_add_up_however_turns_and_looks_fall(cast: list[Story], dice: Any) -> None:
    bench = Bench()
    playing = {f"r{i}": told(f"r{i}", story) for i, story in enumerate(cast)}
    for id, story in zip(playing, cast, strict=True):
        bench.submit(id, story.prompt, f"model {story.prompt % 2}")
    before: dict[str, float] = {}
    seen: dict[str, SequenceGauge] = {}
    at = 0.0
    while playing:
        id = dice.choice(list(playing))
        step = next(playing[id], None)
        if step is None:
            del playing[id], seen[id]
            continue
        output, seen[id] = step
        assert output is not None
        at += dice.random()
        bench.out(at, output)
        if dice.random() < 0.3:
            bench.look(*seen.values())
        if dice.random() < 0.2:
            bench.second()
        after = dict(numbers(bench.recorder.counters()))
        assert all(after[key] >= was for key, was in before.items())
        before = after
    counters = bench.recorder.counters().models.values()
    reached = [story.prompt if story.steps else max(story.chunks, default=0) for story in cast]
    assert sum(c.cached_tokens + c.computed_tokens for c in counters) == sum(reached)
    assert sum(c.generated_tokens for c in counters) == sum(sum(story.steps) for story in cast)
    assert sum(sum(c.finished.values()) for c in counters) == sum(c.submitted for c in counters) == len(cast)
    assert [sum(c.ttft.counts) for c in counters] == [
        sum(bool(story.steps) and f"model {story.prompt % 2}" == model for story in cast)
        for model in bench.recorder.counters().models
    ]


def test_quick_turns_of_many_rows_are_cheap() -> None:
    """Sixteen rows for a thousand turns: what is kept stays bounded."""
    bench = Bench()
    for i in range(16):
        bench.submit(f"r{i}", 5)
    for turn in range(1000):
        bench.out(0.001 * turn, *(Output(f"r{i}", (turn,)) for i in range(16)))
    point = bench.second()
    assert point["batch"] == 16.0
    assert point["inter_token_p50_s"] == pytest.approx(0.001)
    assert bench.recorder.counters().of("m").generated_tokens == 16_000
    assert bench.recorder.latency().inter_token_s.count == 10_000
