"""Steps over packed rows, compiled as a whole: where attention reads them as they are, and none is due to be packed."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.models.test_attention import installed as installed
from tests.tiny import CONFIGS, VOCAB, built
from treadle.cache import recent_columns
from treadle.cache.layers import Layers
from treadle.cache.traced import Frame
from treadle.engine import compiled
from treadle.engine.compiled import Forward, forward_of
from treadle.models import attention, few_queries, packed_attention
from treadle.models.capabilities import forward, new_layers
from treadle.types import Caps, KvFormat

BLOCK = 8
KV = KvFormat(8, 8, recent=16)


def by_arrays(queries: Any, exact: Any, packed: Any, seen: tuple[Any, Any, Any], scale: float, reach: int) -> Any:
    """What the kernel computes, by its own inputs; what is told is in arrays and stays there."""
    table, position, limits = seen
    rows, n = queries.shape[0], queries.shape[2]
    here = (position[:, None] + mx.arange(n))[:, None, :, None]
    edge = mx.maximum(here + 1 - limits[1], 0) // BLOCK * BLOCK
    columns = mx.arange(exact[0].shape[2])
    late = table[:rows, None, None].astype(mx.int64) + limits[2]
    old = mx.arange(packed[0].num_tokens)
    visible = mx.concatenate(
        [
            mx.broadcast_to((old < edge) & (old < limits[3]), (rows, 1, n, len(old))),
            mx.broadcast_to((late <= here) & (late >= edge) & (columns < limits[0]), (rows, 1, n, len(columns))),
        ],
        axis=-1,
    )
    both = zip(packed, exact, strict=True)
    keys, values = (mx.concatenate([p.unpack()[:rows], e[:rows]], axis=2) for p, e in both)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=visible)


@pytest.fixture
def model(installed: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Caps]:
    monkeypatch.setattr(recent_columns, "BLOCK", BLOCK)
    monkeypatch.setattr(compiled, "BLOCK", BLOCK)
    monkeypatch.setattr(attention, "few_queries_packed", by_arrays)
    monkeypatch.setattr(few_queries, "TYPES", (mx.float32,))
    monkeypatch.setattr(few_queries, "_sound", lambda *_: True)
    monkeypatch.setattr(attention, "few_queries", None)
    monkeypatch.setattr(attention, "_over_rows", lambda *_: None)
    return installed("wide heads"), replace(built(CONFIGS["wide heads"])[1], kv=KV)


def prefilled(own: Forward, caps: Caps, rows: int) -> Layers:
    found = []
    for row, n in enumerate((50, 33, 61)[:rows]):
        ids = np.random.default_rng(row).integers(0, VOCAB, n).tolist()
        found.append(new_layers(own.model, caps))
        forward(own.model, [ids], found[-1])
        mx.eval(found[-1].arrays())
    for other in found[1:]:
        found[0].join(other)
    return found[0]


def stepped(own: Forward, layers: Layers, ids: list[list[int]]) -> list[list[int]]:
    layers.begin([len(line) for line in ids])
    found = mx.argmax(own(mx.array(ids), layers), axis=-1).tolist()
    layers.end()
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("rows", [1, 3])
def test_a_long_text_with_checked_steps_is_identical(
    rows: int, model: tuple[Any, Caps], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, served = [], []
    monkeypatch.setattr(compiled, "worth", lambda *_: True)  # however long a step takes here
    run = Forward._run
    monkeypatch.setattr(Forward, "_run", lambda *all: served.append(all) or run(*all))
    for own in (Forward(model[0]), Forward(model[0], True)):
        own.packed = own.compiled
        layers, made = prefilled(own, model[1], rows), []
        last = [[7]] * rows
        for i in range(120):
            made.append(stepped(own, layers, last))
            last = [line[-1:] for line in made[-1]]
            if i % 5 == 4:
                made.append(stepped(own, layers, [[*line, 3, 1, 4] for line in last]))
                for row in range(layers.num_rows):
                    layers.rewind(row, 2 + row % 2)
            if i == 70 and rows > 1:
                layers.drop(0)
                last = last[1:]
        texts.append(made)
    assert texts[0] == texts[1] and own.compiled
    assert len(served) > 60, "but for steps in which a block falls due"


def test_steps_that_pack_or_that_nobody_reads_as_they_are_have_no_frame(model: tuple[Any, Caps]) -> None:
    own = Forward(model[0])
    layers = prefilled(own, model[1], 1)
    found = []
    for _ in range(2 * BLOCK):
        layers.begin([1])
        found.append((Frame.of(layers, packed=True) is not None, bool(layers.columns[None].due())))  # type: ignore[union-attr]
        assert Frame.of(layers) is None, "not unless it is asked for"
        own(mx.array([[5]]), layers)
        layers.end()
    assert found[0] == (False, found[0][1]), "attention has to ask for them once"
    assert [frame for frame, _ in found[1:]] == [not due for _, due in found[1:]]
    assert sum(due for _, due in found) == 2


def test_they_are_tried_at_load_for_models_whose_rows_are_packed(model: tuple[Any, Caps]) -> None:
    found = forward_of(*model, "metal", "on")
    assert found.compiled and found.packed
    exact = forward_of(model[0], replace(model[1], kv=KvFormat()), "metal", "on")
    assert not exact.packed


def test_attention_that_needs_a_mask_is_left_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, caps = built(CONFIGS["wide heads"])
    for name in {type(module).__module__ for module in model.modules()}:
        file = vars(sys.modules[name])
        if attention.NAME in file:  # files are shared: what is there comes back at the end
            monkeypatch.setitem(file, attention.NAME, file[attention.NAME])
    packed_attention.install(model)
    with caplog.at_level("INFO", "treadle.engine"):
        assert not forward_of(model, replace(caps, kv=KV), "cpu", "on").compiled
    assert "what no trace can read" in caplog.text and "could not be traced" not in caplog.text


def test_a_mask_from_elsewhere_ends_it(model: tuple[Any, Caps], monkeypatch: pytest.MonkeyPatch) -> None:
    original = attention._over_packed

    def with_another(*given: Any) -> Any:
        *others, mask = given
        return original(*others, mx.array(mask) if isinstance(mask, mx.array) else mask)

    monkeypatch.setattr(attention, "_over_packed", with_another)
    monkeypatch.setattr(attention, "over_packed", lambda queries, *_: queries)
    assert not forward_of(*model, "metal", "on").compiled
