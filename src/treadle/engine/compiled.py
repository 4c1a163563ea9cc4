"""The forward pass of a step as one compiled function. Engine thread only.

What a step has to be told travels in arrays (`cache/traced.py`), so the function is traced once for a number of rows
and a bucket of columns; after that the host hands over a step's operations without building them one by one. Steps that
no trace serves are built as ever: rows that fall due to be packed or have to be unpacked, recurrent layers, pictures
that shift positions.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from treadle.cache.layers import Layers
from treadle.cache.recent_columns import BLOCK
from treadle.cache.traced import Frame
from treadle.models.blocks import Traces
from treadle.models.capabilities import forward, new_layers
from treadle.models.compile import by_turns, turn
from treadle.models.rounding import distance, within
from treadle.runtime import Backend
from treadle.types import Batching, Caps

log = logging.getLogger("treadle.engine")

MOST_TRACES = 48  # that are kept: some megabytes each, on CUDA
WIDTHS = (1, 2, 4, 8, 16)  # tokens per row of compiled steps: checked steps are padded to one of these
MOST_KINDS = 256  # of steps that are counted
EARLY = 3  # steps of a kind that are built one by one in any case
TRACE_S = 0.05  # a trace is taken to take no longer: the first ones also build kernels, on a new machine for seconds
HOPE = 4  # steps of a kind that are expected for each that came, while the text stays within its buckets
TRIAL = 20  # tokens before the steps that are compared
TRIED = 2  # of these steps


@dataclass(slots=True)
class _Trace:
    run: Any = None
    changed: list[int] = field(default_factory=list)  # numbers of the buffers that the forward replaced


class Forward:
    """Called as a model with the caches of `layers`, after `layers.begin`. `use` may be called at any time.

    A kind of steps is traced once that is `worth` it: kinds that pass by, as when one row after the other joins, and
    those of which a text that grows takes few are built one by one.
    """

    def __init__(self, model: Any, compiled: bool = False) -> None:
        self.model = model
        self.compiled = compiled
        self.packed = False  # whether rows of which some are packed were tried too
        self._at_once = False
        self._trace_s = TRACE_S  # what the quickest trace took
        self._build_s = math.inf  # what building the quickest step one by one took
        self._steps: OrderedDict[Any, int] = OrderedDict()  # of kinds that have no trace
        self._traces: OrderedDict[Any, _Trace] = OrderedDict()
        self._layers: Layers | None = None

    def __call__(self, ids: Any, layers: Layers, **more: Any) -> Any:
        """Logits [rows, n, vocab_size] of `ids` [rows, n]; `more` is what the model is told besides."""
        served = self.compiled and ids.shape[1] in WIDTHS and not more
        if served and (frame := Frame.of(layers, self.packed)) is not None:
            try:
                if (trace := self._trace(ids, frame)) is not None:
                    return self._run(trace, ids, layers, frame)
            except Exception:  # of a model's file; nothing was computed yet
                log.exception("A step could not be traced; steps are built one by one from now on.")
                self._give_up()
        began = time.perf_counter()
        logits = self.model(ids, cache=layers.caches, **more)
        if served:
            self._build_s = min(self._build_s, time.perf_counter() - began)
        return logits

    @property
    def widths(self) -> tuple[int, ...]:
        """Tokens per row of steps that are compiled; none: no steps are."""
        return WIDTHS if self.compiled else ()

    def use(self, compiled: bool) -> None:
        self.compiled = compiled

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Trace each step that can be, however seldom it comes: for trials and measurements."""
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def _run(self, trace: _Trace, ids: Any, layers: Layers, frame: Frame) -> Any:
        fresh, began = trace.run is None, time.perf_counter()
        if fresh:
            trace.run = mx.compile(self._body(trace, Frame(frame.key, ())))  # or it would hold these buffers
        self._layers = layers
        try:
            logits, *changed = trace.run(ids, *frame.arrays)
        finally:
            self._layers = None
        if fresh:
            self._trace_s = min(self._trace_s, time.perf_counter() - began)
        for number, array in zip(trace.changed, changed, strict=True):
            row = layers.rows[number // 2]
            if number % 2:
                row.values = array
            else:
                row.keys = array
        return logits

    def _trace(self, ids: Any, frame: Frame) -> _Trace | None:
        """What serves such steps; None: there is none, and it is not worth one yet."""
        key = (ids.shape, ids.dtype, frame.key, *((a.shape, a.dtype) for a in frame.arrays))
        trace = self._traces.get(key)
        if trace is None:
            steps = self._steps.pop(key, 0)
            ahead = frame.room / ids.shape[1]
            if not self._at_once and (steps < EARLY or not worth(steps, ahead, self._build_s, self._trace_s)):
                self._steps[key] = steps + 1
                if len(self._steps) > MOST_KINDS:
                    self._steps.popitem(last=False)
                return None
            trace = self._traces[key] = _Trace()
            if len(self._traces) > MOST_TRACES:
                self._traces.popitem(last=False)
        self._traces.move_to_end(key)
        return trace

    def _give_up(self) -> None:
        self.compiled = False
        self._traces.clear()
        self._steps.clear()

    def _body(self, trace: _Trace, frame: Frame) -> Any:
        def body(ids: Any, *arrays: Any) -> tuple[Any, ...]:
            Traces.count += 1
            layers = self._layers
            assert layers is not None
            with frame.inside(layers, arrays):
                logits = self.model(ids, cache=layers.caches)
                after = [a for r in layers.rows for a in (r.keys, r.values)]
            before = arrays[len(arrays) - len(after) :]
            trace.changed = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a is not b]
            return logits, *(after[i] for i in trace.changed)

        return body


def worth(steps: int, ahead: float, build_s: float, trace_s: float) -> bool:
    """Whether to trace a kind of which so many steps came, each built in `build_s`, when a trace takes `trace_s`.

    It is worth one when those and the ones to be expected cost as much to build: at most `ahead`, after which the text
    leaves its buckets. So a kind that never comes again costs little more than a trace is known to take, and one that
    comes seldom, in one text after the other, is traced once building it has cost as much.
    """
    return (steps + min(HOPE * steps, ahead)) * build_s >= trace_s


def forward_of(model: Any, caps: Caps, backend: Backend, mode: str) -> Forward:
    """How steps of few tokens of a model are computed.

    `mode` "off": built one by one; "on": compiled where that gives the same; "auto": where it is faster too, not tried
    on a CPU, which hides the building behind the computing.
    """
    found = Forward(model)
    if mode == "off" or (mode == "auto" and backend == "cpu"):
        return found
    found.packed = not caps.kv.exact
    with found.at_once():
        _choose(found, caps, mode)
    return found


def _choose(found: Forward, caps: Caps, mode: str) -> None:
    if (fault := _fault(found, caps)) is not None:
        log.info("Steps are built one by one: compiled as a whole, %s.", fault)
        found._give_up()
        return
    memory = _primed(found.model, caps, 1)
    if mode == "auto":
        built, compiled = by_turns(found.use, partial(turn, found, memory))
        log.info("A step built one by one takes %.2f ms, and %.2f compiled as a whole.", 1e3 * built, 1e3 * compiled)
        if compiled >= built:
            found._give_up()
            return
    found.use(True)


def _fault(own: Forward, caps: Caps) -> str | None:
    """What is wrong with compiled steps; None: logits are the same with one row and with two, up to rounding."""
    for rows in (1, 2) if caps.batching is Batching.RAGGED else (1,):
        wanted = _stepped(own, _primed(own.model, caps, rows))
        memory, before = _primed(own.model, caps, rows), len(own._traces)
        own.use(True)
        try:
            found = _stepped(own, memory)
        finally:
            compiled, own.compiled = own.compiled, False
        if not compiled:
            return "its file does not allow it"
        if len(own._traces) == before:
            return "its layers hold what no trace can read"
        off = distance(*(np.array(a.astype(mx.float32)) for a in (wanted, found)))
        if not within(off, wanted.dtype, own.model):
            return f"results differ by {off:.2g} of the spread in {rows} rows"
    return None


def _stepped(own: Forward, memory: Layers) -> Any:
    found = []
    for i in range(TRIED):
        memory.begin([1] * memory.num_rows, in_place=True)
        found.append(own(mx.array([[3 + i]] * memory.num_rows), memory))
        memory.end()
        mx.eval(found)
    return mx.concatenate(found, axis=1)


def _primed(model: Any, caps: Caps, rows: int) -> Layers:
    """Some tokens in every layer, a few more of them in each row. What reads packed rows has met some."""
    memories = []
    length = TRIAL if caps.kv.exact else TRIAL + caps.kv.recent + BLOCK
    for row in range(rows):
        memories.append(new_layers(model, caps))
        forward(model, [[(7 * i + row) % min(50, caps.vocab_size) for i in range(length + row)]], memories[-1])
        mx.eval(memories[-1].arrays())
    for other in memories[1:]:
        memories[0].join(other)
    mx.eval(forward(model, [[3]] * rows, memories[0]), memories[0].arrays())
    return memories[0]
