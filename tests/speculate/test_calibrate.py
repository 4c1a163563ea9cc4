"""Calibration measures and leaves no trace."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.fakes import HashModel
from tests.tiny import GOOD, VOCAB, tiny
from treadle.cache.layers import Layers
from treadle.engine.compiled import Forward
from treadle.models.capabilities import forward, new_layers
from treadle.speculate import calibrate as module
from treadle.speculate.calibrate import WIDTHS, calibrate
from treadle.speculate.control import may_pay
from treadle.speculate.cost import CostTable


@pytest.mark.parametrize("name", GOOD)
def test_a_float32_model_wobbles_by_rounding_only(name: str) -> None:
    model, caps = tiny(name)
    found = calibrate(Forward(model), VOCAB, partial(new_layers, model, caps))
    assert 0 <= found.noise < 1e-3
    assert all(found.cost.known(width) for width in (1, *WIDTHS))
    assert all(found.cost.seconds(width) for width in WIDTHS)


@pytest.mark.parametrize("kinds", [("rows", "window"), ("state", "rows"), ("window", "state", "rows")], ids="+".join)
def test_a_model_of_whole_numbers_does_not_wobble_at_all(kinds: tuple[str, ...]) -> None:
    """A step that read a row it should not have would show as noise."""
    model = HashModel(kinds)
    assert calibrate(Forward(model), model.caps.vocab_size, partial(new_layers, model, model.caps)).noise == 0


@pytest.mark.parametrize("batches", [False, True])
@pytest.mark.parametrize("name", ["attention", "window", "delta", "mamba"])
def test_layers_are_as_after_the_prompt_alone(name: str, batches: bool) -> None:
    model, caps = tiny(name)
    made: list[Layers] = []

    def layers() -> Layers:
        made.append(new_layers(model, caps))
        return made[-1]

    rows = max(module.BATCHES) if batches else 1
    calibrate(Forward(model), VOCAB, layers, batches)
    assert len(made) == rows and made[0].lengths == [module.PROMPT] * rows
    ids = [(7 * i * i + 3 * i + 1) % VOCAB for i in range(module.PROMPT)]
    fresh = new_layers(model, caps)
    forward(model, [ids], fresh)
    expected = np.array(forward(model, [[5, 6, 7]], fresh))
    after = np.array(forward(model, [[5, 6, 7]] * rows, made[0]))
    np.testing.assert_allclose(after, expected.repeat(rows, axis=0), atol=1e-4)


@pytest.mark.parametrize("limit", ["BUDGET_S", "MOST_S"])
@pytest.mark.parametrize("batches", [False, True])
@pytest.mark.parametrize("name", ["attention", "delta"])
def test_only_the_widest_are_measured_when_time_is_up(
    name: str, batches: bool, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, caps = tiny(name)
    monkeypatch.setattr(module, limit, -1.0)
    made: list[Layers] = []

    def layers() -> Layers:
        made.append(new_layers(model, caps))
        return made[-1]

    found = calibrate(Forward(model), VOCAB, layers, batches)
    assert set(found.cost.observed()[0]) == {1, max(WIDTHS), 2 * max(WIDTHS)}
    assert may_pay(1, CostTable.of(found.cost.observed()[0], {1: 1e9}), 15, True), "so drafts are made where they pay"
    assert 0 <= found.noise < 1e-3
    assert made[0].lengths == [module.PROMPT] * (2 if batches else 1)


def test_building_kernels_is_no_price_even_when_it_takes_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    seen: set[int] = set()
    model, caps = tiny("attention")

    def built(ids: Any, layers: Layers) -> Any:
        now[0] += 0.01 if ids.size in seen else 20.0
        seen.add(ids.size)
        return Forward(model)(ids, layers)

    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    costs = calibrate(built, VOCAB, partial(new_layers, model, caps)).cost.observed()[0]
    assert set(costs) == {1, max(WIDTHS), 2 * max(WIDTHS)}
    assert list(costs.values()) == pytest.approx([0.01] * 3)


def test_a_slow_model_that_wobbles_is_found_to(monkeypatch: pytest.MonkeyPatch) -> None:
    model, caps = tiny("attention")
    monkeypatch.setattr(module, "BUDGET_S", -1.0)

    def shaken(ids: Any, layers: Layers) -> Any:
        return Forward(model)(ids, layers) + (0.25 if ids.size > 1 else 0.0)

    assert calibrate(shaken, VOCAB, partial(new_layers, model, caps)).noise == pytest.approx(0.5, abs=1e-3)
