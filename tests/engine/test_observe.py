"""The real engine tells its recorder everything, and its server is scrapeable from the first moment on."""

from __future__ import annotations

import asyncio
import threading
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.api.test_metrics import growing, scrape, value
from tests.engine.test_engine import ENDLESS, SlowModel, engine_of, read, with_engine
from tests.engine.test_loop import request_of
from tests.fakes import STOP, HashModel
from tests.live import Live, live, until
from treadle.config import Config
from treadle.engine.engine import Engine
from treadle.models.load import LoadedModel
from treadle.types import Finish


def test_what_the_loop_reused_and_made_is_what_is_counted() -> None:
    prompt = list(range(1, 61))

    async def body(engine: Engine) -> None:
        made = 0
        for id, ids in (("first", prompt), ("again", prompt), ("longer", [*prompt, 5, 6, 7])):
            tokens, finish = await read(engine, request_of(id, ids, 8))
            made += len(tokens) + (finish is Finish.STOP)
        first, again, longer = engine.recorder.finished()
        counters = engine.recorder.counters()
        of_model = counters.models["hash"]
        assert (first.cached_tokens, first.computed_tokens) == (0, 60)
        assert again.cached_tokens >= 59 and again.cached_tokens + again.computed_tokens == 60
        assert longer.cached_tokens >= 60 and longer.prompt_tokens == 63
        cached = again.cached_tokens + longer.cached_tokens
        assert (of_model.cached_tokens, of_model.cached_tokens + of_model.computed_tokens) == (cached, 183)
        assert of_model.generated_tokens == made
        assert counters.turns > 3 and counters.turn_s > 0
        assert sum(of_model.ttft.counts) == of_model.submitted == 3

    with_engine(engine_of(HashModel(), prefill_chunk=16), body)


def test_a_look_once_a_second_tells_of_the_device_the_cache_and_the_sequences() -> None:
    async def body(engine: Engine) -> None:
        await read(engine, request_of("before", [1, 2, 3], 4))
        stream = engine.submit(request_of("r", list(range(1, 40)), None, **ENDLESS))
        for _ in range(400):
            await asyncio.sleep(0.01)
            gauges = engine.recorder.gauges
            if any((one.id, one.stage) == ("r", "decode") for one in gauges.sequences):
                break
        stream.abort()
        [sequence] = gauges.sequences
        assert (sequence.id, sequence.stage) == ("r", "decode") and sequence.computed >= 38
        assert gauges.device is not None and gauges.device.memory_bytes > 0
        assert gauges.memory is not None and 0 < gauges.memory.limit <= gauges.device.memory_bytes
        assert gauges.cache is not None and gauges.cache.budget_bytes == 10**9
        assert sum(gauges.cache.hits.values()) == 2
        async for _ in stream:
            pass

    with_engine(engine_of(SlowModel(), cache_gb=1.0), body)


def test_an_idle_engine_goes_on_looking() -> None:
    async def body(engine: Engine) -> None:
        await read(engine, request_of("r", [1, 2, 3], 4))
        await asyncio.sleep(0)
        before = engine.recorder.gauges
        for _ in range(400):
            await asyncio.sleep(0.01)
            if engine.recorder.gauges is not before:
                return
        pytest.fail("no look within four seconds")

    with_engine(engine_of(HashModel()), body)


def words(vocab_size: int) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({f"w{i} ": i for i in range(vocab_size)}, unk_token="w0 "))
    return PreTrainedTokenizerFast(tokenizer_object=core)


def complete(server: Live, seed: int) -> None:
    ids = np.random.default_rng(seed % 4).integers(1, 90, 40).tolist()
    body: dict[str, Any] = {"prompt": ids, "max_tokens": 8, "seed": seed, "stream": seed % 2 == 0}
    assert server.post("/v1/completions", body).status_code == 200


def test_counters_grow_from_before_the_model_is_loaded_until_after_the_load() -> None:
    """Scrapes while the model loads, while four clients ask, and at rest; none fails, nothing goes down."""
    model, may_load = HashModel(), threading.Event()

    def load() -> LoadedModel:
        may_load.wait(20)
        return LoadedModel(
            "hash", "hash", "0", model, words(model.caps.vocab_size), {}, model.caps, frozenset({STOP}), {}, None
        )

    engine = Engine(load, Config(drain_s=0.2, max_rows=3, prefill_chunk=16))
    with live(engine) as server:  # type: ignore[arg-type]
        scrapes = [scrape(server) for _ in range(3)]
        assert value(scrapes[-1], "treadle_ready") == 0
        may_load.set()
        until(lambda: value(scrape(server), "treadle_ready") == 1, within_s=20)
        threads = [
            threading.Thread(target=lambda i=i: [complete(server, 10 * i + n) for n in range(6)]) for i in range(4)
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            scrapes.append(scrape(server))
        scrapes.append(scrape(server))
    for before, after in pairwise(scrapes):
        assert not {key for key, was in growing(before).items() if after.get(key, -1.0) < was}
    last = scrapes[-1]
    assert value(last, "treadle_requests_submitted_total", model="hash") == 24
    prompt = [value(last, "treadle_prompt_tokens_total", model="hash", source=s) for s in ("cached", "computed")]
    assert sum(prompt) == 24 * 40 and prompt[0] > 0
