"""The built-in model behind the real server, asked by the official client."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai import APIError, BadRequestError, OpenAI

from tests.e2e.served import ENDLESS, Served
from tests.live import until

SYSTEM = "You answer questions."
FRANCE = "What is the capital of France?"
ASKED: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": FRANCE}]
TEXT = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{FRANCE}<|im_end|>\n<|im_start|>assistant\n"
MIXED: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 24},
    {"temperature": 1.9, "seed": 1, "max_tokens": 16},
    {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 1.0, "seed": 2, "max_tokens": 20},
    {"temperature": 1.0, "seed": 3, "max_tokens": 12, "logit_bias": {"338": -100}, "extra_body": {"top_k": 20}},
]


@pytest.fixture
def client(server: Served) -> OpenAI:
    return server.client


def chat(client: OpenAI, messages: Any = ASKED, **options: Any) -> str:
    reply = client.chat.completions.create(model="smollm2", messages=messages, **options)
    return reply.choices[0].message.content or ""


def streamed(client: OpenAI, messages: Any = ASKED, **options: Any) -> list[str]:
    """The pieces of a streamed reply."""
    chunks = list(client.chat.completions.create(model="smollm2", messages=messages, stream=True, **options))
    assert chunks[-1].choices[0].finish_reason is not None
    return [chunk.choices[0].delta.content or "" for chunk in chunks]


def test_the_capital_of_france_streamed_and_not(client: OpenAI) -> None:
    whole = chat(client, temperature=0)
    pieces = streamed(client, temperature=0)
    assert "Paris" in whole
    assert "".join(pieces) == whole and len([piece for piece in pieces if piece]) > 3


def test_a_chat_is_the_completion_of_its_rendered_prompt(client: OpenAI) -> None:
    talked = client.chat.completions.create(model="smollm2", messages=ASKED, temperature=0)
    completed = client.completions.create(model="smollm2", prompt=TEXT, temperature=0)
    assert completed.choices[0].text == talked.choices[0].message.content
    assert talked.usage is not None and completed.usage is not None
    assert completed.usage.prompt_tokens == talked.usage.prompt_tokens
    assert completed.usage.completion_tokens == talked.usage.completion_tokens


def test_four_at_once_get_what_each_gets_alone(client: OpenAI) -> None:
    """Greedy beside hot rows, seeds, penalties and biases; prompts of different length, streamed or not."""

    def ask(number: int) -> str:
        options = MIXED[number % 4]
        messages = [{"role": "user", "content": f"Name {number + 2} rivers." + " Please." * 12 * number}]
        if number % 2:
            return "".join(streamed(client, messages, **options))
        return chat(client, messages, **options)

    alone = [ask(number) for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == alone
    assert len(set(alone)) == 4


def test_a_stop_string_across_tokens_is_never_shown(client: OpenAI) -> None:
    whole = chat(client, temperature=0)
    stop = whole[5:17]  # begins and ends inside words
    assert chat(client, temperature=0, stop=[stop]) == whole[:5]
    assert "".join(streamed(client, temperature=0, stop=[stop, "never said"])) == whole[:5]


def test_a_stop_string_counts_as_an_end_and_not_as_something_given_up(server: Served) -> None:
    def counts() -> dict[str, int]:
        found: dict[str, int] = httpx.get(server.url + "/v1/stats", timeout=30).json()["totals"]["finished"]
        return found

    until(server.idle)
    before = counts()
    stop = chat(server.client, temperature=0)[5:17]
    streamed(server.client, temperature=0, stop=[stop])
    until(lambda: sum(counts().values()) == sum(before.values()) + 2)
    assert counts() == before | {"stop": before["stop"] + 2}


def test_no_character_is_cut(client: OpenAI) -> None:
    family = "👩‍👩‍👧‍👦"
    prompt = f"{family}漢字é{family}漢字é{family}漢字é"
    asked: Any = {"model": "smollm2", "prompt": prompt, "temperature": 0, "max_tokens": 40}
    whole = client.completions.create(**asked).choices[0].text
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)]
    assert "".join(pieces) == whole
    assert not any("\ufffd" in piece for piece in pieces[:-2])
    assert any(ord(character) > 0x7F for character in whole)


def test_log_probabilities_spell_the_text_in_a_batch_too(client: OpenAI) -> None:
    def ask(count: int) -> None:
        reply = client.chat.completions.create(
            model="smollm2", messages=ASKED, temperature=0, max_tokens=8, logprobs=True, top_logprobs=count
        )
        found = reply.choices[0].logprobs
        assert found is not None and found.content is not None
        spelled = b"".join(bytes(entry.bytes or []) for entry in found.content).decode()
        assert spelled == reply.choices[0].message.content
        assert all(len(entry.top_logprobs) == count for entry in found.content)
        assert all(not entry.top_logprobs or entry.top_logprobs[0].token == entry.token for entry in found.content)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(ask, (0, 1, 5)))


def test_closed_connections_free_their_rows(server: Served) -> None:
    """More than there are rows, waiting, in prefill and decoding, streamed and not; then a request is answered."""
    for number in range(12):
        prompt = "Once upon a time" + " there was" * 40 * (number % 3)
        body = {"prompt": prompt, "logit_bias": ENDLESS, "stream": bool(number % 2)}
        connection = server.send("/v1/completions", body)
        if number % 4 == 3:
            until(lambda: sum(server.health()[1:]) > 0)
        connection.close()
    until(server.idle, within_s=4)
    assert "Paris" in chat(server.client, temperature=0)


def test_a_request_is_cancelled_by_its_id(server: Served) -> None:
    stream = server.client.completions.create(model="", prompt="Once upon a time", logit_bias=ENDLESS, stream=True)
    path = f"/requests/{next(stream).id}/cancel"
    server.client.post(path, cast_to=object)
    with pytest.raises(APIError) as caught:
        list(stream)
    assert caught.value.code == "request_cancelled"
    until(server.idle, within_s=2)


def test_a_prompt_over_the_context_is_refused_with_both_numbers(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        chat(client, [{"role": "user", "content": "word " * 8200}])
    assert caught.value.code == "context_length_exceeded"
    assert "8192" in str(caught.value) and "82" in str(caught.value).replace("8192", "")


def test_the_served_model_tells_what_it_is(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.context_length, model.chat_template) == ("smollm2", 8192, True)  # type: ignore[attr-defined]
    assert model.batching["mode"] == "ragged"  # type: ignore[attr-defined]
