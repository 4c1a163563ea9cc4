"""A part of a long prompt is left out, on every route, beside everything else; and every answer says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.test_speculation import SCHEMA, Asked, bare, folders, post, serving, together, user
from tests.live import Live, chunks

LONG = "one two three four five six seven eight nine ten. " * 12
BODIES: dict[str, Asked] = {
    "chat": ("chat/completions", user(LONG) | {"temperature": 0, "max_tokens": 24}),
    "choices": (
        "chat/completions",
        user(LONG + "Go.") | {"n": 2, "seed": 5, "presence_penalty": 0.6, "max_tokens": 20},
    ),
    "schema": (
        "chat/completions",
        user(LONG + "JSON.")
        | {
            "temperature": 0,
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        },
    ),
    "completion": ("completions", {"prompt": LONG, "temperature": 0, "logprobs": 2, "max_tokens": 16}),
    "tokens": ("completions", {"prompt": [7, 8, 9] * 120, "seed": 1, "max_tokens": 16}),
    "message": ("messages", user(LONG) | {"model": "claude-x", "seed": 2, "max_tokens": 16}),
    "response": ("responses", {"input": LONG, "temperature": 0, "max_output_tokens": 16}),
}
ASKED = {"specprefill": True, "specprefill_keep_pct": 0.4}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return folders(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def server(pair: tuple[Path, Path]) -> Iterator[Live]:
    with serving(pair[0], specprefill_model=str(pair[1]), draft_model="none") as running:
        yield running


def report_in(answer: dict[str, Any]) -> dict[str, Any]:
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage
    found: dict[str, Any] = details["specprefill"]
    return found


def without_reports(value: Any) -> Any:
    """A reply without counts, whose times differ."""
    return {k: v for k, v in bare(value).items() if k != "usage"} if isinstance(value, dict) else value


@pytest.mark.parametrize("name", BODIES)
def test_every_route_leaves_out_what_it_is_asked_to_and_says_so(server: Live, name: str) -> None:
    report = report_in(post(server, BODIES[name], **ASKED).json())
    assert report["engaged"] and report["reason"] and report["score_s"] >= 0
    assert 0.3 * report["tokens"] < report["kept"] < report["tokens"]
    whole = report_in(post(server, BODIES[name], specprefill=False, cache_salt="other").json())
    assert not whole["engaged"] and "wants all" in whole["reason"] and whole["kept"] == whole["tokens"]


def test_choices_of_a_prompt_that_is_scored_all_read_it_whole(server: Live) -> None:
    body = {"prompt": LONG, "echo": True, "logprobs": 1, "n": 2, "max_tokens": 4, "temperature": 0}
    answer = post(server, ("completions", body), cache_salt="scored", **ASKED).json()
    assert not report_in(answer)["engaged"]
    assert answer["choices"][0]["text"] == answer["choices"][1]["text"]


def test_streams_report_it_too(server: Live) -> None:
    route, body = BODIES["chat"]
    more = {"stream": True, "stream_options": {"include_usage": True}, "cache_salt": "streamed"} | ASKED
    streamed = chunks(post(server, (route, body), **more).text)
    assert report_in(streamed[-1])["engaged"]
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in streamed[:-1] if c["choices"])
    answer = post(server, (route, body), cache_salt="whole", **ASKED).json()
    assert text == (answer["choices"][0]["message"]["content"] or "")


def test_a_batch_says_what_each_says_alone(server: Live) -> None:
    bodies = {name: (route, body | ASKED) for name, (route, body) in BODIES.items()}
    bodies["whole"] = ("chat/completions", user(LONG) | {"temperature": 0, "max_tokens": 24, "specprefill": False})
    # Salted, because what is cached exactly is not left out, and so another's request may change what is read.
    alone = {name: without_reports(post(server, one, cache_salt=name).json()) for name, one in bodies.items()}
    salted = {name: (route, body | {"cache_salt": f"{name} again"}) for name, (route, body) in bodies.items()}
    assert {name: without_reports(one) for name, one in together(server, salted).items()} == alone


@pytest.mark.parametrize("settings", [{"kv_bits": "8"}, {"speculation": "off"}, {"cache_gb": 0}])
def test_it_works_with_packed_rows_without_drafts_and_without_a_cache(
    pair: tuple[Path, Path], settings: dict[str, Any]
) -> None:
    with serving(pair[0], specprefill_model=str(pair[1]), draft_model="none", **settings) as other:
        for name in ("chat", "schema", "message"):
            assert report_in(post(other, BODIES[name], **ASKED).json())["engaged"]


def test_the_same_small_model_drafts_and_skims(pair: tuple[Path, Path], server: Live) -> None:
    with serving(pair[0], specprefill_model=str(pair[1]), draft_model=str(pair[1])) as both:
        asked = (BODIES["chat"][0], BODIES["chat"][1] | ASKED)
        answer = post(both, asked).json()
        assert report_in(answer)["engaged"]
        alone = post(server, asked, cache_salt="nothing cached exactly").json()
        assert without_reports(answer)["choices"] == without_reports(alone)["choices"]


def test_it_is_done_by_itself_beyond_the_threshold_only(pair: tuple[Path, Path]) -> None:
    with serving(pair[0], specprefill_model=str(pair[1]), specprefill_threshold=100, draft_model="none") as running:
        report = report_in(post(running, BODIES["chat"]).json())
        # These two are not far enough apart in size for it to be done unasked, which is told.
        assert not report["engaged"] and "more than a fifth" in report["reason"]
        short = report_in(post(running, ("chat/completions", user("Hi.") | {"max_tokens": 2})).json())
        assert "No more than 100" in short["reason"]


def test_what_was_left_out_is_counted_and_the_model_says_what_it_can(server: Live) -> None:
    post(server, BODIES["chat"], **ASKED)
    lines = dict(
        line.rsplit(" ", 1)
        for line in server.get("/metrics").text.splitlines()
        if line.startswith(("treadle_sparse_prefills_total", "treadle_skipped_prompt_tokens_total"))
    )
    assert float(lines['treadle_sparse_prefills_total{engaged="true",model="large"}']) >= 1
    assert float(lines['treadle_skipped_prompt_tokens_total{model="large"}']) > 0
    (model,) = server.get("/v1/models").json()["data"]
    assert model["specprefill"]["model"] == "small" and model["specprefill"]["threshold"] == 8192


def test_without_a_small_model_asking_for_it_is_refused(pair: tuple[Path, Path]) -> None:
    with serving(pair[0], draft_model="none") as plain:
        assert "specprefill" not in post(plain, BODIES["chat"]).json()["usage"]["prompt_tokens_details"]
        for body, param in (
            ({"specprefill": True}, "specprefill"),
            ({"specprefill_keep_pct": 0.3}, "specprefill_keep_pct"),
        ):
            answer = httpx.post(f"{plain.url}/v1/chat/completions", json=BODIES["chat"][1] | body, timeout=60)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == param
            assert "--specprefill-model" in answer.json()["error"]["message"]
        assert post(plain, BODIES["chat"], specprefill=False).json()["usage"]


@pytest.mark.parametrize("body", [{"specprefill": 1}, {"specprefill_keep_pct": 0}, {"specprefill_keep_pct": 1.5}])
def test_wrong_values_are_named(server: Live, body: dict[str, Any]) -> None:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=BODIES["chat"][1] | body, timeout=60)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == next(iter(body))
