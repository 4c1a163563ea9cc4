"""Which layers of a model take few tokens the short way (`blocks.py`): those that compute the same, if it is faster.

Engine thread only, at load.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from treadle.cache.columns import SoloColumns
from treadle.cache.layers import Layers, Rows
from treadle.models.blocks import MOST_TOKENS, Blocks, Parts, layers_of, parts_of, steps_of
from treadle.models.kernels import Heads, Plain, checked_kernels
from treadle.models.rounding import distance, tolerance, within
from treadle.runtime import Backend

log = logging.getLogger("treadle.models")

PROMPT = MOST_TOKENS + 1  # before the steps that are compared: too many for the short way
COMPARED = (1, 3)  # tokens of these steps
STEPS = 6  # of one turn of the measurement
TURNS = 3
MOST_SECONDS = 0.5
SIZE = 0.1  # of the trial's hidden states: what a layer adds to them is larger


def compile_steps(model: Any, backend: Backend, mode: str) -> bool:
    """Exchange the decoder layers of `model` for steps of few tokens per row. Returns whether it was done.

    `mode` "off": never; "on": where they compute the same; "auto": where that is faster too, not tried on a CPU.
    """
    if mode == "off" or (mode == "auto" and backend == "cpu"):
        return False
    layers = layers_of(model)
    if not layers:
        log.info("The layers of this model take few tokens as they are: %s is not known.", type(model).__module__)
        return False
    blocks = _alike(layers, _pieces(backend == "cuda"))
    if not len(blocks):
        return False
    fault = model_fault(model, blocks)
    if fault is not None:
        log.warning("Few tokens go through the layers as they are: %s.", fault)
        return False
    if mode == "auto" and not _faster(model, blocks):
        return False
    blocks.use(True)
    log.info("%d of %d layers take few tokens in few operations.", len(blocks), len(layers))
    return True


def _pieces(kernels: bool) -> Callable[[Heads, int, int, Any], Plain]:
    """Kernels are tried once for all layers of the same measures."""
    known: dict[Any, Plain] = {}

    def pieces(heads: Heads, size: int, width: int, dtype: Any) -> Plain:
        if not kernels:
            return Plain()
        turn = heads.turn
        turned = None if turn is None else (turn.dims, turn.traditional, turn.scale, turn.base)
        key = (heads.num_heads, heads.num_kv_heads, heads.dim, heads.query_norm is None, turned, size, width, dtype)
        if key not in known:
            known[key] = checked_kernels(heads, size, width, dtype)
        return known[key]

    return pieces


def _alike(layers: Sequence[Any], pieces: Callable[[Heads, int, int, Any], Plain]) -> Blocks:
    parts: list[Parts | None] = []
    faults: dict[str, list[int]] = {}
    for i, layer in enumerate(layers):
        own = parts_of(layer, pieces)
        fault = "made of other parts" if own is None else layer_fault(layer, steps_of([layer], [own]))
        if fault is not None:
            faults.setdefault(fault, []).append(i)
        parts.append(own if fault is None else None)
    for fault, numbers in faults.items():
        log.info("Layers that take few tokens as they are: %s (%s).", ", ".join(map(str, numbers)), fault)
    return steps_of(layers, parts)


def layer_fault(layer: Any, blocks: Blocks) -> str | None:
    """By what a layer with its step differs from the layer as it is, with one row of few tokens."""
    weight = layer.input_layernorm.weight

    def hidden(rows: int, n: int, seed: int) -> Any:
        shape = (rows, n, weight.shape[0])
        return (SIZE * mx.random.normal(shape, key=mx.random.key(seed))).astype(weight.dtype)

    def run(rows: int) -> Any:
        memory = _memory(rows, 1, lambda row, own: layer(hidden(1, PROMPT + row, row), "causal", own[0]))
        cache, found = memory.caches[0], []
        for n in COMPARED:
            memory.begin([n] * rows, in_place=True)
            found.append(layer(hidden(rows, n, 7), cache.make_mask(n), cache))
            memory.end()
            mx.eval(found)
        return mx.concatenate(found, axis=1)

    return _compared(blocks, run, (1,), lambda off, dtype: off <= tolerance(dtype))


def model_fault(model: Any, blocks: Blocks) -> str | None:
    """By what the logits of steps with `blocks` differ from those without, with one row and with two, of few tokens."""

    def run(rows: int) -> Any:
        memory, found = primed(model, rows), []
        for n in COMPARED:
            memory.begin([n] * rows, in_place=True)
            found.append(model(mx.array([list(range(3, 3 + n))] * rows), cache=memory.caches))
            memory.end()
            mx.eval(found)
        return mx.concatenate(found, axis=1)

    return _compared(blocks, run, (1, 2), lambda off, dtype: within(off, dtype, model))


def primed(model: Any, rows: int) -> Layers:
    """Some tokens in every layer, a few more of them in each row."""
    ids = [mx.array([[(7 * i + row) % 50 for i in range(PROMPT + row)]]) for row in range(rows)]
    return _memory(rows, len(model.layers), lambda row, own: model(ids[row], cache=own))


def _compared(
    blocks: Blocks, run: Callable[[int], Any], numbers: Sequence[int], rounds: Callable[[float, Any], bool]
) -> str | None:
    """`rounds`: whether a difference may be rounding, for a type."""
    for rows in numbers:
        blocks.use(False)
        wanted = run(rows)
        blocks.use(True)
        try:
            found = run(rows)
            mx.eval(found)
        except (RuntimeError, ValueError, TypeError) as error:  # of a third party's part, such as a rotary embedding
            return f"{type(error).__name__}: {error}"
        finally:
            blocks.use(False)
        off = distance(*(np.array(a.astype(mx.float32)) for a in (wanted, found)))
        if not rounds(off, wanted.dtype):
            return f"in {rows} rows, results differ by {off:.2g} of the spread"
    return None


def _memory(rows: int, num_layers: int, prefill: Callable[[int, list[Any]], Any]) -> Layers:
    joined: Layers | None = None
    for row in range(rows):
        columns = SoloColumns(None)
        own = Layers([Rows(columns) for _ in range(num_layers)], {None: columns})
        own.begin([PROMPT + row])
        prefill(row, own.caches)
        own.end()
        mx.eval(own.arrays())
        if joined is None:
            joined = own
        else:
            joined.join(own)
    assert joined is not None
    return joined


def _faster(model: Any, blocks: Blocks) -> bool:
    """Whether a step is faster with `blocks`: the best of some turns each, in `MOST_SECONDS` or one turn."""
    memory = primed(model, 1)
    plain, few = by_turns(blocks.use, lambda: turn(lambda ids, layers: model(ids, cache=layers.caches), memory))
    log.info("A step of one token takes %.2f ms, and %.2f in few operations.", 1e3 * plain, 1e3 * few)
    return few < plain


def by_turns(use: Callable[[bool], None], measure: Callable[[], float]) -> tuple[float, float]:
    """The least of what was measured without something and with it. Afterwards it is not in use."""
    best = {False: float("inf"), True: float("inf")}
    for wanted in best:  # what is made once is not measured
        use(wanted)
        measure()
    began = time.perf_counter()
    for round in range(TURNS):
        if round and time.perf_counter() - began > MOST_SECONDS:
            break
        for wanted in best:
            use(wanted)
            best[wanted] = min(best[wanted], measure())
    use(False)
    return best[False], best[True]


def turn(forward: Callable[[Any, Layers], Any], memory: Layers) -> float:
    """Seconds for one of `STEPS` steps, each built while the device computes the one before; then they are undone.

    `forward` gives logits [1, 1, vocab] for ids [1, 1].
    """
    feed = mx.array([3])
    mx.eval(feed)
    began = time.perf_counter()
    for _ in range(STEPS):
        memory.begin([1], in_place=True)
        drawn = mx.argmax(forward(feed[:, None], memory)[:, -1], axis=-1)
        memory.end()
        mx.async_eval(drawn)  # type: ignore[no-untyped-call]
        mx.eval(feed)
        feed = drawn
    mx.eval(feed)
    memory.rewind(0, STEPS)
    return (time.perf_counter() - began) / STEPS
