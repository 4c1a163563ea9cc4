"""Three real models behind the real server, with memory for two."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest

from tests.live import Live, chunks, data_lines, live, until
from tests.models.gguf_files import make, write_folder, write_gguf
from treadle.config import Config
from treadle.engine.engine import Engine
from treadle.models.catalogue import read_catalogue
from treadle.models.prepare import offer

MB = 10**6
NAMES = ("small", "middle", "large")
SAY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
ENDLESS = {"0": -100, "2": -100}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models of 9 to 10 MB, and what the server is told of them."""
    top = tmp_path_factory.mktemp("models")
    tokenizer = write_gguf(top / "tokenizer.gguf", make("llama"))
    for i, name in enumerate(NAMES):
        sizes = {"hidden_size": 256, "intermediate_size": 1400 + 50 * i}
        write_folder(top / name, make("llama", **sizes), tokenizer)
    (top / "broken").mkdir()
    (top / "broken" / "config.json").write_text("{}")
    entries = [f'[models.{name}]\nsource = "{top / name}"\naliases = ["{name}-too"]\n' for name in (*NAMES, "broken")]
    (top / "models.toml").write_text("\n".join(entries) + '[rules]\n"claude-*" = "middle"\n"gpt-*" = "large"\n')
    return top


@contextmanager
def serving(folders: Path, **settings: Any) -> Iterator[Live]:
    """A server that has loaded `small`."""
    given = {"model": "small", "models_file": str(folders / "models.toml"), "memory_limit_gb": 0.026, "cache_gb": 0.002}
    config = Config(**given | {"keepalive_s": 0.05} | settings)
    models = offer(config, read_catalogue(config.models_file))
    engine: Any = Engine(models.first, config, models.others, models.rules)
    with live(engine, **{key: getattr(config, key) for key in ("model", "keepalive_s")}) as running:
        until(lambda: running.get("/health").status_code == 200, within_s=30)
        yield running


def states(server: Live) -> dict[str, str]:
    return {entry["id"]: entry["state"] for entry in server.get("/v1/models").json()["data"]}


def loaded(server: Live) -> set[str]:
    return {name for name, state in states(server).items() if state == "ready"}


def ask(server: Live, kind: int, model: str, **fields: Any) -> str:
    """One request by one of the routes; the model that answered."""
    body = SAY | {"model": model} | fields
    route = ("/v1/chat/completions", "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")[kind]
    if kind == 1:
        body["stream"] = True
    elif kind == 2:
        body = {"model": model, "prompt": "hi", "max_tokens": 4}
    elif kind == 4:
        body = {"model": model, "input": "hi", "max_output_tokens": 16}
    response = httpx.post(server.url + route, json=body, timeout=60)
    assert response.status_code == 200, response.text
    return str(chunks(response.text)[-1]["model"] if kind == 1 else response.json()["model"])


def test_300_mixed_requests_to_three_models_are_all_answered(folders: Path) -> None:
    rng = random.Random(7)
    with serving(folders) as server, ThreadPoolExecutor(6) as clients:
        for many in (1, 2, 2, 3, 2, 2):  # people work with one or two models for a while
            names = rng.sample(NAMES, many)
            asked = [(rng.randrange(5), rng.choice(names)) for _ in range(50)]
            answered = list(clients.map(lambda one: ask(server, *one), asked))
            assert answered == [name for _, name in asked]
            assert len(loaded(server)) <= 2


def test_the_least_recently_used_model_goes(folders: Path) -> None:
    with serving(folders) as server:
        for name, wanted in [
            ("middle", {"small", "middle"}),
            ("small", {"small", "middle"}),
            ("large", {"small", "large"}),
            ("middle-too", {"middle", "large"}),
        ]:
            ask(server, 0, name)
            assert loaded(server) == wanted


def test_memory_is_back_after_an_unload(folders: Path) -> None:
    with serving(folders) as server:
        before = mx.get_active_memory()
        ask(server, 0, "large")
        assert mx.get_active_memory() > before + 8 * MB
        entry = server.post("/v1/models/large/unload").json()
        assert (entry["id"], entry["state"], entry["bytes"]) == ("large", "unloaded", 0)
        until(lambda: mx.get_active_memory() < before + MB, within_s=5)
        entry = server.post("/v1/models/large/load").json()
        assert (entry["state"], entry["context_length"]) == ("ready", 256) and entry["bytes"] > 8 * MB
        assert "chat" in entry["capabilities"]
        assert server.post("/v1/models/huge/load").status_code == 404
        assert server.post("/v1/models/huge/unload").status_code == 404


def test_who_asks_for_a_loading_model_waits_with_signs_of_life(folders: Path) -> None:
    with serving(folders, keepalive_s=0.01) as server, ThreadPoolExecutor(8) as clients:
        body = SAY | {"model": "middle", "stream": True}
        answers = list(clients.map(lambda _: server.post("/v1/chat/completions", body), range(8)))
        for answer in answers:
            assert answer.status_code == 200 and data_lines(answer.text)[-1] == "[DONE]"
            assert chunks(answer.text)[-1]["choices"][0]["finish_reason"] is not None
        assert any(answer.text.startswith(": keep-alive") for answer in answers)


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_cannot_be_loaded_is_a_503_with_the_reason(folders: Path, route: str, stream: bool) -> None:
    with serving(folders, keepalive_s=5.0) as server:
        body = {"model": "broken", "stream": stream, "max_tokens": 4, "messages": SAY["messages"]}
        if route == "/v1/responses":
            body = {"model": "broken", "stream": stream, "input": "hi"}
        for _ in range(2):  # the second one is told at once
            answer = server.post(route, body)
            error = answer.json()["error"]
            assert answer.status_code == 503 and "has no *.safetensors weights" in error["message"]
            assert error.get("code") == (None if route == "/v1/messages" else "model_load_failed")
        assert states(server)["broken"] == "failed"
        ask(server, 0, "small")


@pytest.mark.parametrize("kind", [0, 1, 2, 3, 4])
def test_rules_and_aliases_hold_on_every_route(folders: Path, kind: int) -> None:
    with serving(folders, memory_limit_gb=0.1) as server:
        assert ask(server, kind, "claude-sonnet-4") == "middle"
        assert ask(server, kind, "gpt-4o") == "large"
        assert ask(server, kind, "small-too") == "small"
        assert server.post("/v1/chat/completions", SAY | {"model": "llama"}).status_code == 404


def test_an_unload_does_not_cut_a_stream(folders: Path) -> None:
    with serving(folders) as server, ThreadPoolExecutor(1) as other:
        body = SAY | {"max_tokens": 150, "stream": True, "logit_bias": ENDLESS}
        with httpx.stream("POST", server.url + "/v1/chat/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            for _ in range(4):
                next(lines)
            unloading = other.submit(server.post, "/v1/models/small/unload")
            text = "\n".join(lines)
        assert chunks(text)[-1]["choices"][0]["finish_reason"] == "length"
        assert unloading.result(30).json()["state"] == "unloaded"


def test_an_idle_model_is_unloaded_and_loaded_again_when_asked_for(folders: Path) -> None:
    with serving(folders, model_idle_s=0.2) as server:
        until(lambda: not loaded(server))
        assert server.get("/health").json()["status"] == "ready"
        assert server.get("/v1/models/small").json()["context_length"] == 256
        assert server.post("/v1/tokenize", {"prompt": "hi"}).json()["count"] > 0
        began = time.monotonic()
        assert ask(server, 3, "small") == "small"
        assert time.monotonic() - began < 30
