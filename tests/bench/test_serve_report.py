"""The summary of a load: nearest-rank percentiles, and failed requests in no other number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.bench.serve_load import Sample, note
from treadle.bench.serve_report import sentence, spread, summary


@given(st.lists(st.floats(0, 100), min_size=1))
def test_a_percentile_is_a_value_with_that_share_at_or_below_it(values: list[float]) -> None:
    told = spread(values)
    for share in (50, 95, 99):
        found = told[f"p{share}"]
        assert found in values and found is not None
        assert sum(value <= found for value in values) * 100 >= share * len(values)
        assert sum(value < found for value in values) * 100 < share * len(values)


def test_without_values_there_is_nothing_to_tell() -> None:
    assert spread([]) == {"mean": None, "p50": None, "p95": None, "p99": None}


def test_failed_requests_are_counted_and_left_out_of_the_rest() -> None:
    good = Sample(0, [0.5, 0.6, 0.8], 1.0, prompt_tokens=10, cached_tokens=4, completion_tokens=4)
    bad = Sample(1, [0.1], 9.0, error="HTTP 500: broken")
    result = summary([good, bad, bad], seconds=2.0)
    assert (result["requests"], result["failed"], result["errors"]) == (3, 2, {"HTTP 500: broken": 2})
    assert (result["prompt_tokens"], result["cached_tokens"], result["completion_tokens"]) == (10, 4, 4)
    assert (result["completion_tokens_per_s"], result["requests_per_s"]) == (2.0, 0.5)
    assert (result["ttft_s"]["p99"], result["duration_s"]["p99"]) == (0.5, 1.0)
    assert result["inter_chunk_s"]["p99"] == pytest.approx(0.2)
    assert result["per_token_s"]["mean"] == pytest.approx(0.1)
    assert sentence(result).startswith("3 requests in 2.0 s, 2 failed; 10 prompt tokens (4 cached), 4 generated")


def test_a_server_that_counts_nothing_is_counted_by_its_chunks() -> None:
    result = summary([Sample(0, [0.5, 0.6, 0.8], 1.0)], seconds=1.0)
    assert (result["completion_tokens"], result["prompt_tokens"], result["cached_tokens"]) == (3, None, None)
    assert "prompt" not in sentence(result)


def test_only_chunks_with_something_said_are_tokens() -> None:
    sample = Sample(0)
    note(sample, {"choices": [{"delta": {"role": "assistant", "content": ""}}]}, 0.1)
    note(sample, {"choices": [{"delta": {"reasoning_content": "hm"}}]}, 0.2)
    note(sample, {"choices": [{"delta": {"content": "yes"}}]}, 0.3)
    note(sample, {"choices": [{"delta": {}, "finish_reason": "stop"}]}, 0.4)
    note(sample, {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}, 0.5)
    assert (sample.chunk_times, sample.text, sample.error) == ([0.2, 0.3], "yes", None)
    assert (sample.prompt_tokens, sample.completion_tokens, sample.cached_tokens) == (5, 2, None)


def test_an_error_inside_a_stream_fails_the_request() -> None:
    sample = Sample(0)
    note(sample, {"choices": [{"delta": {"content": "ye"}}]}, 0.3)
    note(sample, {"error": {"message": "The engine failed.", "code": "engine_fault"}}, 0.4)
    assert sample.error == "The engine failed."
