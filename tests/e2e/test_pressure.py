"""A server whose memory is too small for all its streams at once: everybody gets text, some later; the limit holds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.served import Served, served
from tests.live import chunks
from tests.models.gguf_files import make, write_folder, write_gguf
from treadle.bench.pressure import Sampler

STREAMS = 8
PROMPT, REPLY = 500, 240
LIMIT_MB = 110  # the rows of all streams, exact, take 190 MB


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    top = tmp_path_factory.mktemp("deep")
    sizes = {"num_hidden_layers": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128}
    model = make("llama", max_position_embeddings=16384, **sizes)
    folder = write_folder(top / "deep", model, write_gguf(top / "t.gguf", make("llama")))
    # Rows stay exact, because which format is quicker, and so how much they take, would be measured anew in each run.
    options = {"--memory-limit-gb": LIMIT_MB / 1000, "--cache-gb": 0.05, "--kv-bits": 16}
    with served(str(folder), *(str(word) for option in options.items() for word in option)) as running:
        yield running


def share_in_use(server: Served) -> float:
    """Of the limit, by the server's own count."""
    memory = httpx.get(server.url + "/v1/stats", timeout=30).json()["memory"]
    return float(memory["active_bytes"] / memory["limit_bytes"])


def stream(server: Served, i: int) -> list[dict[str, Any]]:
    body = {
        "prompt": [(7 * i + 11 * j) % 200 + 20 for j in range(PROMPT)],
        "max_tokens": REPLY,
        "temperature": 0,
        "logit_bias": {"0": -100, "2": -100},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = httpx.post(server.url + "/v1/completions", json=body, timeout=280)
    assert answer.status_code == 200, answer.text
    return chunks(answer.text)


def test_streams_that_need_more_than_there_is_all_get_text(server: Served) -> None:
    with Sampler(lambda: share_in_use(server)) as seen, ThreadPoolExecutor(STREAMS) as pool:
        replies = list(pool.map(lambda i: stream(server, i), range(STREAMS)))
    for reply in replies:
        assert "".join(c["choices"][0]["text"] for c in reply if c["choices"])
        assert [c["choices"][0]["finish_reason"] for c in reply if c["choices"]][-1] == "length"
        assert reply[-1]["usage"]["completion_tokens"] > 0
    assert seen.most <= 1.0, "the limit held"
    pressure = httpx.get(server.url + "/v1/stats", timeout=30).json()["pressure"]
    if not any(pressure["actions"].values()):
        pytest.skip("the machine was so busy elsewhere that the streams came one after another")


def test_what_can_never_fit_is_refused_at_once(server: Served) -> None:
    began = time.monotonic()
    body = {"prompt": [30] * 16000, "max_tokens": 300, "temperature": 0}
    answer = httpx.post(server.url + "/v1/completions", json=body, timeout=60)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "insufficient_memory", answer.text
    assert time.monotonic() - began < 30
    assert server.idle()
