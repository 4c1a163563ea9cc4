"""Drafts by script: the true continuation, each token spoilt with a given probability. Engine thread only.

What is measured is the loop as it is, with its control, its checks and its rewinds; only where the drafts come from is
played; or not even that, to see what looking for drafts costs in a text without repeats (`--no-repeats`).
With random weights the two best candidates often lie closer together than rounding. So that the text is the
same however it is computed, `Settled` lets every token be decided by the one before it; each forward pass is still
computed in full. Without it (`--own-text`) the model's own text is recorded first, and ties show in the figures.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from treadle.bench.shapes import Subject
from treadle.cache.budget import Budget
from treadle.cache.store import Settings, Store
from treadle.config import Config
from treadle.engine import sequence as engine
from treadle.engine.compiled import Forward
from treadle.engine.loop import Loop
from treadle.engine.reuse import Reuse
from treadle.engine.speculation import Speculation
from treadle.models.capabilities import new_layers
from treadle.speculate.calibrate import Calibration, calibrate
from treadle.speculate.lookup import LONGEST, Proposal
from treadle.speculate.speculator import Speculator
from treadle.types import Batching, Ids, Request, Sampling

WARM = 8  # steps with all rows before the clock starts
TURN = 24  # steps of one loop before another has its turn
PEAK = 1e4


class Settled:
    """A model whose next token is (7 * last + 3) % vocab_size, far ahead of all others."""

    def __init__(self, model: Any, vocab_size: int) -> None:
        self.model = model
        self._ids = mx.arange(vocab_size)

    def __call__(self, ids: Any, cache: list[Any]) -> Any:
        logits = self.model(ids, cache=cache)
        following = (7 * ids + 3) % len(self._ids)
        return mx.where(self._ids == following[..., None], mx.array(PEAK, logits.dtype), logits)


class Oracle(Speculator):
    """Knows the text; each of its tokens is spoilt with probability 1 - `right`, the same ones whenever it is asked."""

    def __init__(self, sequence: engine.Sequence, truth: Sequence[int], right: float, vocab: int, seed: int) -> None:
        super().__init__(sequence.tokens, frozenset())
        chance = random.Random(seed)
        self._sequence = sequence
        self._said = tuple(t if chance.random() < right else (t + 1) % vocab for t in truth)

    def proposal(self, limit: int) -> Proposal:
        made = self._sequence.num_generated
        tokens = self._said[made : made + limit]
        return Proposal(tokens, LONGEST) if tokens else Proposal()


class Scripted(Speculation):
    """Every request's drafts come from an Oracle over `truth`, the text of all of them."""

    oracle: type[Oracle] = Oracle
    truth: Sequence[int] = ()
    right = 1.0
    num_begun = 0

    def begin(self, sequence: engine.Sequence) -> None:
        self.num_begun += 1
        sequence.speculator = self.oracle(sequence, self.truth, self.right, self._caps.vocab_size, self.num_begun)
        super().begin(sequence)


class Watch:
    """A clock that stands still while another loop has its turn, for which no drafts are to be blamed."""

    def __init__(self) -> None:
        self._stood = 0.0
        self._since: float | None = None

    def __call__(self) -> float:
        return (time.perf_counter() if self._since is None else self._since) - self._stood

    def stop(self) -> None:
        self._since = time.perf_counter()

    def go(self) -> None:
        if self._since is not None:
            self._stood += time.perf_counter() - self._since
        self._since = None


@dataclass
class Pace:
    """One run: what all rows made together while all of them decoded."""

    tokens: int
    steps: int
    seconds: float

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


class Stage:
    """One model and its prefix cache, so that each prompt is computed once; rows share one prompt."""

    def __init__(self, subject: Subject, settled: bool, noise: float | None) -> None:
        self.subject = subject
        self.model = Settled(subject.model, subject.caps.vocab_size) if settled else subject.model
        self._forward = Forward(self.model, subject.forward.compiled)
        self._forward.packed = subject.forward.packed
        self._store = Store(Settings(Budget(2**40), 2**62))
        self._watches: dict[Speculation | None, Watch] = {}
        self._new_layers = partial(new_layers, subject.model, subject.caps)
        batches = subject.caps.batching is Batching.RAGGED
        with self._forward.at_once():
            vocab, widths = subject.caps.vocab_size, self._forward.widths
            measured = calibrate(self._forward, vocab, self._new_layers, batches, widths)
        self.calibration = Calibration(measured.noise if noise is None else noise, measured.cost)

    def scripted(self, right: float | None, truth: Sequence[int]) -> Speculation:
        """As a server has it that was just started; without `right` there is no script, but lookup in the text."""
        caps, watch, cost = self.subject.caps, Watch(), deepcopy(self.calibration.cost)
        if right is None:
            return self._watched(Speculation(caps, watch, cost=cost, noise=self.calibration.noise), watch)
        speculation = Scripted(caps, watch, cost=cost, noise=self.calibration.noise)
        self._watched(speculation, watch)
        speculation.right, speculation.truth = right, truth
        return speculation

    def unscripted(self, before: Speculation) -> Speculation:
        """Another one without a script, that knows what steps cost and nothing else."""
        caps, watch = self.subject.caps, Watch()
        known = Speculation(caps, watch, cost=before.cost, noise=before.noise, counters=before.counters)
        return self._watched(known, watch)

    def _watched(self, speculation: Speculation, watch: Watch) -> Speculation:
        self._watches[speculation] = watch
        return speculation

    def prompt(self, context: int) -> Ids:
        return np.random.default_rng(context).integers(0, self.subject.caps.vocab_size, context)

    def truth(self, context: int, tokens: int) -> list[int]:
        """The text without drafts."""
        loop = self._loop(1, None)
        loop.submit(Request("truth", self.prompt(context), Sampling(0.0), tokens))
        return [token for output in _outputs(loop) for token in output.tokens]

    def run(self, context: int, rows: int, tokens: int, most: int, *speculations: Speculation | None) -> list[Pace]:
        """`tokens` per row on average, `most` at most, from the moment that all rows have decoded WARM steps.

        One loop for each of `speculations`. They take turns, so that a device or a host that changes its speed does so
        for all of them.
        """
        loops = [self._started(context, rows, most, speculation) for speculation in speculations]
        paces = [Pace(0, 0, 0.0) for _ in loops]
        while True:
            going = [
                (pace.tokens, i)
                for i, (loop, pace) in enumerate(zip(loops, paces, strict=True))
                if loop.num_running == rows and pace.tokens < tokens * rows
            ]
            if not going:
                break
            i = min(going)[1]
            self._turn(loops[i], paces[i], rows, self._watches.get(speculations[i], Watch()))
        for loop in loops:
            for i in range(rows):
                loop.abort(f"r{i}")
        return paces

    def _turn(self, loop: Loop, pace: Pace, rows: int, watch: Watch) -> None:
        """The first step does not count: in it the device waits for the host, or computes what another loop left."""
        watch.go()
        loop.step()
        began = time.perf_counter()
        for _ in range(TURN):
            if loop.num_running < rows:
                break
            pace.tokens += sum(len(output.tokens) for output in loop.step())
            pace.steps += 1
        pace.seconds += time.perf_counter() - began
        watch.stop()

    def _started(self, context: int, rows: int, most: int, speculation: Speculation | None) -> Loop:
        loop = self._loop(rows, speculation)
        for i in range(rows):
            loop.submit(Request(f"r{i}", self.prompt(context), Sampling(0.0), most))
        while sum(len(group.rows) for group in loop.groups) < rows:
            loop.step()
        for _ in range(WARM):
            loop.step()
        return loop

    def _loop(self, rows: int, speculation: Speculation | None) -> Loop:
        reuse = Reuse(self._store, self.subject.caps, 2048)
        config = Config.of(max_rows=rows)
        caps, layers = self.subject.caps, self._new_layers
        return Loop(self.model, caps, config, layers, None, reuse, speculation=speculation, forward=self._forward)


def _outputs(loop: Loop) -> list[Any]:
    made = []
    while loop.busy:
        made += loop.step()
    for output in made:
        if output.error:
            raise RuntimeError(output.error)
    return made


def scripted_case(
    stage: Stage, context: int, rows: int, tokens: int, rounds: int, rights: Sequence[float | None]
) -> list[Mapping[str, Any]]:
    """One line for each of `rights`: without and with drafts by turns, medians over the rounds after the first.

    The first round also builds kernels; `first` is its ratio, with a control and a cost table that know nothing yet.
    """
    most = 2 * tokens + 20 * WARM
    truth = stage.truth(context, most)
    scripts = {right: stage.scripted(right, truth) for right in rights}
    off: dict[float | None, list[Pace]] = {right: [] for right in rights}
    on: dict[float | None, list[Pace]] = {right: [] for right in rights}
    for _ in range(rounds + 1):
        for right, speculation in list(scripts.items()):
            if right is None:  # one that remembers no replies: all rounds have the same text
                speculation = scripts[None] = stage.unscripted(speculation)
            without, with_drafts = stage.run(context, rows, tokens, most, None, speculation)
            off[right].append(without)
            on[right].append(with_drafts)
    return [_line(context, rows, right, off[right], on[right], scripts[right]) for right in rights]


def _line(
    context: int, rows: int, right: float | None, off: Sequence[Pace], on: Sequence[Pace], speculation: Speculation
) -> Mapping[str, Any]:
    counters = speculation.counters
    drafted, accepted = (sum(counts.values()) for counts in (counters.drafted, counters.accepted))
    plain, checked = _median(off), _median(on)
    return {
        "context": context,
        "rows": rows,
        "accept": "no drafts by script" if right is None else right,
        "off tok/s": plain,
        "on tok/s": checked,
        "ratio": float(np.median([b.speed / a.speed for a, b in zip(off[1:], on[1:], strict=True)])),
        "first": on[0].speed / off[0].speed,
        "tokens/row/step": sum(p.tokens for p in on[1:]) / sum(p.steps for p in on[1:]) / rows,
        "checked steps": counters.rounds,
        "drafted": drafted,
        "accepted": accepted,
        "rate": counters.rate or 0.0,
        "tie rate": counters.ties / max(1, drafted + counters.ties),
    }


def _median(paces: Sequence[Pace]) -> float:
    return float(np.median([pace.speed for pace in paces[1:]]))
