"""A server says the same with drafts from anywhere as it says without, on every route."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.engine.scripted import Willing
from tests.live import Live, chunks, live, until
from tests.models.gguf_files import make, write_folder, write_gguf
from tests.tiny import CONFIGS
from treadle.config import Config
from treadle.engine.engine import Engine
from treadle.models import pairing
from treadle.models.catalogue import read_catalogue
from treadle.models.prepare import offer
from treadle.models.sources import KnownModel

CONTEXT = {"max_position_embeddings": 2048}
ENDLESS = {"0": -100}
COPY = "one two three four five six seven eight nine ten. " * 3
SCHEMA = {
    "type": "object",
    "properties": {"a_long_property_name": {"enum": ["x", "y"]}, "another_long_name": {"type": "boolean"}},
    "required": ["a_long_property_name", "another_long_name"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look_something_up", "parameters": SCHEMA}}
Asked = tuple[str, dict[str, Any]]


def user(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


BODIES: dict[str, Asked] = {
    "greedy": ("chat/completions", user(COPY) | {"temperature": 0, "max_tokens": 48, "logit_bias": ENDLESS}),
    "seeded": ("chat/completions", user(COPY) | {"seed": 3, "temperature": 0.7, "top_p": 0.9, "max_tokens": 40}),
    "choices": (
        "chat/completions",
        user("Go.") | {"n": 2, "seed": 5, "presence_penalty": 0.6, "repetition_penalty": 1.1, "max_tokens": 30},
    ),
    "schema": (
        "chat/completions",
        user("JSON.")
        | {
            "temperature": 0,
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        },
    ),
    "call": (
        "chat/completions",
        user("Call.") | {"temperature": 0, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    ),
    "scored": ("completions", {"prompt": COPY, "temperature": 0, "logprobs": 3, "max_tokens": 32, "echo": True}),
    "tokens": ("completions", {"prompt": [[7, 8, 9] * 8, [9, 8, 7] * 5], "seed": 1, "max_tokens": 24}),
    "message": ("messages", user(COPY) | {"model": "claude-x", "temperature": 0.5, "seed": 2, "max_tokens": 24}),
    "response": ("responses", {"input": COPY, "temperature": 0, "max_output_tokens": 24}),
}


def folders(top: Path) -> tuple[Path, Path]:
    """A model, and a small one that says the same: the further layers of the large one add nothing."""
    tokenizer = write_gguf(top / "tokenizer.gguf", make("llama", **CONTEXT))
    small, large = make("llama", **CONTEXT), make("llama", num_hidden_layers=13, **CONTEXT)
    large.weights |= small.weights
    for name, value in large.weights.items():
        if name not in small.weights and name.split(".")[-2] in ("o_proj", "down_proj"):
            large.weights[name] = np.zeros_like(value)
    return write_folder(top / "large", large, tokenizer), write_folder(top / "small", small, tokenizer)


def hybrid(top: Path, name: str) -> Path:
    tokenizer = write_gguf(top / "tokenizer.gguf", make("llama", **CONTEXT))
    kind = CONFIGS[name] | {"mamba_expand": 1}
    sizes = {"hidden_size": 32, "head_dim": 8, "num_hidden_layers": 4, "intermediate_size": 64, "attention_bias": False}
    return write_folder(top / name, make(kind["model_type"], **{**sizes, **kind, **CONTEXT}), tokenizer)


@pytest.fixture(autouse=True)
def willing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models gain nothing from drafts; here they are made all the same."""
    monkeypatch.setattr("treadle.speculate.speculator.Control", lambda **_: Willing())


@contextmanager
def serving(model: Path, **settings: Any) -> Iterator[Live]:
    config = Config(model=str(model), **settings)
    models = offer(config, read_catalogue(config.models_file))
    engine: Any = Engine(models.first, config, models.others, models.rules)
    with live(engine, model=config.model) as running:
        until(lambda: running.get("/health").json()["status"] != "loading", within_s=30)
        assert running.get("/health").status_code == 200, running.get("/health").text
        yield running


def post(server: Live, asked: Asked, **more: Any) -> Any:
    answer = httpx.post(f"{server.url}/v1/{asked[0]}", json=asked[1] | more, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def bare(value: Any) -> Any:
    """A reply without what differs from one to the next: ids, times, counts of drafts; scores are compared roughly."""
    if isinstance(value, Mapping):
        dropped = ("id", "created", "created_at", "completed_at", "system_fingerprint")
        return {k: bare(v) for k, v in value.items() if k not in dropped and "_prediction_" not in k}
    if isinstance(value, list):
        return [bare(item) for item in value]
    return pytest.approx(value, abs=1e-3) if isinstance(value, float) else value


def replies(server: Live, bodies: Mapping[str, Asked] = BODIES) -> dict[str, Any]:
    return {name: bare(post(server, asked).json()) for name, asked in bodies.items()}


def together(server: Live, bodies: Mapping[str, Asked] = BODIES) -> dict[str, Any]:
    with ThreadPoolExecutor(len(bodies)) as pool:
        found = pool.map(lambda asked: bare(post(server, asked).json()), bodies.values())
        return dict(zip(bodies, found, strict=True))


def streamed(server: Live) -> str:
    """The greedy reply by pieces, put together."""
    events = chunks(post(server, BODIES["greedy"], stream=True).text)
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])


def counts(server: Live) -> dict[str, Any]:
    """As they stand half a second later, because they are not told at every step."""
    time.sleep(0.5)
    found: dict[str, Any] = next(iter(server.get("/v1/stats").json()["speculation"].values()))
    return found


def written(server: Live) -> bool:
    """Whether the disk has got something; asked seldom, because a server writes when nobody asks for anything."""
    time.sleep(2)
    disk = server.get("/v1/cache").json()["disk"]
    return bool(disk["files"] and not disk["queued"])


def uncached(found: Any) -> Any:
    """Replies without what the prefix cache did for them."""
    counted = ("cached_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "input_tokens")
    if isinstance(found, Mapping):
        return {k: uncached(v) for k, v in found.items() if k not in counted}
    return [uncached(item) for item in found] if isinstance(found, list) else found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return folders(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def expected(pair: tuple[Path, Path]) -> dict[str, Any]:
    """What the server says without drafts."""
    with serving(pair[0], speculation="off") as server:
        assert server.get("/health").json()["speculation"] == {
            "sources": [],
            "draft_model": None,
            "why": "It is switched off.",
        }
        return replies(server) | {"stream": streamed(server)}


MODES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "lookup": lambda small: {"speculation": "lookup"},
    "draft": lambda small: {"speculation": "draft", "draft_model": str(small)},
    "both": lambda small: {"draft_model": str(small)},
    "auto": lambda small: {},
    "no cache": lambda small: {"draft_model": str(small), "cache_gb": 0},
}


@pytest.mark.parametrize("mode", MODES)
def test_replies_are_the_same_alone_together_and_streamed(
    pair: tuple[Path, Path], expected: dict[str, Any], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = [KnownModel("small", "", True, 1, pair[1])]
    monkeypatch.setattr(pairing, "known_models", lambda: known)
    with serving(pair[0], **MODES[mode](pair[1])) as server:
        told = server.get("/health").json()["speculation"]
        assert told == server.get("/v1/models").json()["data"][0]["speculation"]
        assert told["draft_model"] == (None if mode == "lookup" else "small") and "forced" in told["sources"]
        alone = replies(server) | {"stream": streamed(server)}
        assert alone == expected if mode != "no cache" else uncached(alone) == uncached(expected)
        assert uncached(together(server)) == uncached({name: expected[name] for name in BODIES})
        drafted, accepted = counts(server)["drafted"], counts(server)["accepted"]
        assert drafted["forced"] > 0
        assert (drafted["lookup"] > 0) == (mode != "draft")
        if mode == "draft":
            assert accepted["draft"] > 0.9 * drafted["draft"] > 0, "it says the same"


def test_a_stop_string_inside_an_accepted_run_ends_the_reply_there(pair: tuple[Path, Path], expected: Any) -> None:
    text = expected["greedy"]["choices"][0]["message"]["content"]
    starts = [i for i in range(4, len(text) - 4) if text.find(text[i : i + 2]) == i and text[i : i + 2].isascii()]
    assert len(starts) > 3
    with serving(pair[0], speculation="draft", draft_model=str(pair[1])) as server:
        for start in starts[:: max(1, len(starts) // 8)]:
            for stream in (False, True):
                stop = text[start : start + 2]
                answer = post(server, BODIES["greedy"], stop=[stop], stream=stream)
                if stream:
                    said = "".join(e["choices"][0]["delta"].get("content") or "" for e in chunks(answer.text))
                else:
                    said = answer.json()["choices"][0]["message"]["content"]
                    assert answer.json()["choices"][0]["finish_reason"] == "stop"
                assert said == text[:start]


def test_a_request_may_do_without_and_usage_tells_what_was_drafted(pair: tuple[Path, Path], expected: Any) -> None:
    with serving(pair[0], draft_model=str(pair[1])) as server:
        for name in ("greedy", "tokens", "message", "response"):
            without = post(server, BODIES[name], speculation=False).json()
            assert bare(without)["model"] == expected[name]["model"] and "_prediction_" not in json.dumps(without)
            assert uncached(bare(without)) == uncached(expected[name])
        assert sum(counts(server)["drafted"].values()) == 0
        usage = post(server, BODIES["greedy"]).json()["usage"]["completion_tokens_details"]
        assert usage["accepted_prediction_tokens"] > 10 and usage["rejected_prediction_tokens"] >= 0
        assert usage["reasoning_tokens"] == 0
        details = post(server, BODIES["response"]).json()["usage"]["output_tokens_details"]
        assert details["accepted_prediction_tokens"] > 0
        last = chunks(post(server, BODIES["greedy"], stream=True, stream_options={"include_usage": True}).text)[-1]
        assert last["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 10
        refused = server.post("/v1/chat/completions", BODIES["greedy"][1] | {"speculation": "yes"})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "speculation"


def test_what_was_drafted_is_counted_for_people_and_machines(pair: tuple[Path, Path]) -> None:
    with serving(pair[0], draft_model=str(pair[1])) as server:
        for _ in range(3):
            post(server, BODIES["greedy"])
        until(lambda: sum(counts(server)["accepted"].values()) > 0, within_s=10)
        found = counts(server)
        drafted, accepted = (sum(found[name].values()) for name in ("drafted", "accepted"))
        assert 0 < accepted <= drafted and found["rate"] == accepted / drafted
        assert sum(found["accepted_lengths"]) >= found["rounds"] > 0
        assert sum(i * n for i, n in enumerate(found["accepted_lengths"])) == accepted
        metrics = server.get("/metrics").text
        assert f'treadle_speculation_rounds_total{{model="large"}} {float(found["rounds"])}' in metrics
        assert 'treadle_speculation_accepted_tokens_total{model="large",source="lookup"}' in metrics
        for name in ("drafted", "accepted"):
            assert f'treadle_{name}_tokens_total{{model="large"}} {float(sum(found[name].values()))}' in metrics


def test_packed_rows_say_the_same_with_drafts(pair: tuple[Path, Path]) -> None:
    settings = {"kv_bits": "8", "kv_recent": 16}
    with serving(pair[0], speculation="off", **settings) as server:
        plain = replies(server)
    with serving(pair[0], draft_model=str(pair[1]), **settings) as server:
        assert replies(server) == plain
        assert uncached(together(server)) == uncached(plain)


@pytest.mark.parametrize("name", ["delta", "mamba"])
def test_recurrent_models_say_the_same_with_lookup(name: str, tmp_path: Path) -> None:
    model = hybrid(tmp_path, name)
    with serving(model, speculation="off") as server:
        plain = replies(server) | {"stream": streamed(server)}
    with serving(model) as server:
        assert replies(server) | {"stream": streamed(server)} == plain
        assert uncached(together(server)) == uncached({body: plain[body] for body in BODIES})
        assert counts(server)["drafted"]["lookup"] > 0 and counts(server)["rewinds"] > 0


@pytest.mark.parametrize("name", ["large", "delta"])
def test_prefixes_from_the_disk_work_with_drafts(name: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    model = pair[0] if name == "large" else hybrid(tmp_path, name)
    draft = {"draft_model": str(pair[1])} if name == "large" else {}
    long = ("chat/completions", user(COPY * 3) | {"temperature": 0, "max_tokens": 40, "logit_bias": ENDLESS})
    settings = {"cache_dir": str(tmp_path / "cache"), "cache_min_tokens": 16, **draft}
    with serving(model, speculation="off") as server:
        truth = post(server, long).json()["choices"]
    with serving(model, **settings) as server:
        first = post(server, long).json()
        until(lambda: written(server), within_s=30)
    with serving(model, **settings) as server:
        second = post(server, long).json()
        again = post(server, long).json()
    assert first["choices"] == second["choices"] == again["choices"] == truth
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    if draft:
        assert second["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
