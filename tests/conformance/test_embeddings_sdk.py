"""Embeddings by the official SDK, from real servers with tiny embedding models of two families."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest
from numpy.typing import NDArray
from openai import OpenAI

from tests.live import Live, live, until
from tests.models.embedders import LAST, MEAN, Embedder, embedder
from treadle.config import Config
from treadle.engine.engine import Engine
from treadle.models.load import load_model
from treadle.models.sources import resolve
from treadle.prompt.tokenise import encode

TEXTS = ["the cat", "a", "the quick brown fox jumps over the lazy dog and goes on and on", "x = 1"]
Served = tuple[Live, Embedder, Any]


def serving(made: Embedder, **config: Any) -> Iterator[Served]:
    engine = Engine(lambda: load_model(resolve(str(made.folder)), None), Config(cache_gb=0.1, **config))
    with live(engine) as running:  # type: ignore[arg-type]
        until(lambda: engine.state != "loading", 60)
        assert engine.state == "ready", engine.failure
        yield running, made, engine.model.tokenizer


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Last-token pooling, an output layer, and embeddings that may be cut, as Qwen3-Embedding has."""
    folder = tmp_path_factory.mktemp("models") / "tiny-qwen3-embedding"
    made = embedder(folder, "qwen3", LAST, architectures=["Qwen3ForCausalLM"])
    yield from serving(made, prefill_chunk=16)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Mean pooling, and a class without an output layer."""
    made = embedder(tmp_path_factory.mktemp("models") / "mean", "llama", MEAN, trunk=True, architectures=["LlamaModel"])
    yield from serving(made, prefill_chunk=16)


def client(live: Live) -> OpenAI:
    return OpenAI(base_url=live.url + "/v1", api_key="unused", max_retries=0, timeout=60)


def embedded(live: Live, input: Any, **more: Any) -> list[NDArray[np.float64]]:
    made = client(live).embeddings.create(model=live.get("/v1/models").json()["data"][0]["id"], input=input, **more)
    assert [item.index for item in made.data] == list(range(len(made.data)))
    return [np.array(item.embedding) for item in made.data]


def ids_of(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = encode(tokenizer, text, add_special_tokens=True).tolist()
    return ids


def test_the_last_state_is_the_embedding_where_the_folder_says_so(qwen: Served) -> None:
    server, made, tokenizer = qwen
    for text, found in zip(TEXTS, embedded(server, TEXTS), strict=True):
        np.testing.assert_allclose(found, made.last(ids_of(tokenizer, text)), atol=1e-5)


def test_the_mean_of_all_states_is_the_embedding_where_the_folder_says_so(llama: Served) -> None:
    server, made, tokenizer = llama
    for text, found in zip(TEXTS, embedded(server, TEXTS), strict=True):
        np.testing.assert_allclose(found, made.mean(ids_of(tokenizer, text)), atol=1e-5)


def test_a_text_of_many_chunks_is_pooled_as_a_whole(llama: Served, qwen: Served) -> None:
    text = " ".join(TEXTS) * 2
    for server, expected in ((llama, llama[1].mean), (qwen, qwen[1].last)):
        ids = ids_of(server[2], text)
        assert len(ids) > 3 * 16
        np.testing.assert_allclose(embedded(server[0], text)[0], expected(ids), atol=1e-5)


def test_a_text_in_a_batch_has_the_embedding_that_it_has_alone(llama: Served) -> None:
    server = llama[0]
    for text, together in zip(TEXTS, embedded(server, TEXTS), strict=True):
        np.testing.assert_array_equal(together, embedded(server, text)[0])


def test_the_same_text_twice_is_not_helped_by_the_prefix_cache(llama: Served) -> None:
    first, second = embedded(llama[0], [TEXTS[2], TEXTS[2]])
    np.testing.assert_array_equal(first, second)


def test_token_ids_are_taken_as_they_are(llama: Served) -> None:
    server, made, _ = llama
    np.testing.assert_allclose(embedded(server, [5, 9, 12])[0], made.mean([5, 9, 12]), atol=1e-5)
    lists = [[5, 9, 12], [3]]
    for ids, found in zip(lists, embedded(server, lists), strict=True):
        np.testing.assert_allclose(found, made.mean(ids), atol=1e-5)


def test_floats_and_base64_are_the_same_numbers(llama: Served) -> None:
    server = llama[0]
    plain = server.post("/v1/embeddings", {"input": "the cat", "encoding_format": "float"}).json()
    packed = server.post("/v1/embeddings", {"input": "the cat", "encoding_format": "base64"}).json()
    numbers = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4")
    np.testing.assert_array_equal(numbers, np.array(plain["data"][0]["embedding"], np.float32))
    assert plain["object"] == "list" and plain["data"][0]["object"] == "embedding"
    assert np.linalg.norm(numbers) == pytest.approx(1, abs=1e-6)


def test_usage_counts_the_tokens_of_all_inputs(llama: Served) -> None:
    server, _, tokenizer = llama
    usage = server.post("/v1/embeddings", {"input": TEXTS}).json()["usage"]
    total = sum(len(ids_of(tokenizer, text)) for text in TEXTS)
    assert usage == {"prompt_tokens": total, "total_tokens": total}


def test_dimensions_cut_and_bring_to_length_one_where_the_model_allows(qwen: Served) -> None:
    whole, short = embedded(qwen[0], "the cat")[0], embedded(qwen[0], "the cat", dimensions=40)[0]
    np.testing.assert_allclose(short, whole[:40] / np.linalg.norm(whole[:40]), atol=1e-6)
    assert len(embedded(qwen[0], "the cat", dimensions=64)[0]) == 64


@pytest.mark.parametrize("dimensions", [31, 65, 0, -1, True, 40.5, "40"])
def test_other_dimensions_are_a_400(qwen: Served, dimensions: Any) -> None:
    error = qwen[0].post("/v1/embeddings", {"input": "a", "dimensions": dimensions})
    assert (error.status_code, error.json()["error"]["param"]) == (400, "dimensions")


def test_dimensions_of_a_model_that_says_nothing_of_them_are_a_400(llama: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        embedded(llama[0], "a", dimensions=32)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": ["a", [1]], "encoding_format": "hex"}, "encoding_format"),
        ({"input": [[]]}, "input"),
        ({"input": [True]}, "input"),
        ({"input": [1.5]}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [[1], [10**6]]}, "input[1]"),
        ({"input": [10**30]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a " * 2000}, "input"),
        ({"input": ["a", "a " * 2000]}, "input[1]"),
        ({"input": "a", "stream": True}, "stream"),
        ({"input": "a", "timeout": True}, "timeout"),
    ],
)
def test_a_bad_body_is_a_400_that_names_the_field(llama: Served, body: Any, param: str) -> None:
    response = llama[0].post("/v1/embeddings", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_more_tokens_in_all_than_one_request_may_have_are_a_400(llama: Served) -> None:
    response = llama[0].post("/v1/embeddings", {"input": [[1] * 250] * 1300})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "input")
    assert "300000" in response.json()["error"]["message"]


def test_a_text_may_fill_the_whole_context(llama: Served) -> None:
    server, made, _ = llama
    ids = [7 + i % 50 for i in range(256)]
    np.testing.assert_allclose(embedded(server, ids)[0], made.mean(ids), atol=1e-5)


def test_the_models_say_what_they_can(qwen: Served, llama: Served) -> None:
    both, only = (server[0].get("/v1/models").json()["data"][0] for server in (qwen, llama))
    assert "embeddings" in both["capabilities"] and "chat" in both["capabilities"]
    assert only["capabilities"] == ["embeddings"]
    assert (both["embedding"]["pooling"], only["embedding"]["pooling"]) == ("last", "mean")
    assert (both["embedding"]["dimensions"], both["embedding"]["least_dimensions"]) == (64, 32)


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}),
    ],
)
def test_a_model_without_an_output_layer_refuses_to_write(llama: Served, route: str, body: Any) -> None:
    response = llama[0].post(route, body)
    assert response.status_code == 400
    assert "/v1/embeddings" in response.json()["error"]["message"]


def test_a_model_with_an_output_layer_writes_beside_its_embeddings(qwen: Served) -> None:
    server = qwen[0]
    alone = embedded(server, TEXTS)
    with ThreadPoolExecutor(2) as pool:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 60, "temperature": 0}
        chat = pool.submit(server.post, "/v1/chat/completions", body)
        beside = pool.submit(embedded, server, TEXTS)
    assert chat.result().status_code == 200
    for one, other in zip(alone, beside.result(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_embeddings_are_counted_like_other_prompts(llama: Served) -> None:
    server = llama[0]
    before = server.get("/v1/stats").json()["totals"]
    usage = server.post("/v1/embeddings", {"input": TEXTS}).json()["usage"]
    after = server.get("/v1/stats").json()["totals"]
    assert after["submitted"] - before["submitted"] == len(TEXTS)
    assert after["finished"]["stop"] - before["finished"]["stop"] == len(TEXTS)
    grown = {name: after["tokens"][name] - before["tokens"][name] for name in after["tokens"]}
    assert grown["computed"] == usage["prompt_tokens"]
    assert not any(count for name, count in grown.items() if name not in ("prompt", "computed"))


def test_what_nobody_waits_for_is_ended(llama: Served) -> None:
    server = llama[0]
    with server.send("/v1/embeddings", {"input": [[5] * 250] * 1000}):
        until(lambda: server.get("/health").json()["running"] > 0, 10)
    until(lambda: server.get("/health").json()["running"] == 0, 5)


def test_a_time_limit_is_told(llama: Served) -> None:
    response = llama[0].post("/v1/embeddings", {"input": [[5] * 250] * 1000, "timeout": 0.2})
    assert (response.status_code, response.json()["error"]["param"]) == (504, "timeout")
