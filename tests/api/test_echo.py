"""A prompt that is echoed with log probabilities: every token once, in its place, before the completion."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes_engine import FakeEngine, say, tokenizer
from tests.live import Live, chunks, live
from treadle.api.echo import ScoredEchoes
from treadle.api.prompts import Prompt
from treadle.errors import EngineFault
from treadle.output.stream import Event, Kind
from treadle.types import Finish, TokenLogprob

PROMPT = "hello wörld"


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(FakeEngine(say("hello the"))) as running:
        yield running


def whole(server: Live, **body: Any) -> list[dict[str, Any]]:
    answer = server.post("/v1/completions", {"prompt": PROMPT, "echo": True, "logprobs": 2, **body})
    assert answer.status_code == 200, answer.text
    choices: list[dict[str, Any]] = answer.json()["choices"]
    return choices


def streamed(server: Live, **body: Any) -> list[dict[str, Any]]:
    """The chunks of each choice, joined to what the whole reply has."""
    answer = server.post("/v1/completions", {"prompt": PROMPT, "echo": True, "logprobs": 2, **body, "stream": True})
    joined: dict[int, dict[str, Any]] = {}
    for chunk in chunks(answer.text):
        assert "error" not in chunk, chunk
        (choice,) = chunk["choices"]
        made = joined.setdefault(choice["index"], {"text": "", "index": choice["index"], "logprobs": {}})
        made["text"] += choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            made["logprobs"].setdefault(name, []).extend(values)
        made["finish_reason"] = choice["finish_reason"]
    return [joined[index] for index in sorted(joined)]


def test_the_lists_cover_prompt_and_completion(server: Live) -> None:
    (choice,) = whole(server)
    lists = choice["logprobs"]
    ids = tokenizer().encode(PROMPT + "hello the", add_special_tokens=False)
    assert choice["text"] == PROMPT + "hello the" and len(lists["tokens"]) == len(ids)
    assert lists["token_logprobs"] == [None] + [-0.25] * (len(ids) - 1)
    assert lists["top_logprobs"][0] is None and all(len(top) == 2 for top in lists["top_logprobs"][1:])
    for token, start in zip(lists["tokens"], lists["text_offset"], strict=True):
        assert token.startswith("bytes:") or choice["text"].startswith(token, start)
    assert [request.prompt_logprobs for request in server.engine.requests] == [True]
    server.engine.requests.clear()


@pytest.mark.parametrize("body", [{}, {"n": 3}, {"prompt": ["hello", PROMPT, "x"], "n": 2}, {"max_tokens": 0}])
def test_a_stream_says_what_the_whole_reply_says(server: Live, body: dict[str, Any]) -> None:
    assert streamed(server, **body) == whole(server, **body)


def test_choices_share_the_scores_of_their_prompt(server: Live) -> None:
    server.engine.requests.clear()
    one, two, other, last = whole(server, prompt=["hello", "the"], n=2)
    assert [request.prompt_logprobs for request in server.engine.requests] == [True, False, True, False]
    assert one["logprobs"] == two["logprobs"] != other["logprobs"] == last["logprobs"]


def test_a_prompt_can_be_scored_without_a_completion(server: Live) -> None:
    (choice,) = whole(server, max_tokens=0)
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert len(choice["logprobs"]["tokens"]) == len(tokenizer().encode(PROMPT, add_special_tokens=False))
    (bare,) = whole(server, max_tokens=0, logprobs=None)
    assert (bare["text"], bare["logprobs"]) == (PROMPT, None)


def test_a_prompt_of_one_token_has_no_score(server: Live) -> None:
    for rest in ({"prompt": [75]}, {"prompt": [75], "max_tokens": 0}):
        (choice,) = whole(server, **rest)
        assert choice["logprobs"]["token_logprobs"][:1] == [None] and streamed(server, **rest) == [choice]


def test_token_prompts_are_scored_too(server: Live) -> None:
    ids = tokenizer().encode(PROMPT, add_special_tokens=False)
    assert whole(server, prompt=ids) == whole(server)


def test_a_completion_without_echo_must_make_something(server: Live) -> None:
    answer = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 0})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")


def prompt(size: int) -> Prompt:
    text = "abcdefgh"[:size]
    return Prompt(np.arange(size), text, tuple(range(size)))


@given(st.data(), st.integers(1, 6), st.integers(1, 3))
def test_no_choice_says_anything_before_its_prompt(data: st.DataObject, size: int, n: int) -> None:
    """Whatever the order in which scores and texts of the choices come."""
    scores = [TokenLogprob(i, -float(i)) for i in range(1, size)]
    leading: list[Event] = []
    while scores:
        taken = data.draw(st.integers(1, len(scores)))
        leading.append(Event(Kind.PROGRESS, prompt_logprobs=tuple(scores[:taken])))
        scores = scores[taken:]
    rest = [Event(Kind.TEXT, "!", (9,), (), (0,)), Event(Kind.DONE, finish=Finish.STOP)]
    queues = [[*leading, *rest], *([*rest] for _ in range(n - 1))]
    echoes = ScoredEchoes([prompt(size)], n)
    told: list[list[Event]] = [[] for _ in range(n)]
    while any(queues):
        index = data.draw(st.sampled_from([i for i, queue in enumerate(queues) if queue]))
        for place, event in echoes.feed(index, queues[index].pop(0)):
            told[place].append(event)
    for events in told:
        assert "".join(event.text for event in events) == "abcdefgh"[:size] + "!"
        assert [offset for event in events for offset in event.offsets] == list(range(size + 1))
        values = [item.logprob for event in events for item in event.logprobs]
        assert math.isnan(values[0]) and values[1:] == [-float(i) for i in range(1, size)]
        assert events[-1].finish is Finish.STOP


def test_scores_that_do_not_come_are_a_fault() -> None:
    echoes = ScoredEchoes([prompt(3)], 1)
    assert echoes.feed(0, Event(Kind.TEXT, "!", (9,))) == []
    with pytest.raises(EngineFault):
        echoes.feed(0, Event(Kind.DONE, finish=Finish.STOP))
