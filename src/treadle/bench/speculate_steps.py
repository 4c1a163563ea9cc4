"""What drafting, checking and taking back cost the host, beside the forward pass. Engine thread only.

A checked step of the loop, from asking for drafts to the outputs, against the same forward alone: the same tokens
through the same layers, and the greedy choice of each line read back. Drafts are right with probability RIGHT, so that
most steps take some back.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from treadle.bench.shapes import Subject
from treadle.bench.speculate_script import Oracle, Scripted, Settled
from treadle.config import Config
from treadle.engine.loop import Loop
from treadle.models.capabilities import new_layers
from treadle.speculate.cost import MOST_WIDTH, CostTable
from treadle.speculate.lookup import Proposal
from treadle.speculate.speculator import Speculator
from treadle.types import Ids, Request, Sampling

DRAFTS = 4
RIGHT = 0.8
STEPS = 200
WARM = 50
CONTEXT = 256
MOST_ROWS = 4
NOISE = 1e-6  # no tie, but gaps are measured


class Flat(CostTable):
    """Every step costs the same, whatever was observed, so that as many drafts as possible are always worth while."""

    def __init__(self) -> None:
        super().__init__()
        for rows in range(1, MOST_ROWS + 1):
            self.observe_plain(rows, 1.0)
            for width in range(1, MOST_WIDTH + 1):
                self.observe(rows * width, 1.0)

    def at(self, context: int) -> CostTable:
        return self

    def observe(self, num_tokens: int, seconds: float, *, warm: bool = False) -> None:
        super().observe(num_tokens, 1.0, warm=warm)

    def observe_plain(self, rows: int, seconds: float) -> None:
        super().observe_plain(rows, 1.0)


class Short(Oracle):
    """Proposes DRAFTS tokens at most, and looks them up in the text all the same, because that takes time too."""

    def proposal(self, limit: int) -> Proposal:
        Speculator.proposal(self, limit)
        return super().proposal(min(limit, DRAFTS))


class Eager(Scripted):
    """Every row brings DRAFTS in every step."""

    oracle = Short
    right = RIGHT


def step_case(subject: Subject, rows: int, rounds: int) -> Mapping[str, Any]:
    """Milliseconds: medians of the quietest round, both kinds by turns.

    `host` is what the loop's own thread computed, forward alone the building of its graph. Where other programs want
    the processor as well, it is the steadier figure: the rest is the device's, and waiting for it.
    """
    checked, alone = [], []
    for _ in range(rounds):
        checked.append(np.median(_checked(subject, rows), axis=0) * 1000)
        alone.append(np.median(_alone(subject, rows), axis=0) * 1000)
    (wall, host), (forward, forward_host) = np.min(checked, axis=0), np.min(alone, axis=0)
    return {
        "rows": rows,
        "drafts": DRAFTS,
        "checked step ms": wall,
        "forward ms": forward,
        "overhead ms": wall - forward,
        "checked step host ms": host,
        "forward host ms": forward_host,
        "overhead host ms": host - forward_host,
        "goal ms": 0.25 if rows == 1 else 0.4,
    }


def _checked(subject: Subject, rows: int) -> list[tuple[float, float]]:
    """Wall and thread seconds of each step of a loop that checks drafts in every one."""
    vocab = subject.caps.vocab_size
    room = (DRAFTS + 1) * (STEPS + WARM)
    speculation = Eager(subject.caps, time.perf_counter, cost=Flat(), noise=NOISE)
    speculation.truth = _settled_text(room, vocab)
    model = Settled(subject.model, vocab)
    layers = partial(new_layers, subject.model, subject.caps)
    loop = Loop(model, subject.caps, Config.of(max_rows=rows), layers, speculation=speculation)
    for i in range(rows):
        loop.submit(Request(f"r{i}", _prompt(vocab), Sampling(0.0), room))
    while sum(len(group.rows) for group in loop.groups) < rows:
        loop.step()
    return _timed(loop.step)


def _alone(subject: Subject, rows: int) -> list[tuple[float, float]]:
    """The same of the forward pass with its greedy choice. What is taken back between two is not counted."""
    vocab, width = subject.caps.vocab_size, DRAFTS + 1
    model = Settled(subject.model, vocab)
    alone = [new_layers(subject.model, subject.caps) for _ in range(rows)]
    for layers in alone:
        layers.begin([CONTEXT])
        mx.eval(model(mx.array(_prompt(vocab))[None], cache=layers.caches))
        layers.end()
    together = alone[0]
    for layers in alone[1:]:
        together.join(layers)
    ids = np.ones((rows, width), np.int32)

    def forward() -> None:
        together.begin([width] * rows)
        logits = model(mx.array(ids), cache=together.caches)
        together.end()
        mx.argmax(logits.astype(mx.float32), axis=-1).tolist()

    chance = random.Random(0)

    def back() -> None:
        for row in range(rows):
            kept = 1 + next((i for i in range(DRAFTS) if chance.random() >= RIGHT), DRAFTS)
            together.rewind(row, width - kept)

    return _timed(forward, back)


def _timed(call: Callable[[], object], between: Callable[[], object] = lambda: None) -> list[tuple[float, float]]:
    times = []
    for i in range(STEPS + WARM):
        wall, host = time.perf_counter(), time.thread_time()
        call()
        if i >= WARM:
            times.append((time.perf_counter() - wall, time.thread_time() - host))
        between()
    return times


def _prompt(vocab: int) -> Ids:
    return np.random.default_rng(0).integers(0, vocab, CONTEXT)


def _settled_text(tokens: int, vocab: int) -> list[int]:
    last, text = int(_prompt(vocab)[-1]), []
    for _ in range(tokens):
        last = (7 * last + 3) % vocab
        text.append(last)
    return text
