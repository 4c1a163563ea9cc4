"""What is exchanged in model files for a backend reaches the models that see, too: their files are mlx-vlm's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.models.test_attention import reference
from tests.vision.families import CONFIGS, Tiny, tiny, tokenizer
from treadle.cache import attend, recent_columns
from treadle.models import attention, few_queries, packed_attention
from treadle.models.capabilities import describe, forward, mlx_cache, new_layers
from treadle.types import Batching, KvFormat

TEXT = "Several words of text, one after the other, and then some more of them."


def files_of(model: Any) -> list[dict[str, Any]]:
    return [vars(sys.modules[name]) for name in {type(module).__module__ for module in model.modules()}]


@pytest.fixture
def plain() -> Iterator[Callable[[Tiny], None]]:
    """Takes back what other tests of the process have exchanged in the files of a model, and puts it there again."""
    undo: list[tuple[dict[str, Any], Any]] = []

    def clear(made: Tiny) -> None:
        base = vars(sys.modules["mlx_vlm.models.base"])[attention.NAME]
        for file in files_of(made.model):
            if attention.NAME in file:
                undo.append((file, file[attention.NAME]))
                file[attention.NAME] = base

    yield clear
    for file, function in undo:
        file[attention.NAME] = function


@pytest.mark.parametrize("family", CONFIGS)
def test_few_queries_of_every_layer_go_to_the_kernel(
    family: str, plain: Callable[[Tiny], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, int]] = []

    def counted(queries: Any, *rest: Any) -> Any:
        made.append((queries.shape[0], queries.shape[2]))
        return reference(queries, *rest)

    monkeypatch.setattr(attention, "few_queries", counted)
    monkeypatch.setattr(few_queries, "DIM_STEP", 8)
    monkeypatch.setattr(few_queries, "TYPES", (mx.float32,))
    monkeypatch.setattr(few_queries, "_sound", lambda *_: True)
    model, num_layers = tiny(family).model, len(tiny(family).caps.layers)
    ids = tokenizer().encode(TEXT, add_special_tokens=False)[:20]  # within the window of Gemma
    whole = np.array(model(mx.array([ids]), mlx_cache.make_prompt_cache(model)))[0]
    plain(tiny(family))
    assert attention.install(model) > 0
    layers = new_layers(model, tiny(family).caps)
    for start, end in ((0, 17), (17, 20)):
        np.testing.assert_allclose(np.array(forward(model, [ids[start:end]], layers))[0], whole[start:end], atol=2e-4)
    assert made == [(1, 3)] * num_layers, "the step of three tokens"
    made.clear()
    assert describe(model, 288, 512).batching is Batching.RAGGED
    shared = [call for call in made if call[0] > 1]
    assert shared and len(shared) % num_layers == 0


@pytest.mark.parametrize("family", CONFIGS)
def test_packed_rows_of_every_layer_are_read_without_unpacking(
    family: str, plain: Callable[[Tiny], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    over_packed = attend.over_packed

    def counted(queries: Any, *rest: Any) -> Any:
        read.append(queries.shape[2])
        return over_packed(queries, *rest)

    monkeypatch.setattr(attend, "over_packed", counted)
    monkeypatch.setattr(recent_columns, "BLOCK", 8)
    monkeypatch.setattr(recent_columns, "SPARE", 8)
    plain(tiny(family))
    model, caps = tiny(family).model, tiny(family).caps
    assert packed_attention.install(model) > 0
    layers = new_layers(model, caps, KvFormat(8, 8, recent=8))
    forward(model, [tokenizer().encode(TEXT, add_special_tokens=False)], layers)
    read.clear()
    forward(model, [[40]], layers)
    assert read == [1] * sum(kind.value == "rows" for kind in caps.layers)
