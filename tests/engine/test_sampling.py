"""A row's token is drawn from exactly the distribution that its own settings describe, whoever sits beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.engine.sampling import NAN_TOKEN, Sampler, random_keys
from treadle.types import Sampling

VOCAB = 200
NONE = np.empty(0, np.int64)


def draw(logits: np.ndarray, rows: list[Sampling], positions: list[int] | None = None) -> list[int]:
    sampler = Sampler(VOCAB)
    for row in rows:
        sampler.join(row, np.array([1, 2, 3]), NONE)
    return sampler.draw(mx.array(logits), positions or [7] * len(rows)).read()


def allowed(logits: np.ndarray, s: Sampling) -> set[int]:
    """The ids that the filters keep, by the plain definition."""
    scaled = logits.astype(np.float64) / s.temperature
    order = np.argsort(-scaled, kind="stable")
    kept = set(order[: s.top_k].tolist()) if s.top_k else set(order.tolist())
    p = np.array([np.exp(scaled[i] - scaled.max()) if i in kept else 0.0 for i in range(len(scaled))])
    p /= p.sum()
    total, inside = 0.0, set()
    for i in order:
        if i in kept and (total < s.top_p or s.top_p == 1):
            inside.add(int(i))
        total += p[i]
    return {i for i in inside if p[i] >= s.min_p * p.max()}


settings_of_rows = st.builds(
    Sampling,
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    top_k=st.sampled_from([0, 1, 7, 64, 65, 150]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
    seed=st.integers(0, 2**63),
)


@given(st.lists(settings_of_rows, min_size=1, max_size=4), st.integers(0, 1000))
def test_drawn_tokens_lie_inside_the_filters_and_do_not_depend_on_neighbours(rows: list[Sampling], seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 2, (len(rows), VOCAB)).astype(np.float32)
    together = draw(logits, rows)
    for i, row in enumerate(rows):
        assert draw(logits[i : i + 1], [row]) == [together[i]]
        assert together[i] in allowed(logits[i], row)


@pytest.mark.parametrize("temperature", [1e-320, 1e-45, 1e-38, 1e-7, 1e-6])
def test_a_temperature_close_to_zero_is_greedy(temperature: float) -> None:
    logits = np.random.default_rng(0).normal(0, 20, (1, VOCAB)).astype(np.float32)
    assert draw(logits, [Sampling(temperature=temperature, top_p=0.9, top_k=50)]) == [int(logits.argmax())]


def test_frequencies_follow_the_softmax() -> None:
    logits = np.full((1, VOCAB), -np.inf, np.float32)
    logits[0, :4] = np.log([0.5, 0.3, 0.15, 0.05])
    sampler = Sampler(VOCAB)
    n = 4000
    for _ in range(n):
        sampler.join(Sampling(seed=5), np.array([1]), NONE)
    tokens = sampler.draw(mx.array(np.repeat(logits, n, 0)), list(range(n))).tokens.tolist()
    shares = np.bincount(tokens, minlength=4)[:4] / n
    assert np.abs(shares - [0.5, 0.3, 0.15, 0.05]).max() < 0.03


def test_keys_differ_for_every_pair_of_seed_and_position() -> None:
    seeds = [s for s in range(40) for _ in range(40)]
    positions = list(range(40)) * 40
    assert len({tuple(k) for k in random_keys(seeds, positions).tolist()}) == 1600


def test_penalties_see_the_prompt_the_output_and_what_was_just_drawn() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, :4] = [1.0, 1.1, 1.2, 1.3]
    sampler = Sampler(VOCAB)
    sampler.join(Sampling(temperature=0, repetition_penalty=2.0), np.array([3, 3]), NONE)
    drawn = [sampler.draw(mx.array(logits), [i]).tokens.item() for i in range(4)]
    assert drawn == [2, 1, 0, 3]  # 3 stands in the prompt; each drawn token is penalised at once
    sampler = Sampler(VOCAB)
    sampler.join(Sampling(temperature=0, presence_penalty=0.25), np.array([3]), NONE)
    assert [sampler.draw(mx.array(logits), [i]).tokens.item() for i in range(3)] == [3, 2, 1]
    sampler = Sampler(VOCAB)
    sampler.join(Sampling(temperature=0, frequency_penalty=0.15), np.array([3]), np.array([3, 3]))
    assert sampler.draw(mx.array(logits), [5]).tokens.item() == 2


def test_a_bias_moves_only_its_own_row() -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    logits[:, 9] = 1
    rows = [Sampling(temperature=0, logit_bias=((4, 5.0),)), Sampling(temperature=0)]
    assert draw(logits, rows) == [4, 9]


def test_logprobs_are_the_models_own_before_temperature_and_filters() -> None:
    logits = np.random.default_rng(0).normal(0, 2, (2, VOCAB)).astype(np.float32)
    sampler = Sampler(VOCAB)
    sampler.join(Sampling(temperature=0, logprobs=3, logit_bias=((4, 50.0),)), np.array([1]), NONE)
    sampler.join(Sampling(temperature=0), np.array([1]), NONE)
    drawn = sampler.draw(mx.array(logits), [1, 1])
    expected = logits[0] - np.log(np.exp(logits[0]).sum())
    assert drawn.tokens.tolist()[0] == 4
    assert drawn.logprobs.tolist()[0] == pytest.approx(expected[4], abs=1e-4)
    assert drawn.top_ids.tolist()[0] == np.argsort(-expected)[:3].tolist()
    assert drawn.top_logprobs.tolist()[0] == pytest.approx(np.sort(expected)[::-1][:3].tolist(), abs=1e-4)


@pytest.mark.parametrize("filters", [{"temperature": 0}, {"top_k": 1}, {"top_p": 1e-9}])
def test_nan_is_reported_for_its_row_only(filters: dict[str, Any]) -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    logits[0, 5] = np.nan
    logits[1, 5] = 1
    assert draw(logits, [Sampling(**filters)] * 2) == [NAN_TOKEN, 5]


@given(st.lists(settings_of_rows, min_size=1, max_size=4), st.integers(0, 1000))
def test_a_mask_forbids_in_its_own_row_and_changes_nothing_where_it_allows_all(rows: list[Sampling], seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, (len(rows), VOCAB)).astype(np.float32)
    bits = rng.random((len(rows), 224)) < 0.05
    bits[:, VOCAB - 1] = True
    bits[1::2] = True
    mask = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
    sampler, free = Sampler(VOCAB), Sampler(VOCAB)
    for row in rows:
        sampler.join(replace(row, logit_bias=((3, 100.0),)), np.array([1, 2, 3]), NONE)
        free.join(replace(row, logit_bias=((3, 100.0),)), np.array([1, 2, 3]), NONE)
    tokens = sampler.draw(mx.array(logits), [7] * len(rows), mask).tokens.tolist()
    assert all(bits[i, token] for i, token in enumerate(tokens))
    assert tokens[1::2] == free.draw(mx.array(logits), [7] * len(rows)).tokens.tolist()[1::2]
