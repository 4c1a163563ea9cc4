"""Requests that together would need more memory than there may be: does everybody get text, and does the limit hold?

    python -m treadle.bench pressure [--model random:deep] [--sequences 8] [--prompt 2048] [--reply 512] [--need 1.3]

The limit is set so that all requests at once, exact, would need `need` times of it (beside the weights). One more asks
for more than could ever fit and has to be refused. A thread reads the device's count every 50 ms; the peak that the
device itself keeps is told too.
"""

from __future__ import annotations

import argparse
import gc
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx

from treadle.bench.drive import random_request
from treadle.bench.limit import in_float32
from treadle.bench.report import report
from treadle.bench.shapes import Subject, subject_of
from treadle.bench.values import positive
from treadle.cache.budget import Budget
from treadle.cache.formats import least
from treadle.cache.store import Settings, Store
from treadle.config import Config
from treadle.engine.governor import Act
from treadle.engine.loop import Loop
from treadle.engine.memory import Ledger
from treadle.engine.pressure import Pressure
from treadle.engine.reuse import Reuse
from treadle.errors import MemoryRefused
from treadle.models.capabilities import new_layers
from treadle.models.kv import with_kv
from treadle.runtime import device_facts
from treadle.types import EXACT, Output

SAMPLE_S = 0.05


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="treadle.bench pressure", description=__doc__)
    parser.add_argument("--model", default="random:deep")
    parser.add_argument("--sequences", type=positive, default=8)
    parser.add_argument("--prompt", type=positive, default=2048)
    parser.add_argument("--reply", type=positive, default=512)
    parser.add_argument("--need", type=float, default=1.3)
    args = parser.parse_args(argv)
    mx.random.seed(0)
    subject = subject_of(args.model)
    if device_facts().backend == "cpu":
        subject = in_float32(subject)
    began = time.perf_counter()
    row = measure(subject, args.sequences, args.prompt, args.reply, args.need)
    report("pressure", [row], model=subject.name, seconds=time.perf_counter() - began)


class Sampler:
    """The most memory that a thread saw in use, looking every 50 ms by `read`."""

    def __init__(self, read: Callable[[], float] = mx.get_active_memory) -> None:
        self.most = 0.0
        self._read = read
        self.looks = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self.most = max(self.most, self._read())
            self.looks += 1


def measure(subject: Subject, sequences: int, prompt: int, reply: int, need: float) -> dict[str, Any]:
    """What became of the requests, and the memory in use as shares of the limit."""
    caps = with_kv(subject.model, subject.caps, EXACT, "exact until memory is short")
    config = Config(max_rows=sequences)
    gc.collect()
    mx.clear_cache()
    base = mx.get_active_memory()
    limit = base + int(sequences * caps.footprint.rows(prompt + reply) / need)
    ledger = Ledger(caps.footprint, base, limit, formats=caps.kv_footprints)
    store = Store(Settings(Budget(limit // 5), limit))
    reuse = Reuse(store, caps, config.checkpoint_every)
    loop = Loop(
        subject.model, caps, config, partial(new_layers, subject.model, caps), ledger, reuse, forward=subject.forward
    )
    pressure = Pressure(limit, store, lambda: [loop])
    pressure.attach(loop)
    for i in range(sequences):
        ledger.check(prompt, reply, least(None, caps, config.kv_bits))
        loop.submit(random_request(f"r{i}", caps.vocab_size, prompt, reply, seed=i))
    mx.reset_peak_memory()
    formats: dict[str, str] = {}
    outputs: list[Output] = []
    peak = 0
    with Sampler() as sampler:
        while loop.busy:
            formats |= {s.id: str(s.kv or caps.kv) for s in loop.sequences() if s.layers or s.computed}
            outputs += loop.step()
            peak = max(peak, mx.get_peak_memory())  # a chunk resets it
            pressure.relieve()
    done = pressure.governor.counts.done
    ended = [output for output in outputs if output.finish is not None]
    return {
        "requests": sequences,
        "finished": sum(o.error is None and o.usage is not None and o.usage.completion_tokens > 0 for o in ended),
        "whole": sum(o.usage is not None and o.usage.completion_tokens == reply for o in ended),
        "at 4 bits": sum(kv == "4" for kv in formats.values()),
        "preempted": done[Act.PREEMPT],
        "cut short": done[Act.END],
        "refused": int(_refused(ledger, prompt, caps.context_length)),
        "limit MB": limit / 1e6,
        "most sampled of it": sampler.most / limit,
        "peak of it": peak / limit,
        "looks": sampler.looks,
        "packed": done[Act.PACK_LIVE],
        "evicted": done[Act.EVICT],
        "held": done[Act.HOLD],
    }


def _refused(ledger: Ledger, prompt: int, context: int) -> bool:
    """Whether a request that cannot fit even at 4 bits is turned away at the door."""
    tokens = prompt
    while ledger.rows(tokens, replace(EXACT, key_bits=4, value_bits=4)) < ledger.limit:
        tokens *= 2
    try:
        ledger.check(tokens, context, replace(EXACT, key_bits=4, value_bits=4))
    except MemoryRefused:
        return True
    return False
