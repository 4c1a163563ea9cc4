"""The engine's thread: streams, aborts, refusals at the door, shutdown, and the truth about its state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.test_loop import request_of
from tests.fakes import STOP, HashModel, slow_twin
from treadle.config import Config
from treadle.engine import thread as engine_module
from treadle.engine.engine import Engine
from treadle.errors import BadRequest, ContextLengthExceeded, LoadError, MemoryRefused, NotReady, QueueFull
from treadle.models.load import LoadedModel
from treadle.types import Finish, Footprint, Request

ENDLESS = {"logit_bias": ((STOP, -100.0),)}


class SlowModel(HashModel):
    """A hash model whose every step takes a while."""

    pause_s = 0.01

    def __call__(self, ids: Any, cache: list[Any]) -> Any:
        time.sleep(self.pause_s)
        return super().__call__(ids, cache)


def loaded(model: HashModel) -> LoadedModel:
    return LoadedModel("hash", "hash", "0", model, None, {}, model.caps, frozenset({STOP}), {}, None)


def engine_of(model: HashModel, **settings: Any) -> Engine:
    return Engine(lambda: loaded(model), Config(**{"drain_s": 0.2, **settings}))


def with_engine(engine: Engine, body: Callable[[Engine], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        engine.start()
        await engine.ready()
        try:
            await body(engine)
        finally:
            await engine.stop()
        assert engine.counts() == (0, 0) and not engine._thread.alive

    asyncio.run(main())


async def read(engine: Engine, request: Request) -> tuple[list[int], Finish | None]:
    tokens: list[int] = []
    finish = None
    async for output in engine.submit(request):
        tokens += output.tokens
        finish = output.finish
    return tokens, finish


def test_many_streams_at_once_each_get_their_own_text() -> None:
    model = HashModel()
    asked = [request_of(f"r{i}", [i + 1, 5, 6], 20, temperature=1.0, seed=i) for i in range(12)]

    async def body(engine: Engine) -> None:
        results = await asyncio.gather(*(read(engine, r) for r in asked))
        for request, (tokens, _) in zip(asked, results, strict=True):
            assert tokens == slow_twin(model, request, 512)

    with_engine(engine_of(model, max_rows=5), body)


def test_an_abort_ends_a_stream_within_a_step_whether_it_waits_or_runs() -> None:
    async def body(engine: Engine) -> None:
        first = engine.submit(request_of("first", [1, 2], None, **ENDLESS))
        second = engine.submit(request_of("second", [3], None, **ENDLESS))
        await anext(first)
        for stream in (second, first):
            began = time.monotonic()
            stream.abort()
            outputs = [o async for o in stream]
            assert outputs[-1].finish is Finish.ABORT and time.monotonic() - began < 1.0
        assert engine.abort("first") is False
        assert (await read(engine, request_of("after", [7], 3)))[1] is not None

    with_engine(engine_of(SlowModel(), max_rows=1), body)


def test_streams_left_at_random_moments_leave_nothing_behind() -> None:
    rng = np.random.default_rng(5)

    async def leave(engine: Engine, i: int) -> None:
        stream = engine.submit(request_of(f"r{i}", [i + 1] * int(rng.integers(1, 80)), None, **ENDLESS))
        await asyncio.sleep(float(rng.uniform(0, 0.15)))
        stream.abort()
        async for _ in stream:
            pass

    async def body(engine: Engine) -> None:
        await asyncio.gather(*(leave(engine, i) for i in range(50)))
        assert engine.counts() == (0, 0)
        request = request_of("last", [4, 5], 6)
        assert (await read(engine, request))[0] == slow_twin(HashModel(), request, 512)

    with_engine(engine_of(SlowModel(), max_rows=4, prefill_chunk=16), body)


def test_bad_requests_are_refused_at_the_door() -> None:
    model = HashModel(context=32)
    model.caps = replace(model.caps, footprint=Footprint(row_bytes=10**12))

    async def body(engine: Engine) -> None:
        for prompt in ([], [97], [-1]):
            with pytest.raises(BadRequest):
                engine.submit(request_of("x", prompt))
        with pytest.raises(BadRequest):
            engine.submit(request_of("x", [1], logit_bias=((10**8, 1.0),)))
        with pytest.raises(ContextLengthExceeded) as caught:
            engine.submit(request_of("x", [1] * 32))
        assert (caught.value.num_tokens, caught.value.context_length) == (32, 32)
        with pytest.raises(MemoryRefused):
            engine.submit(request_of("x", [1]))

    with_engine(engine_of(model), body)


def test_a_full_queue_is_said_at_once() -> None:
    async def body(engine: Engine) -> None:
        streams = [engine.submit(request_of(f"r{i}", [1], None, **ENDLESS)) for i in range(3)]
        with pytest.raises(QueueFull):
            engine.submit(request_of("more", [1]))
        for stream in streams:
            stream.abort()

    with_engine(engine_of(SlowModel(), max_rows=1, max_waiting=2), body)


def test_a_shutdown_lets_running_streams_finish_and_aborts_the_rest() -> None:
    async def main() -> None:
        engine = engine_of(SlowModel(), drain_s=0.5)
        engine.start()
        await engine.ready()
        short = asyncio.create_task(read(engine, request_of("short", [1, 2], 5, **ENDLESS)))
        endless = asyncio.create_task(read(engine, request_of("endless", [3], None, **ENDLESS)))
        await asyncio.sleep(0.05)
        stopping = asyncio.create_task(engine.stop())
        await asyncio.sleep(0.01)
        with pytest.raises(NotReady):
            engine.submit(request_of("late", [1]))
        await stopping
        assert (await short)[1] is Finish.LENGTH
        assert (await endless)[1] is Finish.ABORT
        assert engine.state == "stopped"
        with pytest.raises(NotReady, match="has stopped"):
            await asyncio.wait_for(engine.slots[0].unload(), 5)

    asyncio.run(main())


def test_a_model_that_cannot_be_loaded_is_reported_with_its_reason() -> None:
    def load() -> LoadedModel:
        raise LoadError("There is no such model.")

    async def main() -> None:
        engine = Engine(load, Config())
        engine.start()
        with pytest.raises(LoadError, match="no such model"):
            await engine.ready()
        assert engine.state == "failed" and engine.failure == "There is no such model."
        with pytest.raises(NotReady, match="no such model"):
            engine.submit(request_of("x", [1]))
        await engine.stop()

    asyncio.run(main())


def test_a_stuck_device_shows_in_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "STUCK_S", 0.05)
    model = SlowModel()
    model.pause_s = 0.4

    async def body(engine: Engine) -> None:
        task = asyncio.create_task(read(engine, request_of("x", [1, 2], 2, **ENDLESS)))
        await asyncio.sleep(0.2)
        assert engine.state == "stuck"
        await task
        await asyncio.sleep(0.05)
        assert engine.state == "ready"

    with_engine(engine_of(model), body)


def test_a_request_past_its_time_ends_with_a_sentence() -> None:
    async def body(engine: Engine) -> None:
        request = replace(request_of("x", [1, 2], None, **ENDLESS), timeout_s=0.1)
        outputs = [o async for o in engine.submit(request)]
        assert outputs[-1].finish is Finish.ABORT and "time limit" in (outputs[-1].error or "")

    with_engine(engine_of(SlowModel()), body)


def test_what_was_computed_last_is_on_disk_after_the_end(tmp_path: Path) -> None:
    request = request_of("a", [1 + i % 90 for i in range(300)], 4)
    cached = []

    async def body(engine: Engine) -> None:
        outputs = [output async for output in engine.submit(request)]
        assert outputs[-1].usage is not None
        cached.append(outputs[-1].usage.cached_tokens)

    for _ in range(2):
        with_engine(engine_of(HashModel(), cache_dir=str(tmp_path), cache_min_tokens=16), body)
    assert cached[0] == 0 and cached[1] >= 256
