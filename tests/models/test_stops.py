"""An answer ends at whatever any part of a model declares as an end, and at nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from tests.models.test_gguf_tokenizer import byte_level
from treadle.models.gguf_tokenizer import load_tokenizer
from treadle.models.stops import stop_ids, template_of


def tokenizer(template: str | None, eos: int | None = None) -> Any:
    """Special tokens 0 to 3: <|endoftext|>, <|im_start|>, <|im_end|>, <|end|>."""
    return load_tokenizer(byte_level(chat_template=template, ggml__eos_token_id=eos))


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, {}, set()),
        ({"eos_token_id": 7}, {}, {7}),
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 9}, {7, 8, 9}),
        ({"text_config": {"eos_token_id": 5}}, {"eos_token_id": [9]}, {5, 9}),
        ({"eos_token_id": None, "text_config": None}, {"eos_token_id": None}, set()),
    ],
)
def test_every_declared_id_counts(config: dict[str, Any], generation: dict[str, Any], expected: set[int]) -> None:
    assert stop_ids(tokenizer(None), config, generation) == expected


def test_the_tokenizer_s_own_end_counts() -> None:
    assert stop_ids(tokenizer(None, eos=2), {}, {}) == {2}


def test_a_turn_ender_counts_where_the_template_writes_it() -> None:
    assert stop_ids(tokenizer("{{ m }}<|im_end|>"), {}, {}) == {2}
    assert stop_ids(tokenizer("{{ m }}"), {}, {}) == set()


def test_a_turn_ender_that_is_no_special_token_does_not_count() -> None:
    assert stop_ids(tokenizer("{{ m }}<end_of_turn>"), {}, {}) == set()


def test_the_end_of_a_message_within_channels_is_no_end_of_the_answer() -> None:
    assert stop_ids(tokenizer("<|channel|>final{{ m }}<|end|>"), {}, {}) == set()
    assert stop_ids(tokenizer("{{ m }}<|end|>"), {}, {}) == {3}


def test_the_default_template_is_taken_of_several() -> None:
    several = tokenizer(None)
    several.chat_template = {"default": "a", "tool_use": "b"}
    assert template_of(several) == "a"
