"""What the server tells of itself over HTTP: `/metrics` for Prometheus, `/v1/stats` for people and pages."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.fakes_engine import FakeEngine, Script, say
from tests.live import Live, live, until
from treadle.metrics.gauges import CacheGauge, Gauges, MemoryGauge, SequenceGauge
from treadle.metrics.snapshot import SERIES, DeviceCard
from treadle.types import HIT_KINDS

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello world"}]}
OPENMETRICS = {"accept": "application/openmetrics-text; version=1.0.0"}
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def server() -> Iterator[Live]:
    with live(FakeEngine(say("hello", cached=2))) as running:
        yield running


def scrape(server: Live, **headers: str) -> Samples:
    """Every sample of `/metrics`, parsed by the strict parser."""
    answer = httpx.get(server.url + "/metrics", headers=OPENMETRICS | headers, timeout=20)
    assert answer.status_code == 200, answer.text
    families = text_string_to_metric_families(answer.text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def growing(samples: Samples) -> Samples:
    """Those that may never go down."""
    endings = ("_total", "_count", "_sum", "_bucket")
    return {key: value for key, value in samples.items() if key[0].endswith(endings)}


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def gauges(**values: Any) -> Gauges:
    return Gauges(
        DeviceCard("a device", "cpu", 1000, {"mlx": "1"}),
        MemoryGauge(900, 100, 150, 10),
        CacheGauge(30, 200, 8, {"exact": 3, "miss": 1}, {"idle": 2}, {"idle": 64}),
        **values,
    )


def test_one_request_is_counted_once_everywhere(server: Live) -> None:
    assert server.post(CHAT, HELLO).status_code == 200
    samples = scrape(server)
    assert value(samples, "treadle_requests_submitted_total", model="fake") == 1
    assert value(samples, "treadle_requests_finished_total", model="fake", finish="stop") == 1
    assert value(samples, "treadle_prompt_tokens_total", model="fake", source="cached") == 2
    assert value(samples, "treadle_time_to_first_token_seconds_count", model="fake") == 1
    assert value(samples, "treadle_request_prompt_tokens_count", model="fake") == 1
    assert value(samples, "treadle_http_responses_total", route=CHAT, status="200") == 1
    stats = server.get("/v1/stats").json()
    [finished] = stats["finished"]
    tokens = stats["totals"]["tokens"]
    assert (finished["cached_tokens"], finished["finish"], finished["model"]) == (2, "stop", "fake")
    assert finished["prompt_tokens"] == tokens["prompt"] == tokens["cached"] + tokens["computed"]
    assert value(samples, "treadle_prompt_tokens_total", model="fake", source="computed") == tokens["computed"]
    assert value(samples, "treadle_generated_tokens_total", model="fake") == tokens["generated"]
    assert stats["models"][0]["tokens"] == tokens["generated"]


def test_a_scraper_that_knows_no_openmetrics_gets_the_plain_format(server: Live) -> None:
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert "treadle_requests_running 0.0" in answer.text
    assert "# EOF" not in answer.text


def test_counters_never_go_down_while_requests_come_end_and_leave() -> None:
    def plan(request: Any) -> Script:
        return say("hello world", step_s=0.005, cached=len(request.prompt) // 2)

    def load(server: Live) -> None:
        for i in range(12):
            if i % 4 == 3:
                connection = server.send(CHAT, {**HELLO, "stream": True})
                connection.recv(64)
                connection.close()
            else:
                server.post(CHAT, {**HELLO, "max_tokens": 1 + i})

    with live(FakeEngine(plan)) as server:
        threads = [threading.Thread(target=load, args=(server,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        before, scrapes = growing(scrape(server)), 0
        while any(thread.is_alive() for thread in threads) or scrapes < 5:
            after = growing(scrape(server))
            assert not {key for key, was in before.items() if after.get(key, -1) < was}
            before, scrapes = after, scrapes + 1
        until(lambda: not server.engine.streams)
        until(lambda: value(scrape(server), "treadle_client_disconnects_total") == 12)
        last = scrape(server)
    finished = sum(n for (name, _), n in last.items() if name == "treadle_requests_finished_total")
    assert finished == value(last, "treadle_requests_submitted_total", model="fake") == 48


def test_both_answer_while_the_model_loads_and_after_it_failed(server: Live) -> None:
    for state in ("loading", "failed"):
        server.engine.state = state
        assert value(scrape(server), "treadle_ready") == 0
        stats = server.get("/v1/stats").json()
        [model] = stats["models"]
        assert (stats["server"]["state"], model["state"], stats["memory"]) == (state, state, None)
    server.engine.state = "ready"
    assert value(scrape(server), "treadle_ready") == 1


def test_a_look_at_the_device_and_the_cache_is_told_to_both(server: Live) -> None:
    server.engine.recorder.measured(gauges(traces=36))
    samples, stats = scrape(server), server.get("/v1/stats").json()
    assert value(samples, "treadle_traces_total") == stats["traces"] == 36
    assert value(samples, "treadle_memory_active_bytes") == stats["memory"]["active_bytes"] == 100
    assert value(samples, "treadle_memory_peak_bytes") == stats["memory"]["peak_bytes"] == 150
    assert value(samples, "treadle_cache_lookups_total", kind="exact") == stats["cache"]["hits"]["exact"] == 3
    assert value(samples, "treadle_cache_freed_bytes_total", reason="idle") == 64
    assert set(stats["cache"]["hits"]) == set(HIT_KINDS)
    assert (stats["cache"]["bits"], stats["device"]["name"]) == (8, "a device")


def test_a_running_request_is_listed_until_it_ends() -> None:
    with live(FakeEngine(say("hello world", step_s=0.2, cached=2))) as server:
        connection = server.send(CHAT, {**HELLO, "stream": True})
        until(lambda: server.get("/v1/stats").json()["live"] != [])
        [request] = server.get("/v1/stats").json()["live"]
        server.engine.recorder.measured(gauges(sequences=(SequenceGauge(request["id"], "decode", 9, 2),)))
        [request] = server.get("/v1/stats").json()["live"]
        assert (request["state"], request["cached_tokens"], request["model"]) == ("decode", 2, "fake")
        assert server.post(f"/v1/requests/{request['job']}/cancel").status_code == 200
        until(lambda: server.get("/v1/stats").json()["live"] == [])
        [ended] = server.get("/v1/stats").json()["finished"]
        connection.close()
    assert (ended["id"], ended["finish"]) == (request["id"], "abort")


def test_the_history_grows_by_a_point_a_second_and_since_leaves_out_what_is_known(server: Live) -> None:
    until(lambda: len(server.get("/v1/stats").json()["history"]["times"]) >= 2)
    server.post(CHAT, HELLO)
    stats = server.get("/v1/stats").json()
    times, series = stats["history"]["times"], stats["history"]["series"]
    assert tuple(series) == SERIES and {len(values) for values in series.values()} == {len(times)}
    newer = server.get(f"/v1/stats?since={times[0]}").json()
    assert newer["history"]["times"][: len(times) - 1] == times[1:]
    assert len(newer["finished"]) == 1
    later = server.get(f"/v1/stats?since={newer['now'] + 60}").json()
    assert (later["history"]["times"], later["finished"]) == ([], [])
    assert later["totals"]["submitted"] == 1


def test_a_bad_since_is_refused_by_name(server: Live) -> None:
    for bad in ("-1", "nan", "soon"):
        answer = server.get(f"/v1/stats?since={bad}")
        assert answer.status_code == 400 and "since" in answer.text


def test_both_need_the_key_where_there_is_one() -> None:
    with live(FakeEngine(), api_keys=("secret",)) as server:
        for path in ("/metrics", "/v1/stats"):
            assert server.get(path).status_code == 401
            assert httpx.get(server.url + path, headers={"x-api-key": "secret"}).status_code == 200
        refused = value(
            scrape(server, **{"x-api-key": "secret"}), "treadle_http_responses_total", route="other", status="401"
        )
        assert refused == 2


def test_paths_that_strangers_invent_become_no_labels(server: Live) -> None:
    for i in range(5):
        assert server.get(f"/nothing/{i}").status_code == 404
        assert server.get(f"/v1/models/none-{i}").status_code == 404
    samples = scrape(server)
    assert value(samples, "treadle_http_responses_total", route="other", status="404") == 5
    assert value(samples, "treadle_http_responses_total", route="/v1/models/{id:path}", status="404") == 5


def test_a_client_that_reads_to_the_end_is_no_disconnect(server: Live) -> None:
    for stream in (False, True):
        server.post(CHAT, {**HELLO, "stream": stream})
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    assert value(scrape(server), "treadle_client_disconnects_total") == 0


def test_a_snapshot_of_a_full_history_stays_small_and_is_plain_json(server: Live) -> None:
    for _ in range(1000):
        server.engine.recorder.tick(16, 3)
    body = httpx.get(server.url + "/v1/stats").content
    assert len(orjson.loads(body)["history"]["times"]) == 900
    assert len(body) < 400_000
