"""One line for each request that ends; its prompt only when that is asked for."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest

from tests.fakes_engine import FakeEngine, say
from tests.live import live, until
from treadle.metrics.request_log import JsonFormatter, finished_line, log_finished
from treadle.metrics.snapshot import FinishedRequest

RECORD = FinishedRequest("r", "m", "stop", 1e9, 120, 100, 20, 45, 0.0, 0.12, 1.5, 200.0, 85.34)
CHAT = {"messages": [{"role": "user", "content": "hello world"}]}


def test_a_line_has_everything_that_is_known() -> None:
    assert finished_line(RECORD) == ("id=r model=m prompt=120 cached=100 out=45 ttft=0.120s speed=85.3/s finish=stop")
    unknown = replace(RECORD, ttft_s=None, decode_tokens_per_s=None, finish="abort")
    assert finished_line(unknown).endswith("ttft=- speed=- finish=abort")


def test_json_has_the_same_line_and_the_values_beside_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "treadle.request")
    log_finished(RECORD)
    [record] = caplog.records
    values = json.loads(JsonFormatter().format(record))
    assert values["message"] == finished_line(RECORD)
    assert (values["logger"], values["level"], values["id"]) == ("treadle.request", "INFO", "r")
    assert (values["ttft_s"], values["cached_tokens"], values["finish"]) == (0.12, 100, "stop")


def test_a_traceback_stays_inside_its_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        info = (ValueError, error, error.__traceback__)
    record = logging.LogRecord("treadle", logging.ERROR, "", 0, "It %s.", ("broke",), info)
    text = JsonFormatter().format(record)
    values = json.loads(text)
    assert "\n" not in text
    assert values["message"] == "It broke." and "ValueError: two" in values["traceback"]


@pytest.mark.parametrize("wanted", [False, True])
def test_prompts_are_in_the_log_only_when_asked_for(caplog: pytest.LogCaptureFixture, wanted: bool) -> None:
    caplog.set_level(logging.INFO)
    engine = FakeEngine(say("hello"))
    engine.recorder.listener = log_finished
    with live(engine, log_prompts=wanted) as server:
        assert server.post("/v1/chat/completions", CHAT).status_code == 200
        until(lambda: any("finish=stop" in line for line in caplog.messages))
        if wanted:
            until(lambda: any("prompt: " in line for line in caplog.messages))
    assert any("<|user|>hello world<|end|>" in line for line in caplog.messages) == wanted
    assert any("hello world" in line for line in caplog.messages) == wanted
