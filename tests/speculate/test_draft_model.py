"""The draft model's rows follow their sequences: what it proposes is what it would say by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import VOCAB, HashModel, slow_twin
from tests.tiny import tiny
from treadle.engine.sampling import Sampler
from treadle.models.capabilities import new_layers
from treadle.speculate.draft_model import DraftModel
from treadle.types import Caps, Request, Sampling

GREEDY = Sampling(0.0)


def draft_of(model: Any, caps: Caps) -> DraftModel[str]:
    return DraftModel(model, caps, Sampler(caps.vocab_size))


def said(model: Any, ids: list[int], count: int, sampling: Sampling = GREEDY) -> tuple[int, ...]:
    """What the model by itself says behind `ids`."""
    return tuple(slow_twin(model, Request("x", np.array(ids, np.int64), sampling, count), 4096))


def join(draft: DraftModel[str], key: str, ids: list[int], sampling: Sampling = GREEDY) -> None:
    """Follow a sequence that has all but the last of `ids` computed."""
    layers = new_layers(draft.model, draft.caps)
    if len(ids) > 1:
        draft.prefill(layers, np.array(ids[:-1], np.int64))
    draft.join(key, layers, sampling)


@pytest.mark.parametrize("kinds", [("rows", "rows"), ("window", "rows")], ids="+".join)
@settings(max_examples=25)
@given(data=st.data())
def test_rows_that_come_go_and_are_taken_back_always_propose_the_models_own_words(
    kinds: tuple[str, ...], data: st.DataObject
) -> None:
    model = HashModel(kinds)
    draft = draft_of(model, model.caps)
    ids = st.integers(0, VOCAB - 1)
    texts: dict[str, list[int]] = {}
    for number in range(data.draw(st.integers(1, 14))):
        what = data.draw(st.sampled_from(["join", "draft", "draft", "draft", "drop"]))
        if what == "join" and len(texts) < 4:
            texts[f"s{number}"] = data.draw(st.lists(ids, min_size=1, max_size=20))
            join(draft, f"s{number}", texts[f"s{number}"])
        elif what == "drop" and texts:
            key = data.draw(st.sampled_from(sorted(texts)))
            draft.drop(key)
            del texts[key]
        elif what == "draft" and texts:
            count = data.draw(st.integers(1, 5))
            made = draft.draft({key: np.array(text[draft.known(key) :]) for key, text in texts.items()}, count)
            for key, text in texts.items():
                assert made[key] == said(model, text, count)
                kept = data.draw(st.integers(0, count))
                draft.keep(key, len(text) + kept)
                text += [*made[key][:kept], *data.draw(st.lists(ids, min_size=1, max_size=3))]
    for key in texts:
        draft.drop(key)
    assert draft.layers is None and not draft.keys


@pytest.mark.parametrize("name", ["attention", "window", "mla", "sinks"])
def test_tiny_real_models_propose_what_they_say(name: str) -> None:
    model, caps = tiny(name)
    draft = draft_of(model, caps)
    texts = {"a": [1, 2, 3], "b": list(range(40)), "c": [7]}
    for key, text in texts.items():
        join(draft, key, text)
    made = draft.draft({key: np.array(text[-1:]) for key, text in texts.items()}, 6)
    assert made == {key: said(model, text, 6) for key, text in texts.items()}
    for key, text in texts.items():
        draft.keep(key, len(text))
        text += [made[key][0], 9]
    made = draft.draft({key: np.array(text[-2:]) for key, text in texts.items()}, 4)
    assert made == {key: said(model, text, 4) for key, text in texts.items()}


def test_draws_are_those_of_the_sequences_own_settings_and_seed() -> None:
    model = HashModel()
    draft = draft_of(model, model.caps)
    sampling = Sampling(1.3, seed=5, top_k=20)
    penalised = replace(sampling, presence_penalty=2.0, repetition_penalty=1.5, logprobs=3, seed=6)
    join(draft, "a", [1, 2, 3], sampling)
    join(draft, "b", [1, 2, 3], penalised)
    made = draft.draft({"a": np.array([3]), "b": np.array([3])}, 5)
    assert made["a"] == said(model, [1, 2, 3], 5, sampling)
    assert made["b"] == said(model, [1, 2, 3], 5, replace(sampling, seed=6)), "penalties are left to the large model"


def test_ids_and_biases_that_the_model_does_not_have_are_no_trouble() -> None:
    model = HashModel()
    draft = draft_of(model, model.caps)
    join(draft, "a", [VOCAB + 5, 2, VOCAB], Sampling(0.0, logit_bias=((VOCAB + 1, 100.0), (3, 1.0))))
    made = draft.draft({"a": np.array([VOCAB])}, 3)["a"]
    assert len(made) == 3 and max(made) < VOCAB


def test_the_layers_of_the_last_row_stay_as_they_are() -> None:
    model = HashModel()
    draft = draft_of(model, model.caps)
    join(draft, "a", [1, 2, 3])
    join(draft, "b", [4, 5])
    draft.drop("a")
    layers = draft.layers
    draft.drop("b")
    assert draft.layers is None
    assert layers is not None and layers.lengths == [1]
    again: DraftModel[str] = draft_of(model, model.caps)
    again.join("b", layers, GREEDY)
    assert again.draft({"b": np.array([5])}, 3)["b"] == said(model, [4, 5], 3)
    assert again.row("b") == 0
