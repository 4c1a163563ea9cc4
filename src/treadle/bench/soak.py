"""Thousands of mixed requests through the loop: is memory flat after warm-up?

    python -m treadle.bench soak [--model random:tiny | smollm2] [--requests 2000] [--rows 8] [--cache-gb 0.02]

Prompts of all lengths, some sharing prefixes or continuing earlier ones; every kind of sampling; a fifth is aborted
somewhere. The table has the memory after each quarter, with nothing running; `growth` compares the last with the first.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from treadle.bench.report import report
from treadle.bench.shapes import Subject, subject_of
from treadle.bench.values import positive
from treadle.config import Config
from treadle.engine.device import claim
from treadle.engine.loop import Loop
from treadle.engine.memory import Ledger
from treadle.engine.reuse import Reuse, store_of
from treadle.models.capabilities import new_layers
from treadle.types import Finish, Ids, Request, Sampling

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.9},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.0, "min_p": 0.05, "presence_penalty": 1.0},
    {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 5},
    {"temperature": 0.7, "frequency_penalty": 0.5, "logit_bias": ((3, -100.0),)},
)
ABORTED = 0.2
HISTORY = 50  # earlier prompts that a new one may continue
MB = 1e6


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="treadle.bench soak", description=__doc__)
    parser.add_argument("--model", default="random:tiny")
    parser.add_argument("--requests", type=positive, default=2000)
    parser.add_argument("--rows", type=positive, default=8)
    parser.add_argument("--longest", type=int, default=600, help="most tokens of a new prompt")
    parser.add_argument("--tokens", type=positive, default=48, help="most tokens of a reply")
    parser.add_argument("--cache-gb", type=float, default=0.02, help="small, so that it is full after the warm-up")
    args = parser.parse_args(argv)
    subject = subject_of(args.model)
    loop = _loop(subject, Config.of(max_rows=args.rows, cache_gb=args.cache_gb))
    stream = _requests(subject, args.longest, args.tokens)
    _drive(loop, stream, args.requests // 10, args.rows)
    rows: list[dict[str, Any]] = [{"after": "warm-up", "seconds": 0.0, **_facts()}]
    for quarter in range(1, 5):
        began = time.perf_counter()
        finishes = _drive(loop, stream, args.requests // 4, args.rows)
        seconds = time.perf_counter() - began
        rows.append({"after": f"quarter {quarter}", "seconds": seconds, **_facts(), **finishes})
    rows[0] |= dict.fromkeys(finishes, 0)
    growth = {key: rows[-1][key] - rows[1][key] for key in _facts()}
    report("soak", rows, model=subject.name, requests=args.requests, cache_gb=args.cache_gb, growth=growth)


def _loop(subject: Subject, config: Config) -> Loop:
    """As the engine builds it, with ledger and prefix cache."""
    limit = claim(config)
    caps = subject.caps
    reuse = Reuse(store_of(config, limit), caps, config.checkpoint_every)
    ledger = Ledger(caps.footprint, mx.get_active_memory(), limit)
    layers = partial(new_layers, subject.model, caps)
    return Loop(subject.model, caps, config, layers, ledger, reuse, forward=subject.forward)


def _requests(subject: Subject, longest: int, tokens: int) -> Iterator[Request]:
    """Endless and seeded; every third continues an earlier prompt."""
    draw, ids = random.Random(0), np.random.default_rng(0)
    vocab_size = subject.caps.vocab_size
    history: list[Ids] = []
    number = 0
    while True:
        prompt = ids.integers(0, vocab_size, draw.randint(1, longest))
        if history and draw.random() < 1 / 3:
            prompt = np.concatenate([draw.choice(history), prompt[: longest // 8 + 1]])[: 4 * longest]
        history = [*history[-HISTORY:], prompt]
        sampling = Sampling(**draw.choice(KINDS), seed=number)
        number += 1
        yield Request(f"r{number}", prompt, sampling, draw.randint(1, tokens), frozenset({0}))


def _drive(loop: Loop, stream: Iterator[Request], count: int, rows: int) -> dict[str, int]:
    """Keep up to twice as many requests as rows in the loop until `count` have ended; how they ended."""
    draw = random.Random(count)
    finishes = {finish.value: 0 for finish in Finish}
    sent = 0
    doomed: set[str] = set()
    while sent < count or loop.busy:
        while sent < count and sent - sum(finishes.values()) < 2 * rows:
            request = next(stream)
            loop.submit(request)
            sent += 1
            if draw.random() < ABORTED:
                doomed.add(request.id)
        if doomed and draw.random() < 0.1:
            loop.abort(doomed.pop())
        for output in loop.step():
            if output.finish is not None:
                finishes[output.finish.value] += 1
                doomed.discard(output.id)
    return finishes


def _facts() -> dict[str, float]:
    """With nothing running: live arrays, freed buffers that MLX keeps, the process, Python's objects."""
    gc.collect()
    mx.clear_cache()
    return {
        "active MB": mx.get_active_memory() / MB,
        "RSS MB": _resident() / MB,
        "objects": float(len(gc.get_objects())),
    }


def _resident() -> int:
    """Bytes of the process in memory; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * 4096
