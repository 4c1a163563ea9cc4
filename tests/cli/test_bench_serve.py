"""`treadle bench serve` against a live server: what it counts is what the server counts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.fakes_engine import FakeEngine, FakeModel, say
from tests.live import Live, live
from tests.test_cli import free_port, run
from treadle.errors import QueueFull

LONG = replace(FakeModel().caps, context_length=4096)
JSON = ("--json", "--seed", "5", "--prompt-words", "4")


def bench(monkeypatch: pytest.MonkeyPatch, server: Live, *arguments: str) -> int:
    return run(monkeypatch, "bench", "serve", "--url", server.url, *arguments)


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.parametrize("workload", ["chat", "agent", "shared-prefix"])
def test_every_workload_runs_and_counts_what_the_server_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], workload: str
) -> None:
    with live(FakeEngine(say("hello world", cached=2), caps=LONG)) as server:
        assert bench(monkeypatch, server, "--workload", workload, "--requests", "7", *JSON) == 0
        result, totals = told(capsys), server.get("/v1/stats").json()["totals"]
    assert (result["bench"], result["model"], result["workload"], result["seed"]) == ("serve", "fake", workload, 5)
    assert (result["requests"], result["failed"], result["errors"]) == (7, 0, {})
    assert totals["submitted"] == 7
    assert result["completion_tokens"] == totals["tokens"]["generated"]
    assert (result["prompt_tokens"], result["cached_tokens"]) == (totals["tokens"]["prompt"], 14)
    assert set(result["ttft_s"]) == {"mean", "p50", "p95", "p99"} and result["ttft_s"]["p50"] > 0


def test_an_agent_repeats_its_conversation_with_the_reply_in_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with live(FakeEngine(say("hello"))) as server:
        bench(monkeypatch, server, "--workload", "agent", "--requests", "3", "--concurrency", "2", *JSON)
        first, second, third = (request.prompt.tolist() for request in server.engine.requests)
    assert second[: len(first)] == first and third[: len(second)] == second
    assert capsys.readouterr().err == ""


def test_requests_that_fail_are_named_and_end_with_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with live(FakeEngine()) as server:
        server.engine.refusal = QueueFull("Too many.")
        assert bench(monkeypatch, server, "--requests", "3", *JSON) == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["errors"] == {"HTTP 429: Too many.": 3}
    assert said.err == "treadle: 3 of 3 requests failed.\n"


def test_the_table_is_for_people(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with live(FakeEngine(say("hello"))) as server:
        assert bench(monkeypatch, server, "--requests", "2", "--prompt-words", "4", "--model", "fake") == 0
    out = capsys.readouterr().out
    assert "time to first token" in out and "2 requests in" in out and "0 failed" in out


def test_a_key_is_sent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with live(FakeEngine(say("hello")), api_keys=("secret",)) as server:
        assert bench(monkeypatch, server, "--requests", "1", "--api-key", "secret", *JSON) == 0
        assert bench(monkeypatch, server, "--requests", "1", *JSON) == 1
    assert capsys.readouterr().err == "treadle: The server wants an API key: --api-key or TREADLE_API_KEY.\n"


def test_no_server_and_no_such_workload_are_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "bench", "serve", "--url", f"http://127.0.0.1:{free_port()}") == 1
    assert "names no model" in capsys.readouterr().err
    assert run(monkeypatch, "bench", "serve", "--workload", "burst") == 1
    assert capsys.readouterr().err.startswith("treadle: The workload must be one of chat, agent, shared-prefix")
