"""The request comes first, then the model's defaults, then OpenAI's; seeds are spread over choices."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.api.fields import ChatBody
from treadle.api.sampling import choice_seed, sampling
from treadle.errors import BadRequest
from treadle.types import Sampling


def body(**fields: Any) -> ChatBody:
    return ChatBody(messages=[{"role": "user", "content": "hi"}], **fields)


def test_the_request_wins_over_the_model_and_the_model_over_openai() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    drawn = sampling(body(temperature=0.0, top_k=-1), defaults, 100)
    assert (drawn.temperature, drawn.top_k, drawn.top_p, drawn.min_p) == (0.0, 0, 0.95, 0.0)


def test_without_any_say_the_defaults_are_openai_s() -> None:
    drawn = sampling(body(seed=0), {}, 100)
    assert drawn == Sampling(temperature=1.0, top_p=1.0)


def test_every_field_reaches_the_sampler() -> None:
    asked: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": 7,
    }
    drawn = sampling(body(**asked, logit_bias={"3": 1, "1": -2}, logprobs=True, top_logprobs=4), {}, 100)
    assert drawn == Sampling(**asked, logit_bias=((1, -2.0), (3, 1.0)), logprobs=4)


@pytest.mark.parametrize("token", ["100", "9" * 30])
def test_a_bias_beyond_the_vocabulary_is_refused(token: str) -> None:
    with pytest.raises(BadRequest) as caught:
        sampling(body(logit_bias={token: 1}), {}, 100)
    assert caught.value.param == "logit_bias"


@given(st.integers(-(2**70), 2**70))
def test_any_integer_is_a_seed_within_63_bits(seed: int) -> None:
    assert 0 <= sampling(body(seed=seed), {}, 100).seed < 2**63


def test_requests_without_a_seed_differ() -> None:
    assert len({sampling(body(), {}, 100).seed for _ in range(20)}) == 20


@given(st.integers(0, 2**63 - 1))
def test_choices_have_their_own_seeds_and_the_first_keeps_the_request_s(seed: int) -> None:
    seeds = [choice_seed(seed, index) for index in range(20)]
    assert seeds[0] == seed and len(set(seeds)) == 20
    assert all(0 <= s < 2**63 for s in seeds)
