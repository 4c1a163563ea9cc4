"""Distinct long prompts, several times what the prefix cache may hold: does memory stay under its limit?

    python -m treadle.bench limit [--model random:wide] [--prompts 200] [--context 4096] [--cache-gb 1]

Seeded random prompts, one after another, a few tokens of reply each. After every step of the loop the memory that the
device counts, less that of the weights, and the bytes that the cache says it holds are sampled. Between two prompts
both mean the same, up to what the loop keeps for itself.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx

from treadle.bench.drive import random_request
from treadle.bench.report import report
from treadle.bench.shapes import Subject, subject_of
from treadle.bench.values import positive
from treadle.config import Config
from treadle.engine.device import claim
from treadle.engine.loop import Loop
from treadle.engine.memory import Ledger
from treadle.engine.reuse import Reuse, store_of
from treadle.models.capabilities import describe, new_layers
from treadle.runtime import device_facts

GB = 1e9
TOKENS = 2  # of a reply


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="treadle.bench limit", description=__doc__)
    parser.add_argument("--model", default="random:wide")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--context", type=positive, default=4096)
    parser.add_argument("--cache-gb", type=float, default=1.0)
    args = parser.parse_args(argv)
    mx.random.seed(0)
    subject = subject_of(args.model)
    if device_facts().backend == "cpu":
        subject = in_float32(subject)
    began = time.perf_counter()
    row = measure(subject, args.prompts, args.context, args.cache_gb)
    report("limit", [row], model=subject.name, seconds=time.perf_counter() - began)


def in_float32(subject: Subject) -> Subject:
    """In float32, as the server computes on a CPU; bfloat16 is slow there."""
    subject.model.set_dtype(mx.float32)
    mx.eval(subject.model.parameters())
    caps = describe(subject.model, subject.caps.vocab_size, subject.caps.context_length)
    return replace(subject, caps=caps, name=subject.name.replace("bf16", "float32"))


def measure(
    subject: Subject,
    prompts: int,
    context: int,
    cache_gb: float,
    each: Callable[[float, float], object] = lambda active, held: None,
) -> dict[str, Any]:
    """Peaks in GB. `each` is told (the device's count, the cache's count) in bytes after every prompt."""
    gc.collect()
    base = mx.get_active_memory()
    loop = _loop(subject, Config.of(cache_gb=cache_gb, max_rows=1), base)
    store = loop.reuse.store
    assert store is not None
    busy = idle = held = deviation = 0.0
    for i in range(prompts):
        loop.submit(random_request(f"p{i}", subject.caps.vocab_size, context, TOKENS, seed=i))
        while loop.busy:
            if error := next((output.error for output in loop.step() if output.error), None):
                raise RuntimeError(error)
            busy = max(busy, mx.get_active_memory() - base)
            held = max(held, store.tree.totals.nbytes)
        gc.collect()
        active = mx.get_active_memory() - base
        idle = max(idle, active)
        deviation = max(deviation, abs(store.tree.totals.nbytes - active) / active)
        each(active, store.tree.totals.nbytes)
    return {
        "prompts": prompts,
        "context": context,
        "limit GB": cache_gb,
        "computed GB": prompts * subject.caps.footprint.rows(context) / GB,
        "most held GB": held / GB,
        "most active between prompts GB": idle / GB,
        "most active GB": busy / GB,
        "count off by at most %": 100 * deviation,
        "evictions": sum(store.evictions.counts.values()),
    }


def _loop(subject: Subject, config: Config, base: int) -> Loop:
    """As the engine builds it, with ledger and prefix cache."""
    limit = claim(config)
    caps = subject.caps
    reuse = Reuse(store_of(config, limit), caps, config.checkpoint_every)
    layers = partial(new_layers, subject.model, caps)
    return Loop(
        subject.model, caps, config, layers, Ledger(caps.footprint, base, limit), reuse, forward=subject.forward
    )
