"""Driving the loop without a server: the same `Loop`, stepped by hand. Engine thread only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from treadle.bench.shapes import Subject
from treadle.config import Config
from treadle.engine.loop import Loop
from treadle.engine.reuse import Reuse
from treadle.models.capabilities import new_layers
from treadle.types import Request, Sampling


@dataclass
class Timeline:
    """When each token of one request came, in seconds since the run began."""

    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    steps: int = 0  # that gave it tokens

    @property
    def ttft(self) -> float:
        return self.times[0]

    def speed(self, skip: int = 1) -> float:
        """Tokens per second after the first `skip`."""
        return (len(self.times) - skip) / (self.times[-1] - self.times[skip - 1])

    def gaps(self) -> list[float]:
        return np.diff(self.times).tolist()


def loop_of(subject: Subject, reuse: Reuse | None = None, **settings: object) -> Loop:
    """The loop as the engine builds it; without a prefix cache unless `reuse` is given."""
    config = Config.of(**settings)
    layers = partial(new_layers, subject.model, subject.caps)
    return Loop(subject.model, subject.caps, config, layers, None, reuse, forward=subject.forward)


def random_request(id: str, vocab_size: int, prompt: int, tokens: int, seed: int = 0, **sampling: object) -> Request:
    """A greedy request of random ids that never ends by itself."""
    ids = np.random.default_rng(seed).integers(0, vocab_size, prompt)
    return Request(id, ids, Sampling(**{"temperature": 0.0, **sampling}), tokens)  # type: ignore[arg-type]


def run(loop: Loop, requests: Sequence[Request]) -> dict[str, Timeline]:
    """Submit all at once and step until all are done."""
    began = time.perf_counter()
    lines = {request.id: Timeline() for request in requests}
    for request in requests:
        loop.submit(request)
    while loop.busy:
        for output in loop.step():
            if output.error:
                raise RuntimeError(output.error)
            now = time.perf_counter() - began
            lines[output.id].times += [now] * len(output.tokens)
            lines[output.id].tokens += output.tokens
            lines[output.id].steps += bool(output.tokens)
    return lines
