"""What a model's steps cost and how much their logits wobble, measured when it is loaded. Engine thread only.

The same tokens are computed one by one and several at once. The logits differ by rounding only, because other kernels
add in another order; a draft is kept where the best two are farther apart than that (`accept.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from treadle.cache.layers import Layers
from treadle.models.upload import on_device
from treadle.speculate.cost import CostTable

PROMPT = 32  # tokens before the measured ones
WIDTHS = (2, 3, 4, 5, 6, 8, 12, 16)
BATCHES = (2, 4)  # rows of as many tokens as the widest of these; without batches one row stands for them
Forward = Callable[[Any, Layers], Any]
SAFETY = 2.0  # two logits may move in opposite directions
BUDGET_S = 3.0  # no new size is begun after steps of so long, not counting what kernels take to be built
MOST_S = 8.0  # or after so long in any case
LEAST_SINGLES = 2


@dataclass(frozen=True)
class Calibration:
    """`noise`: how much closer than this two logits may be to be told apart by a step over several tokens."""

    noise: float = 0.0
    cost: CostTable = field(default_factory=CostTable)


def calibrate(
    forward: Forward,
    vocab_size: int,
    new_layers: Callable[[], Layers],
    batches: bool = True,
    widths: Sequence[int] = (),
) -> Calibration:
    """Some 40 small steps. Costs of larger batches are learnt in use. `batches`: whether rows can decode together.

    The widest step of one row and of two are measured however long it takes: logits wobble most there, what narrower
    ones cost lies between, and a table without any would keep everybody from drafting for good.

    `forward`: logits [rows, n, vocab_size] of ids [rows, n] with such layers. `widths`: see `CostTable`.
    """
    measured = [n for n in widths if n > 1] or WIDTHS
    widest = max(measured)
    ids = [(7 * i * i + 3 * i + 1) % vocab_size for i in range(PROMPT + widest * max(BATCHES))]
    layers = _prompted(forward, new_layers, ids)
    singles = _singles(forward, layers, ids[PROMPT : PROMPT + widest])
    cost, noise = CostTable(widths), 0.0
    cost.observe(1, singles[1], warm=True)
    wide = [(1, widest), *((rows, widest) if batches else (1, rows * widest) for rows in BATCHES)]
    sizes = [wide[0], *((1, width) for width in measured if width < widest), *wide[1:]]
    known = singles[0].shape[1]
    began, spent = time.perf_counter(), known * singles[1]
    for rows, width in sizes:
        slow = spent > BUDGET_S
        if (slow or time.perf_counter() - began > MOST_S) and (rows, width) not in wide[:2]:
            continue
        for _ in range(layers.num_rows, rows):
            layers.join(_prompted(forward, new_layers, ids))
        fed = [ids[PROMPT : PROMPT + width]] * rows
        if not slow:
            _undone(forward, layers, fed)  # the first of a size also builds its kernels, which is no price
        logits, seconds = _undone(forward, layers, fed)
        cost.observe(rows * width, seconds, warm=True)
        spent += 2 * seconds
        both = min(width, known)
        noise = max(noise, float(np.abs(np.array(logits[:, :both] - singles[0][:, :both])).max()))
    return Calibration(SAFETY * noise, cost)


def _prompted(forward: Forward, new_layers: Callable[[], Layers], ids: list[int]) -> Layers:
    layers = new_layers()
    _step(forward, layers, [ids[:PROMPT]])
    return layers


def _singles(forward: Forward, layers: Layers, ids: list[int]) -> tuple[Any, float]:
    """Logits [1, n, vocab] of single steps over `ids`, or over the first of them where that takes long, and the seconds
    of one in the middle; nothing of them stays.
    """
    states, logits = layers.states_now(), []
    times: list[float] = []
    for id in ids:
        if len(times) >= LEAST_SINGLES and len(times) * min(times) > BUDGET_S / 2:
            break
        began = time.perf_counter()
        logits.append(_step(forward, layers, [[id]]))
        times.append(time.perf_counter() - began)
    layers.go_back(states, {0: len(times)})
    return mx.concatenate(logits, axis=1), sorted(times)[(len(times) - 1) // 2]


def _undone(forward: Forward, layers: Layers, ids: list[list[int]]) -> tuple[Any, float]:
    states, began = layers.states_now(), time.perf_counter()
    logits = _step(forward, layers, ids)
    seconds = time.perf_counter() - began
    layers.go_back(states, {row: len(fed) for row, fed in enumerate(ids)})
    return logits, seconds


def _step(forward: Forward, layers: Layers, ids: list[list[int]]) -> Any:
    layers.begin([len(fed) for fed in ids], in_place=True)
    logits = forward(on_device(ids, mx.int32), layers).astype(mx.float32)
    layers.end()
    mx.eval(logits, layers.arrays())
    return logits
