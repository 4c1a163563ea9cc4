"""`treadle top` shows what `/v1/stats` tells, in any state of the server."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.api.test_metrics import gauges
from tests.fakes_engine import FakeEngine, say
from tests.live import live, until
from tests.test_cli import free_port, run
from treadle.cli import top
from treadle.cli.top_frame import BARS, MOST_ROWS, bars, duration, frame
from treadle.errors import Unreachable
from treadle.metrics.gauges import SequenceGauge
from treadle.speculate.control import Source
from treadle.speculate.telemetry import SpeculationCounters

CHAT = {"messages": [{"role": "user", "content": "hello world"}]}


def drawn(stats: dict[str, Any], width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(frame(stats))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_one_screen_of_a_server_that_has_answered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with live(FakeEngine(say("hello", cached=2))) as server:
        server.post("/v1/chat/completions", CHAT)
        server.engine.recorder.measured(gauges())
        for address in (server.url, server.url + "/v1/"):
            assert run(monkeypatch, "top", "--once", "--url", address) == 0
            out = capsys.readouterr().out
            assert "ready, up" in out and "a device (cpu)" in out and "fake (ready)" in out
            assert "1 stop" in out and "2 cached" in out and "3 exact, 1 miss" in out
            assert "memory: 0.0 MB of 0.0 MB" in out


def test_live_requests_are_listed_with_their_state() -> None:
    with live(FakeEngine(say("hello world", step_s=0.3))) as server:
        connections = [server.send("/v1/chat/completions", {**CHAT, "stream": True}) for _ in range(MOST_ROWS + 3)]
        until(lambda: len(server.get("/v1/stats").json()["live"]) == MOST_ROWS + 3)
        first = server.get("/v1/stats").json()["live"][0]["id"]
        server.engine.recorder.measured(gauges(sequences=(SequenceGauge(first, "decode", 9, 7),)))
        text = drawn(server.get("/v1/stats").json())
        for connection in connections:
            connection.close()
    [line] = [line for line in text.splitlines() if first[:12] in line]
    assert "decode" in line and " 7 " in line
    assert "and 3 more" in text


def test_a_server_that_loads_or_failed_is_drawn_too() -> None:
    engine = FakeEngine()
    engine.failure = "There is no such [bold]model."
    with live(engine) as server:
        text = drawn(server.get("/v1/stats").json(), width=60)
    assert "failed, up" in text and "There is no such [bold]model." in text


def test_speculation_is_shown_for_each_model_that_has_it() -> None:
    idle, busy = SpeculationCounters(), SpeculationCounters()
    busy.settled(Source.LOOKUP, 8, 6)
    busy.verified([6], 7, 0.1)
    busy.plain(2, 0.1)
    with live(FakeEngine()) as server:
        server.engine.recorder.measured(gauges(speculation={"a": idle.snapshot(), "b": busy.snapshot()}))
        text = drawn(server.get("/v1/stats").json())
    assert "speculation of a: no drafts yet" in text
    assert "speculation of b: 75 % of the drafts accepted, 3.50 times the speed of plain steps" in text


def test_it_goes_on_while_the_server_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    with live(FakeEngine()) as server:
        stats = server.get("/v1/stats").json()
    answers = iter([Unreachable("It is away."), stats, KeyboardInterrupt()])

    def fetch(*_: Any) -> Any:
        answer = next(answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(top, "fetch", fetch)
    monkeypatch.setattr(top, "REFRESH_S", 0.0)
    with pytest.raises(KeyboardInterrupt):
        top.watch(None, "address", stats)  # type: ignore[arg-type]
    assert next(answers, None) is None


def test_what_stands_in_the_way_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "top", "--once", "--url", f"http://127.0.0.1:{free_port()}") == 1
    assert "does not answer" in capsys.readouterr().err
    with live(FakeEngine(), api_keys=("secret",)) as server:
        assert run(monkeypatch, "top", "--once", "--url", server.url) == 1
        assert "wants an API key" in capsys.readouterr().err
        monkeypatch.setenv("TREADLE_API_KEY", "secret")
        assert run(monkeypatch, "top", "--once", "--url", server.url) == 0
        assert run(monkeypatch, "top", "--once", "--url", server.url + "/nothing") == 1
        assert "is it a Treadle server?" in capsys.readouterr().err


@given(st.lists(st.none() | st.floats(0, 1e9)))
def test_bars_have_one_character_per_value_and_the_largest_is_the_highest(values: list[float | None]) -> None:
    text = bars(values)
    assert len(text) == len(values)
    assert [character == " " for character in text] == [value is None for value in values]
    known = [(value, BARS.index(c)) for value, c in zip(values, text, strict=True) if value is not None]
    assert known == sorted(known, key=lambda pair: pair[0]) or sorted(known) == sorted(known, key=lambda p: p[0])
    if any(value for value, _ in known):
        assert max(height for _, height in known) == len(BARS) - 1


def test_durations_have_two_units() -> None:
    assert [duration(s) for s in (0.25, 12.7, 61, 3725, 90000)] == ["0.2s", "12s", "1m 1s", "1h 2m", "25h 0m"]
