"""What real clients sent, recorded from each and with their texts taken out, is answered in their own protocol.

`tests/assets/clients` has one file per kind of request: the client with its version, the path, the headers of the
protocol, and the body.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes_engine import FakeEngine, FakeModel, Script, say
from tests.live import Live, data_lines, live
from treadle.types import Request

RECORDED = {
    path.stem: json.loads(path.read_text())
    for path in sorted((Path(__file__).parents[1] / "assets" / "clients").glob("*.json"))
}
CALLS = {
    "claude-code-turn": ("Bash", {"command": "ls"}),
    "codex-turn": ("exec_command", {"cmd": "ls"}),
    "continue-turn": ("Bash", {"command": "ls"}),
    "opencode-turn": ("bash", {"command": "ls"}),
    "cline-turn": ("run_commands", {"commands": ["ls"]}),
    "strands-openai": ("weather2", {"city": "Paris"}),
    "strands-anthropic": ("weather2", {"city": "Paris"}),
    "smolagents-tools": ("weather", {"city": "Paris"}),
}
ENDS = {"/v1/messages": "message_stop", "/v1/responses": "response.completed"}
every = pytest.mark.parametrize("recorded", RECORDED.values(), ids=RECORDED.keys())


class Plan:
    """What the model says next."""

    script: Script

    def __call__(self, request: Request) -> Script:
        return self.script


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Plan()


@pytest.fixture(scope="module")
def server(plan: Plan) -> Iterator[Live]:
    with live(FakeEngine(plan, caps=replace(FakeModel().caps, context_length=200_000))) as running:
        yield running


@every
def test_a_recorded_request_is_answered_streamed_and_not(plan: Plan, server: Live, recorded: dict[str, Any]) -> None:
    plan.script = say("Well, hello.")
    texts = [text(recorded["path"], send(server, recorded, stream)) for stream in (False, True)]
    assert texts == ["Well, hello."] * 2


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_reaches_a_recorded_client(plan: Plan, server: Live, name: str, stream: bool) -> None:
    function, arguments = CALLS[name]
    call = {"name": function, "arguments": arguments}
    plan.script = say(f"I look.\n<tool_call>\n{json.dumps(call)}\n</tool_call>", per_step=3)
    recorded = RECORDED[name]
    answer = send(server, recorded, stream)
    assert calls(recorded["path"], answer) == [(function, arguments)]
    assert text(recorded["path"], answer) == "I look."


def send(server: Live, recorded: dict[str, Any], stream: bool) -> httpx.Response:
    """The request in its own path, headers and body, but for `stream`."""
    body = {**recorded["body"], "stream": stream}
    if not stream:
        body.pop("stream_options", None)
    answer = server.post(recorded["path"], body, headers=recorded["headers"])
    assert answer.status_code == 200, answer.text
    return answer


def events(path: str, answer: httpx.Response) -> list[dict[str, Any]]:
    """The payloads of a stream, which must end as its protocol says."""
    lines = data_lines(answer.text)
    end = ENDS.get(path.partition("?")[0])
    if end is None:
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]
    made: list[dict[str, Any]] = [json.loads(line) for line in lines]
    assert made[-1]["type"] == end
    return made


def whole(path: str, answer: httpx.Response) -> dict[str, Any]:
    """The answer in one piece: of a stream, put together as clients do it."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return dict(answer.json())
    made = events(path, answer)
    if path.startswith("/v1/responses"):
        return dict(made[-1]["response"])
    return blocks(made) if path.startswith("/v1/messages") else choice(made)


def blocks(made: list[dict[str, Any]]) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    for event in made:
        if event["type"] == "content_block_start":
            content.append({**event["content_block"], "partial": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            content[event["index"]]["partial"] += delta.get("text", "") + delta.get("partial_json", "")
    for block in content:
        partial = block.pop("partial")
        block |= {"input": json.loads(partial)} if block["type"] == "tool_use" else {"text": partial}
    return {"content": content}


def choice(made: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"content": "", "tool_calls": []}
    legacy = ""
    for choices in (chunk["choices"] for chunk in made if chunk["choices"]):
        delta = choices[0].get("delta", {})
        legacy += choices[0].get("text", "")
        message["content"] += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                message["tool_calls"].append({"function": {"name": call["function"]["name"], "arguments": ""}})
            message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"].get("arguments", "")
    return {"choices": [{"message": message, "text": legacy}]}


def text(path: str, answer: httpx.Response) -> str:
    """What the model said to the user."""
    found = whole(path, answer)
    if path.startswith("/v1/messages"):
        return "".join(block["text"] for block in found["content"] if block["type"] == "text")
    if path.startswith("/v1/responses"):
        return "".join(item["content"][0]["text"] for item in found["output"] if item["type"] == "message")
    first = found["choices"][0]
    return str(first["text"] if path == "/v1/completions" else first["message"]["content"])


def calls(path: str, answer: httpx.Response) -> list[tuple[str, Any]]:
    """The names and arguments of the calls."""
    found = whole(path, answer)
    if path.startswith("/v1/messages"):
        return [(block["name"], block["input"]) for block in found["content"] if block["type"] == "tool_use"]
    if path.startswith("/v1/responses"):
        items = [item for item in found["output"] if item["type"] == "function_call"]
        return [(item["name"], json.loads(item["arguments"])) for item in items]
    made = [call["function"] for call in found["choices"][0]["message"]["tool_calls"]]
    return [(call["name"], json.loads(call["arguments"])) for call in made]
