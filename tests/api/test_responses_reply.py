"""A stream of events and the one object say the same, for any order of thinking, text and calls."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from treadle.api.responses_reply import Making, ResponseCollector, ResponseHead, ResponseWriter
from treadle.errors import EngineFault, MemoryRefused, QueueFull
from treadle.output.stream import Event, Kind, ToolDelta
from treadle.types import Finish, Usage

HEAD = ResponseHead("resp_1", 7, "fake")
USAGE = Usage(5, 3, cached_tokens=2)

pieces = st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=4)
spans = st.tuples(st.sampled_from([Kind.TEXT, Kind.REASONING, Kind.TOOL]), pieces)
endings = st.sampled_from([Finish.STOP, Finish.LENGTH])


def events(plan: list[tuple[Kind, list[str]]], finish: Finish = Finish.STOP) -> list[Event]:
    made = [Event(Kind.PROGRESS, prefilled=3)]
    for number, (kind, texts) in enumerate(plan):
        if kind is Kind.TOOL:
            made.append(Event(kind, tool=ToolDelta(number, f"call_{number}", "f")))
            made += [Event(kind, tool=ToolDelta(number, arguments=text)) for text in texts]
        else:
            made += [Event(kind, text) for text in texts]
    return [*made, Event(Kind.DONE, finish=finish, usage=USAGE)]


def stream(made: list[Event]) -> list[dict[str, Any]]:
    """The payloads on the wire."""
    writer = ResponseWriter(HEAD, None, lambda response: None)
    data = writer.opening() + b"".join(writer.chunk(0, event) for event in made) + writer.closing(USAGE)
    blocks = data.decode().split("\n\n")
    assert blocks.pop() == ""
    payloads = []
    for block in blocks:
        name, _, line = block.partition("\n")
        payloads.append(json.loads(line.removeprefix("data: ")))
        assert name == f"event: {payloads[-1]['type']}"
    return payloads


def whole(made: list[Event]) -> dict[str, Any]:
    collector = ResponseCollector(HEAD, None, lambda response: None)
    for event in made:
        collector.add(0, event)
    return collector.reply(USAGE)


def without_ids(value: Any) -> Any:
    """Ids of items are random, and the clock goes on."""
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    if isinstance(value, dict):
        return {key: without_ids(item) for key, item in value.items() if key not in ("id", "item_id", "completed_at")}
    return value


def accumulated(payloads: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output as a client puts it together from the pieces alone."""
    output: list[dict[str, Any]] = []
    for payload in payloads:
        kind = payload["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert payload["output_index"] == len(output)
            output.append(payload["item"])
        elif kind == "content_part.added":
            output[payload["output_index"]]["content"].append(payload["part"])
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            assert output[payload["output_index"]]["id"] == payload["item_id"]
            output[payload["output_index"]]["content"][payload["content_index"]]["text"] += payload["delta"]
        elif kind == "function_call_arguments.delta":
            output[payload["output_index"]]["arguments"] += payload["delta"]
        elif kind == "output_item.done":
            output[payload["output_index"]]["status"] = payload["item"]["status"]
            assert output[payload["output_index"]] == payload["item"]
    return output


@given(st.lists(spans, max_size=5), endings)
def test_streamed_is_whole(plan: list[tuple[Kind, list[str]]], finish: Finish) -> None:
    made = events(plan, finish)
    payloads = stream(made)
    assert [payload["sequence_number"] for payload in payloads] == list(range(len(payloads)))
    last = payloads[-1]
    assert last["type"] == f"response.{last['response']['status']}"
    assert without_ids(last["response"]) == without_ids(whole(made))
    assert accumulated(payloads) == last["response"]["output"]


@given(st.lists(spans, min_size=1, max_size=5))
def test_nothing_of_the_answer_is_lost(plan: list[tuple[Kind, list[str]]]) -> None:
    said: dict[str, str] = {"message": "", "reasoning": "", "function_call": ""}
    for item in whole(events(plan))["output"]:
        said[item["type"]] += item.get("arguments") or "".join(part["text"] for part in item.get("content", ()))
    wanted = {
        kind: "".join("".join(texts) for span, texts in plan if span is kind)
        for kind in (Kind.TEXT, Kind.REASONING, Kind.TOOL)
    }
    assert (said["message"], said["reasoning"], said["function_call"]) == tuple(wanted.values())


def test_the_order_of_a_text_answer() -> None:
    kinds = [payload["type"].removeprefix("response.") for payload in stream(events([(Kind.TEXT, ["a", "b"])]))]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]


def test_the_order_of_thinking_then_two_calls() -> None:
    plan = [(Kind.REASONING, ["hm"]), (Kind.TOOL, ["{", "}"]), (Kind.TOOL, ["{}"])]
    payloads = stream(events(plan))
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    kinds = [payload["type"].removeprefix("response.") for payload in payloads[2:-1]]
    assert kinds == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        *call[:2],
        *call[1:],
        *call,
    ]
    output = payloads[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "function_call", "function_call"]
    assert [(item["call_id"], item["arguments"]) for item in output[1:]] == [("call_1", "{}"), ("call_2", "{}")]
    assert len({item["id"] for item in output}) == 3


def test_a_limit_leaves_the_response_and_its_last_item_incomplete() -> None:
    response = whole(events([(Kind.REASONING, ["hm"]), (Kind.TEXT, ["he"])], Finish.LENGTH))
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]


def test_an_answer_without_anything_is_an_empty_message() -> None:
    (item,) = whole(events([]))["output"]
    assert (item["type"], item["content"][0]["text"]) == ("message", "")


def test_usage_has_every_detail() -> None:
    assert whole(events([]))["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 8,
    }


def test_silence_is_an_event_and_the_numbers_go_on() -> None:
    writer = ResponseWriter(HEAD, None, lambda response: None)
    writer.opening()
    payload = json.loads(writer.silence().decode().partition("data: ")[2])
    assert (payload["type"], payload["sequence_number"]) == ("response.in_progress", 2)


def test_a_fault_ends_with_what_was_made_and_why() -> None:
    making = Making(HEAD, None)
    making.add(Event(Kind.TEXT, "he"))
    failed = making.failed(EngineFault("It broke."))
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "engine_fault", "message": "It broke."}
    assert failed["response"]["output"][0]["status"] == "incomplete"


def test_only_a_context_error_has_the_code_of_one() -> None:
    codes = [
        Making(HEAD, None).failed(error)["response"]["error"]["code"] for error in (MemoryRefused(""), QueueFull(""))
    ]
    assert codes == ["insufficient_memory", "rate_limit_exceeded"]


def test_the_finished_response_is_kept_once() -> None:
    kept: list[Any] = []
    writer = ResponseWriter(HEAD, None, kept.append)
    for event in events([(Kind.TEXT, ["a"])]):
        writer.chunk(0, event)
    assert kept == []
    writer.closing(USAGE)
    assert [response["status"] for response in kept] == ["completed"]
