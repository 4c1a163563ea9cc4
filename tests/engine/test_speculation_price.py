"""What speculation costs is measured where it arises, and charged to the rows that caused it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.engine.test_loop import Clock, Run
from tests.fakes import VOCAB, HashModel, slow_twin
from treadle.config import Config
from treadle.engine.loop import Loop
from treadle.engine.speculation import Speculation
from treadle.models.blocks import Traces
from treadle.models.capabilities import new_layers
from treadle.speculate.cost import FIRST_AGE, SHORT, CostTable
from treadle.types import EXACT, Request, Sampling


class Echo(HashModel):
    """Goes on with a cycle of seven tokens, or with what `turns` says instead."""

    def __init__(self, context: int) -> None:
        super().__init__(context=context)
        self.turns: dict[int, int] = {}

    def __call__(self, ids: Any, cache: list[Any]) -> Any:
        logits = super().__call__(ids, cache)
        following = (ids % 7) + 1
        for token, other in self.turns.items():
            following = mx.where(ids == token, other, following)
        return logits + 100 * (mx.arange(VOCAB) == following[..., None])


def echo_run(tokens: int, prompt: int = 3) -> tuple[Run, Speculation, Request, Echo]:
    model = Echo(context=4 * SHORT)
    clock = Clock()
    speculation = Speculation(model.caps, clock)
    layers = partial(new_layers, model, model.caps)
    run = Run(Loop(model, model.caps, Config(), layers, clock=clock, speculation=speculation))
    request = Request("x", np.array([1, 2, 3, 4, 5, 6, 7] * prompt), Sampling(0.0), tokens)
    return run, speculation, request, model


def test_plain_steps_are_measured_again_while_drafts_go_on() -> None:
    run, speculation, request, model = echo_run(450)
    run.loop.submit(request)
    seen = []
    while run.loop.busy:
        run.turn()
        seen.append((speculation.counters.rounds, speculation.counters.plain_tokens))
    assert run.text("x") == slow_twin(model, request, 4 * SHORT)
    rounds = seen[-1][0]
    assert rounds > FIRST_AGE
    plain_while_drafting = {plain for done, plain in seen if 0 < done < rounds}
    assert len(plain_while_drafting) > 1


def test_a_longer_context_has_prices_of_its_own() -> None:
    run, speculation, request, _ = echo_run(40, prompt=SHORT // 7 + 1)
    run.loop.submit(request)
    run.until_idle()
    assert speculation.cost.at(SHORT).plain(1) is not None
    assert speculation.cost.plain(1) is None


def test_rows_held_in_another_way_have_prices_of_their_own() -> None:
    run, speculation, request, model = echo_run(40)
    run.loop.submit(replace(request, kv=EXACT))
    run.until_idle()
    assert speculation.counters.rounds > 0 and run.text("x") == slow_twin(model, request, 4 * SHORT)
    assert speculation.cost.observed() == ({}, {})
    run.loop.submit(replace(request, id="y"))
    run.until_idle()
    plain, verified = speculation.cost.observed()
    assert plain and verified


@pytest.mark.parametrize("traced", [False, True])
def test_steps_that_trace_a_function_are_no_prices(traced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Traces, "count", 0)
    run, speculation, request, model = echo_run(60)
    original = type(model).__call__

    def counted(self: Any, ids: Any, cache: list[Any]) -> Any:
        Traces.count += traced and ids.shape[1] > 1
        return original(self, ids, cache)

    monkeypatch.setattr(type(model), "__call__", counted)
    run.loop.submit(request)
    run.until_idle()
    verified, plain = speculation.cost.observed()
    assert speculation.counters.rounds > 2 and plain and bool(verified) is not traced


class Noted:
    """A control that wants what it can get and notes what it is charged."""

    cooldowns = 0

    def __init__(self) -> None:
        self.charged: list[float] = []
        self.misses = 0

    def want(self, *args: object, **terms: object) -> int:
        return min(4, int(str(args[-1])))

    def ready(self, *kind: object) -> bool:
        return True

    def settled(self, *counts: object) -> None: ...

    def step(self) -> None: ...

    def missed(self, *draft: object) -> None:
        self.misses += 1

    def lost(self, steps: float) -> None:
        self.charged.append(steps)


@pytest.mark.parametrize("salt", ["", "of its own"])
def test_cooldowns_count_whether_a_reply_is_remembered_or_not(salt: str) -> None:
    run, speculation, request, _ = echo_run(14)
    run.loop.submit(replace(request, cache_salt=salt))
    while run.loop.busy:
        run.turn()
        for row in run.loop.sequences():
            if row.speculator is not None:
                row.speculator.control = Noted()  # type: ignore[assignment]
                row.speculator.control.cooldowns = 3  # type: ignore[misc]
    assert speculation.counters.cooldowns == 3


@pytest.mark.parametrize("turns", [{}, {4: 9, 9: 5, 6: 1}], ids=["expected", "another token"])
def test_waiting_in_vain_is_charged_as_the_time_that_the_device_stood_still(turns: dict[int, int]) -> None:
    run, _, request, model = echo_run(14)
    model.turns = turns
    run.loop.submit(request)
    noted = Noted()
    while run.loop.busy:
        run.turn()
        for row in run.loop.sequences():
            if row.speculator is not None:
                row.speculator.control = noted  # type: ignore[assignment]
    assert run.text("x") == slow_twin(model, request, 4 * SHORT)
    assert noted.misses == (1 if turns else 0)
    assert len(noted.charged) >= noted.misses
    assert all(0 < share <= 1 for share in noted.charged)


class Fixed(CostTable):
    """Checked steps take 2.9 plain ones, however many tokens they have."""

    def __init__(self) -> None:
        super().__init__()
        super().observe(1, 2.9, warm=True)
        super().observe(64, 2.9, warm=True)
        for rows in range(1, 9):
            super().observe_plain(rows, 1.0)

    def at(self, context: int) -> CostTable:
        return self

    def observe(self, num_tokens: int, seconds: float, *, warm: bool = False) -> None: ...

    def observe_plain(self, rows: int, seconds: float) -> None: ...

    def plain_due(self, rows: int) -> bool:
        return False


def test_who_is_denied_is_not_asked_again_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of eight has drafts, which are too dear for it alone."""
    model = Echo(context=512)
    speculation = Speculation(model.caps, Clock(), cost=Fixed())
    layers = partial(new_layers, model, model.caps)
    run = Run(Loop(model, model.caps, Config.of(max_rows=8), layers, clock=Clock(), speculation=speculation))
    asked = []
    offers = speculation._offers

    def counted(*rows: Any, **more: Any) -> Any:
        asked.append(rows)
        return offers(*rows, **more)

    monkeypatch.setattr(speculation, "_offers", counted)
    for row in range(8):
        prompt = np.array([1, 2, 3, 4, 5, 6, 7] * 3)
        run.loop.submit(Request(f"r{row}", prompt, Sampling(0.0), 400, speculation=row < 1))
    turns = 0
    while run.loop.busy:
        run.turn()
        turns += 1
    assert 5 < len(asked) < turns / 4


@pytest.mark.parametrize("repeating", [1, 8])
def test_a_step_that_is_too_dear_for_one_row_pays_for_many(repeating: int) -> None:
    """Fifteen drafts of one row, all of them right, make 23 tokens in the time of 2.9 steps of eight."""
    model = Echo(context=512)
    speculation = Speculation(model.caps, Clock(), cost=Fixed())
    layers = partial(new_layers, model, model.caps)
    run = Run(Loop(model, model.caps, Config.of(max_rows=8), layers, clock=Clock(), speculation=speculation))
    prompt = np.array([1, 2, 3, 4, 5, 6, 7] * 3)
    for row in range(8):
        run.loop.submit(Request(f"r{row}", prompt, Sampling(0.0), 400, speculation=row < repeating))
    together = []
    while run.loop.busy:
        before = speculation.counters.rounds
        full = sum(len(group.rows) for group in run.loop.groups) == 8
        run.turn()
        if full and sum(len(group.rows) for group in run.loop.groups) == 8:
            together.append(speculation.counters.rounds - before)
    assert len(together) > 3 and (sum(together) > 0) == (repeating == 8)
