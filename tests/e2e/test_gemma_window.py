"""The real model with sliding-window layers: branch points below, at and above its window give the cold text."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tests.engine.test_loop import Run
from tests.engine.test_reuse import finish_of
from tests.models.builtin import known
from treadle.cache.budget import Budget
from treadle.cache.store import Settings, Store
from treadle.config import Config
from treadle.engine.loop import Loop
from treadle.engine.reuse import Reuse
from treadle.models.capabilities import new_layers
from treadle.models.load import LoadedModel, load_model
from treadle.types import Request, Sampling

WINDOW = 512


@pytest.fixture(scope="module")
def gemma() -> LoadedModel:
    return load_model(known("gemma3-270m"), 2048)


def run_of(model: LoadedModel, cached: bool) -> Run:
    store = Store(Settings(Budget(10**9), 10**12)) if cached else None
    layers = partial(new_layers, model.model, model.caps)
    reuse = Reuse(store, model.caps, 256)
    return Run(Loop(model.model, model.caps, Config(), layers, None, reuse))


def test_branches_around_the_window_and_a_repeat_give_the_cold_text(gemma: LoadedModel) -> None:
    assert gemma.caps.window == WINDOW
    text = " ".join(f"Line {i}: the lamp in room {i * 7 % 90} is {'on' if i % 3 else 'off'}." for i in range(60))
    base = gemma.tokenizer.encode(text, return_tensors="np")[0].astype("int64")[:680]
    other = gemma.tokenizer.encode(" Suddenly the weather changed and", return_tensors="np")[0].astype("int64")[1:]
    assert len(base) == 680
    warm, cold = run_of(gemma, True), run_of(gemma, False)
    asked = [Request("base", base, Sampling(temperature=0), 6)]
    for at in (300, WINDOW, 640):
        asked.append(Request(f"branch at {at}", np.concatenate([base[:at], other]), Sampling(temperature=0), 6))
    asked.append(Request("again", base, Sampling(temperature=0), 6))
    cached = []
    for request in asked:
        made, known = finish_of(warm, request)
        cached.append(known)
        if request.id != "again":
            assert made == finish_of(cold, request)[0], request.id
    assert warm.text("again") == warm.text("base") and cached[-1] == len(base) - 1
    assert cached[1] >= 256 and cached[2] >= 512 and cached[3] >= 512
