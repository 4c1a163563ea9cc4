"""Bodies become prompt ids; a text far over the context is refused after little work."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes_engine import FakeModel, tokenizer
from treadle.api import prompts
from treadle.api.fields import ChatBody, CompletionBody
from treadle.errors import BadRequest, ContextLengthExceeded

MODEL = FakeModel()


def completion(prompt: Any, **fields: Any) -> list[prompts.Prompt]:
    return prompts.completion_prompts(MODEL, CompletionBody(prompt=prompt, **fields))


def test_a_conversation_is_rendered_and_encoded() -> None:
    body = ChatBody(messages=[{"role": "user", "content": "hi"}], chat_template_kwargs={"shout": True})
    (prompt,) = prompts.chat_prompts(MODEL, body)
    text = "<|system|>SHOUT<|user|>hi<|end|><|assistant|>"
    assert prompt.ids.tolist() == tokenizer().encode(text, add_special_tokens=False)
    assert prompt.echo == ""


def test_the_starts_of_the_messages_go_with_the_prompt() -> None:
    turns = [{"role": "user", "content": "hello world"}, {"role": "assistant", "content": "hello"}]
    (prompt,) = prompts.chat_prompts(MODEL, ChatBody(messages=turns * 2))
    pieces = [tokenizer().decode(part) for part in np.split(prompt.ids, prompt.boundaries)]
    user, assistant = "<|user|>hello world<|end|>", "<|assistant|>hello"
    assert pieces == [user, f"{assistant}<|end|>", user, assistant]
    assert completion("<|user|>hello world<|end|><|user|>")[0].boundaries == ()


def test_the_attribution_line_of_an_agent_does_not_reach_the_prompt() -> None:
    def ids(value: str) -> list[int]:
        header = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={value};"}
        system = {"role": "system", "content": [header, {"type": "text", "text": "Be kind."}]}
        body = ChatBody(messages=[system, {"role": "user", "content": "hi"}])
        return prompts.chat_prompts(MODEL, body)[0].ids.tolist()

    assert ids("543cf") == ids("a1b2c")
    assert tokenizer().decode(ids("543cf")) == "<|system|>Be kind.<|end|><|user|>hi<|end|><|assistant|>"


def test_a_name_that_the_template_reserves_is_refused() -> None:
    body = ChatBody(messages=[{"role": "user", "content": "hi"}], chat_template_kwargs={"tokenize": True})
    with pytest.raises(BadRequest) as caught:
        prompts.chat_prompts(MODEL, body)
    assert caught.value.param == "chat_template_kwargs.tokenize"


def test_token_prompts_are_taken_as_they_are_and_echoed_as_text() -> None:
    ids = tokenizer().encode("hello wörld", add_special_tokens=False)
    (prompt,) = completion([ids], echo=True)
    assert prompt.ids.tolist() == ids and prompt.echo == "hello wörld"


@pytest.mark.parametrize("ids", [[-1], [266], [1, 2**40], [2**63], []])
def test_ids_outside_the_vocabulary_or_none_are_refused(ids: list[int]) -> None:
    with pytest.raises(BadRequest) as caught:
        completion([ids])
    assert caught.value.param == "prompt"


def test_a_prompt_must_leave_room_for_one_token() -> None:
    assert len(completion([[5] * 255])[0].ids) == 255
    with pytest.raises(ContextLengthExceeded) as caught:
        completion([[5] * 256])
    assert (caught.value.num_tokens, caught.value.context_length) == (256, 256)


def test_an_empty_text_is_refused() -> None:
    with pytest.raises(BadRequest) as caught:
        completion("")
    assert caught.value.param == "prompt"


def test_a_huge_text_is_refused_after_encoding_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the whole text was encoded")

    monkeypatch.setattr(prompts, "encode", never)
    with pytest.raises(ContextLengthExceeded) as caught:
        completion("x" * 10_000_000)
    assert 256 < caught.value.num_tokens <= prompts.PIECE_CHARS


@given(st.text(st.sampled_from("helo wt\n"), min_size=1, max_size=400))
def test_what_fits_is_never_called_hopeless(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "CHARS_PER_TOKEN", 0)
        patch.setattr(prompts, "PIECE_CHARS", 64)
        if len(tokenizer().encode(text, add_special_tokens=False)) <= 256:
            prompts.refuse_hopeless(MODEL, text, "prompt")
