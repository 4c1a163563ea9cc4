"""`kv_bits` of a request reaches the engine on every route that generates, and what no model has is refused by name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.engine.test_engine import engine_of, with_engine
from tests.fakes import HashModel
from tests.fakes_engine import FakeEngine, say
from tests.live import Live, live
from treadle.engine.engine import Engine
from treadle.errors import BadRequest
from treadle.metrics.gauges import Gauges
from treadle.metrics.snapshot import PressureCard
from treadle.types import EXACT, KvFormat, Request

TALK = [{"role": "user", "content": "hello world"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TALK},
    "/v1/completions": {"prompt": "hello world"},
    "/v1/responses": {"input": "hello world"},
    "/v1/messages": {"messages": TALK, "max_tokens": 9},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(FakeEngine(say("hello"))) as running:
        yield running


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("asked", "format"),
    [(8, KvFormat(8, 8)), ("8/4", KvFormat(8, 4)), ("16", EXACT), ("auto", None), (None, None)],
)
def test_the_format_that_is_asked_for_is_that_of_the_sequence(
    server: Live, path: str, asked: Any, format: KvFormat | None
) -> None:
    assert server.post(path, BODIES[path] | {"kv_bits": asked}).status_code == 200
    assert server.engine.requests[-1].kv == format


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("wrong", [5, "2", 8.0, True, "", [8]])
def test_other_values_are_refused_by_name(server: Live, path: str, wrong: Any) -> None:
    answer = server.post(path, BODIES[path] | {"kv_bits": wrong})
    assert answer.status_code == 400 and "kv_bits" in answer.text


def test_a_model_whose_rows_cannot_be_packed_says_so() -> None:
    async def body(engine: Engine) -> None:
        ids = np.array([1, 2, 3], np.int64)
        with pytest.raises(BadRequest, match="exact only: no group of 32") as error:
            engine.submit(Request("a", ids, kv=KvFormat(8, 8)))
        assert error.value.param == "kv_bits"
        engine.submit(Request("b", ids, kv=EXACT, max_tokens=1))
        await asyncio.sleep(0.05)

    with_engine(engine_of(HashModel()), body)


def test_health_stats_and_metrics_tell_of_pressure(server: Live) -> None:
    assert server.get("/v1/stats").json()["pressure"] is None
    told = PressureCard("evict", False, {"evict": 2, "pack": 1}, {"evict": 3}, {"evict": 4096})
    server.engine.recorder.measured(Gauges(pressure=told))
    assert server.get("/health").json()["memory"] == {"level": "evict", "holding": False}
    card = server.get("/v1/stats").json()["pressure"]
    assert (card["level"], card["entered"], card["freed_bytes"]) == ("evict", {"evict": 2, "pack": 1}, {"evict": 4096})
    text = server.get("/metrics").text
    for line in (
        "treadle_pressure_level 2.0",
        'treadle_pressure_entered_total{level="evict"} 2.0',
        'treadle_pressure_actions_total{action="evict"} 3.0',
        'treadle_pressure_freed_bytes_total{action="evict"} 4096.0',
    ):
        assert line in text
