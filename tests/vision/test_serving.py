"""A real server with a tiny seeing model: images over HTTP in the shapes of all protocols."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from tests.fakes_engine import FakeEngine
from tests.live import Live, live, until
from tests.vision.families import photo
from tests.vision.folders import write_folder
from treadle.config import Config
from treadle.engine.engine import Engine
from treadle.models.load import load_model
from treadle.models.sources import resolve

CHAT, ANTHROPIC, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def encoded(seed: int, kind: str = "PNG", **size: int) -> str:
    buffer = BytesIO()
    photo(seed, **size).save(buffer, kind)
    return base64.b64encode(buffer.getvalue()).decode()


def uri(seed: int, **size: int) -> str:
    return f"data:image/png;base64,{encoded(seed, **size)}"


def image(seed: int, **size: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": uri(seed, **size), "detail": "auto"}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def asked(*content: Any, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": list(content)}]
    return {"messages": messages, "temperature": 0, "max_tokens": 8, **more}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder: Path = write_folder(tmp_path_factory.mktemp("models") / "qwen", "qwen2_vl", max_position_embeddings=2048)
    config = Config(cache_gb=0.1)
    engine = Engine(lambda: load_model(resolve(str(folder)), None), config)
    with live(engine) as running:  # type: ignore[arg-type]
        until(lambda: engine.state != "loading", 60)
        assert engine.state == "ready", engine.failure
        yield running


def reply(server: Live, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    response = server.post(CHAT, body)
    assert response.status_code == 200, response.text
    made = response.json()
    return made["choices"][0]["message"]["content"], made["usage"]


def test_what_a_model_can_see_is_told(server: Live) -> None:
    (entry,) = server.get("/v1/models").json()["data"]
    assert "images" in entry["capabilities"]
    assert entry["vision"] == {
        "family": "qwen2_vl",
        "works": True,
        "why": "Logits with an image equal those of mlx-vlm.",
    }


def test_the_text_depends_on_the_picture_and_the_same_one_is_cached(server: Live) -> None:
    first, _ = reply(server, asked(text("What is it?"), image(1)))
    second, _ = reply(server, asked(text("What is it?"), image(2)))
    again, usage = reply(server, asked(text("What is it?"), image(1)))
    assert first == again != second
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    times = [record["vision_s"] for record in server.get("/v1/stats").json()["finished"][-3:]]
    assert times[0] > 0 and times[1] > 0 and times[2] == 0


def test_the_same_pixels_in_another_file_format_are_the_same_picture(server: Live) -> None:
    bmp = {"type": "image_url", "image_url": f"data:image/x-ms-bmp;base64,{encoded(3, 'BMP')}"}
    first, _ = reply(server, asked(image(3), text("?")))
    second, usage = reply(server, asked(bmp, text("?")))
    assert first == second
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


def test_all_protocols_ask_the_same(server: Live) -> None:
    chat, usage = reply(server, asked(text("Look:"), image(4), image(5)))
    blocks = [text("Look:"), *({"type": "image", "source": {"type": "base64", "media_type": "image/png",
                                                            "data": encoded(n)}} for n in (4, 5))]  # fmt: skip
    message = server.post(ANTHROPIC, asked(*blocks) | {"model": "claude-x"}).json()
    parts = [{"type": "input_text", "text": "Look:"}, *({"type": "input_image", "image_url": uri(n)} for n in (4, 5))]
    body = {"input": [{"role": "user", "content": parts}], "temperature": 0, "max_output_tokens": 8}
    response = server.post(RESPONSES, body).json()
    assert message["content"][0]["text"] == chat
    assert response["output"][-1]["content"][0]["text"] == chat
    assert message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"] == usage["prompt_tokens"]
    counted = server.post(f"{ANTHROPIC}/count_tokens", {"messages": asked(*blocks)["messages"], "model": "claude-x"})
    assert counted.json() == {"input_tokens": usage["prompt_tokens"]}
    ids = server.post("/v1/tokenize", {"messages": asked(text("Look:"), image(4), image(5))["messages"]}).json()
    assert ids["count"] == usage["prompt_tokens"]


def test_a_tool_result_shows_its_picture_in_both_protocols(server: Live) -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    history = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": "", "tool_calls": [call]}]

    def chat(seed: int) -> str:
        shown = {"role": "tool", "tool_call_id": "abcdefghi", "content": [text("Seen:"), image(seed)]}
        return reply(server, {"messages": [*history, shown], "tools": [TOOL], "temperature": 0, "max_tokens": 8})[0]

    def anthropic(seed: int) -> str:
        source = {"type": "base64", "media_type": "image/png", "data": encoded(seed)}
        result = {"type": "tool_result", "tool_use_id": "abcdefghi",
                  "content": [text("Seen:"), {"type": "image", "source": source}]}  # fmt: skip
        messages = [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "abcdefghi", "name": "look", "input": {}}]},
            {"role": "user", "content": [result]},
        ]
        tools = [{"name": "look", "input_schema": {"type": "object"}}]
        body = {"messages": messages, "tools": tools, "temperature": 0, "max_tokens": 8, "model": "claude-x"}
        return str(server.post(ANTHROPIC, body).json()["content"][0]["text"])

    assert chat(6) != chat(7)
    assert anthropic(6) == chat(6)


def test_the_output_of_a_function_shows_its_picture_and_the_next_turn_remembers_it(server: Live) -> None:
    seen = [{"type": "input_text", "text": "Seen:"}, {"type": "input_image", "image_url": uri(10)}]
    items = [
        {"role": "user", "content": "Look."},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
    ]
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]

    def ask(output: Any) -> dict[str, Any]:
        body = {"input": [*items, {"type": "function_call_output", "call_id": "c1", "output": output}], "tools": tools}
        made: dict[str, Any] = server.post(RESPONSES, body | {"temperature": 0, "max_output_tokens": 8}).json()
        return made

    blind, first, again = ask(seen[:1]), ask(seen), ask(seen)
    length = first["usage"]["input_tokens"]
    assert length > blind["usage"]["input_tokens"] + 4
    assert again["usage"]["input_tokens_details"]["cached_tokens"] == length - 1
    assert again["output"][-1]["content"] == first["output"][-1]["content"]
    more = {"previous_response_id": first["id"], "input": "And?", "temperature": 0, "max_output_tokens": 8}
    later = server.post(RESPONSES, more | {"tools": tools}).json()
    assert later["usage"]["input_tokens_details"]["cached_tokens"] >= length - 1


def test_a_later_turn_of_text_computes_only_itself(server: Live) -> None:
    question = [text("Who?"), image(8)]
    answer, usage = reply(server, asked(*question))
    messages = [*asked(*question)["messages"], {"role": "assistant", "content": answer}]
    _, later = reply(server, asked() | {"messages": [*messages, {"role": "user", "content": "Sure?"}]})
    assert later["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 1


def test_detail_low_takes_fewer_tokens(server: Live) -> None:
    high, low = image(9, width=1200, height=900), image(9, width=1200, height=900)
    low["image_url"]["detail"] = "low"
    high_usage, low_usage = (reply(server, asked(part))[1] for part in (high, low))
    assert low_usage["prompt_tokens"] <= high_usage["prompt_tokens"]


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,aGFsbG8="}}, "cannot be read"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,%%"}}, "not base64"),
        ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "--allow-image-urls"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "files are not read"),
        ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "files are not read"),
        ({"type": "image_url", "image_url": {"url": uri(1), "detail": "huge"}}, "detail"),
        ({"type": "image_url", "image_url": {}}, "must have a URL"),
        (text("a literal <image> in the text"), ""),
    ],
)
def test_what_cannot_be_shown_is_refused_by_name(server: Live, part: dict[str, Any], reason: str) -> None:
    response = server.post(CHAT, asked(text("x"), part))
    if not reason:
        assert response.status_code == 200  # no image: the marker is a token like any other
        return
    assert response.status_code == 400
    assert reason in response.json()["error"]["message"]
    assert response.json()["error"]["param"].startswith("messages[0].content[1]")


def test_a_text_with_the_marker_beside_an_image_is_refused(server: Live) -> None:
    response = server.post(CHAT, asked(text("an <image> and"), image(1)))
    assert response.status_code == 400
    assert "must not contain '<image>'" in response.json()["error"]["message"]


def test_images_of_the_system_message_are_refused(server: Live) -> None:
    messages = [{"role": "system", "content": [image(1)]}, {"role": "user", "content": "x"}]
    response = server.post(CHAT, asked() | {"messages": messages})
    assert response.status_code == 400
    assert "Images belong to messages of user and tool" in response.json()["error"]["message"]


def test_a_model_of_text_alone_refuses_images_by_name() -> None:
    with live(FakeEngine()) as blind:
        response = blind.post(CHAT, asked(image(1)))
        assert response.status_code == 400
        assert response.json()["error"]["message"] == "This model cannot see images."
        (entry,) = blind.get("/v1/models").json()["data"]
        assert entry["vision"] is None and "images" not in entry["capabilities"]


def test_streams_and_batches_of_pictures_and_text_say_what_each_says_alone(server: Live) -> None:
    bodies = [asked(text("Tell me"), image(20 + n), cache_salt="one") for n in range(3)] + [asked(text("Hello"))]
    alone = [reply(server, body)[0] for body in bodies]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda body: reply(server, body | {"cache_salt": "two"})[0], bodies))
    assert together == alone
