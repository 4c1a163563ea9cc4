"""The prefix cache against the prompt cache of `mlx_lm.server` (`LRUPromptCache`), in one run.

    python -m treadle.bench prefix [--model smollm2 | random:8b] [--context 4096 ...]

Three tables in one: look-up time from 1k to 131k tokens (no model), time to first token of a cached turn less that of
computing its new tokens alone, and the bytes that eight branches on one prefix occupy.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from treadle.bench import rival, roofline
from treadle.bench.drive import loop_of, run
from treadle.bench.report import report
from treadle.bench.roofline import Roofline, Work
from treadle.bench.shapes import Subject, plain_of, subject_of
from treadle.bench.values import positive
from treadle.cache.budget import Budget
from treadle.cache.store import Settings, Store
from treadle.cache.tree import Tree
from treadle.engine.loop import Loop
from treadle.engine.reuse import Reuse
from treadle.models.capabilities import mlx_cache, new_layers
from treadle.types import Ids, Request, Sampling

NEW = 16  # tokens of a further turn
BRANCHES = 8


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="treadle.bench prefix", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--context", type=positive, nargs="+", default=[1024, 4096])
    args = parser.parse_args(argv)
    subject, plain = subject_of(args.model), plain_of(args.model)
    contexts = [n for n in args.context if n + 256 < subject.caps.context_length]
    if not contexts:
        parser.error(f"{subject.name} reads {subject.caps.context_length} tokens: take a smaller --context")
    limit, work = roofline.measured(), Work.of(subject, plain)
    turns = []
    for n in contexts:
        with rival.untouched(plain):
            theirs = _mlx_lm_turn(plain, subject.caps.vocab_size, n)
        turns.append(_turn(subject, n, theirs, limit, work))
    branches = _branches(subject, plain, contexts[0])
    rows = [_look_up(n) for n in (1024, 8192, 32768, 131072)]
    report("prefix: look-up", rows)
    report("prefix: cached turn", turns, model=subject.name, **limit.facts)
    report("prefix: bytes", [branches], model=subject.name)


def _look_up(length: int) -> dict[str, Any]:
    """Microseconds to find a prompt whose first `length` tokens are stored within a longer path (the hard case)."""
    ids = np.random.default_rng(0).integers(0, 150_000, length + 64)
    tree = Tree()
    tree.insert(tree.root("x"), ids, lambda a, b: _NoRows(b - a))
    query = np.concatenate([ids[:length], [1, 2, 3]])
    cache = mlx_cache.LRUPromptCache()
    cache.insert_cache("x", ids.tolist(), [mlx_cache.KVCache()])
    tokens = query.tolist()
    ours = _best(lambda: tree.match(tree.root("x"), query))
    theirs = _best(lambda: cache.fetch_nearest_cache("x", tokens), 3)
    return {"tokens": length, "treadle us": ours, "mlx_lm us": theirs, "times faster": theirs / ours}


class _NoRows:
    def __init__(self, length: int) -> None:
        self.length = length

    nbytes = 0

    def split(self, at: int) -> tuple[_NoRows, _NoRows]:
        return _NoRows(at), _NoRows(self.length - at)


def _best(call: Callable[[], object], repeats: int = 20) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times) * 1e6


def _cached_loop(subject: Subject) -> tuple[Loop, Store]:
    store = Store(Settings(Budget(2**40), 2**62))
    return loop_of(subject, Reuse(store, subject.caps, 2048)), store


def _request(id: str, ids: Ids, tokens: int = 2) -> Request:
    return Request(id, ids, Sampling(temperature=0.0), tokens)


def _turn(subject: Subject, context: int, theirs: float, limit: Roofline, work: Work) -> dict[str, Any]:
    """Milliseconds to the first token of a turn of NEW tokens on `context` cached ones, continued and branched.

    `theirs`: seconds of the same in mlx_lm. A turn is two steps: what is new up to its last token, and that one.
    """
    rng = np.random.default_rng(1)
    vocab = subject.caps.vocab_size
    loop, _ = _cached_loop(subject)
    ids = rng.integers(0, vocab, context)
    cold = run(loop, [_request("cold", ids)])["cold"].ttft
    moved, copied = [], []
    for i in range(4):
        ids = np.concatenate([ids, rng.integers(0, vocab, NEW)])
        moved.append(run(loop, [_request(f"turn{i}", ids)])[f"turn{i}"].ttft)
        branch = np.concatenate([ids[: context // 3], rng.integers(0, vocab, NEW)])
        copied.append(run(loop, [_request(f"branch{i}", branch)])[f"branch{i}"].ttft)
    alone = _new_tokens_alone(subject, context)
    step = work.step_bytes([context])
    num_bytes = None if step is None else 2 * step
    return {
        "context": context,
        "cold ms": 1000 * cold,
        "turn ms": 1000 * min(moved[1:]),
        "branch of a third ms": 1000 * min(copied[1:]),
        "new tokens alone ms": 1000 * alone,
        "turn less new ms": 1000 * (min(moved[1:]) - alone),
        "mlx_lm turn ms": 1000 * theirs,
        "ratio": theirs / min(moved[1:]),
        "GB": None if num_bytes is None else num_bytes / 1e9,
        "of roofline": limit.share(min(moved[1:]), num_bytes, work.step_flops(NEW, 1)),
    }


def _new_tokens_alone(subject: Subject, context: int) -> float:
    """What computing NEW tokens after `context` costs by itself: the model on layers that hold the context."""
    layers = new_layers(subject.model, subject.caps)
    context += 5  # lengths that attention has not met yet, as in the turns: on CUDA a new shape costs some 40 ms
    layers.reserve(context + 8 * NEW)

    def step(n: int) -> Any:
        layers.begin([n])
        logits = subject.model(mx.zeros((1, n), mx.int32), cache=layers.caches)[:, -1]
        layers.end()
        return logits

    for start in range(0, context, 512):
        step(min(512, context - start))
        mx.eval(layers.arrays())
    times = []
    for _ in range(4):
        began = time.perf_counter()
        step(NEW - 1)
        mx.eval(layers.arrays())
        mx.eval(mx.argmax(step(1)))
        times.append(time.perf_counter() - began)
    return min(times[1:])


def _mlx_lm_turn(plain: Any, vocab: int, context: int) -> float:
    """The same turn through mlx_lm's prompt cache: fetch (a copy), prefill of the new tokens, first token."""
    rng = np.random.default_rng(1)
    cache = mlx_cache.LRUPromptCache()
    tokens = rng.integers(0, vocab, context).tolist()
    layers = mlx_cache.make_prompt_cache(plain)
    for start in range(0, context, 512):
        plain(mx.array([tokens[start : start + 512]]), cache=layers)
        mx.eval([c.state for c in layers])
    cache.insert_cache("x", tokens, layers)
    times = []
    for _ in range(4):
        tokens = [*tokens, *rng.integers(0, vocab, NEW).tolist()]
        began = time.perf_counter()
        layers, rest = cache.fetch_nearest_cache("x", tokens)
        plain(mx.array([rest[:-1]]), cache=layers)
        mx.eval([c.state for c in layers])
        mx.eval(mx.argmax(plain(mx.array([rest[-1:]]), cache=layers)[:, -1]))
        times.append(time.perf_counter() - began)
        cache.insert_cache("x", tokens, layers)
    return min(times[1:])


def _branches(subject: Subject, plain: Any, context: int) -> dict[str, Any]:
    """Megabytes of BRANCHES prompts that share their first `context` tokens."""
    rng = np.random.default_rng(2)
    shared = rng.integers(0, subject.caps.vocab_size, context)
    loop, store = _cached_loop(subject)
    cache = mlx_cache.LRUPromptCache()
    for i in range(BRANCHES):
        ids = np.concatenate([shared, rng.integers(0, subject.caps.vocab_size, NEW)])
        run(loop, [_request(f"b{i}", ids)])
        tokens = ids.tolist()
        layers, rest = cache.fetch_nearest_cache("x", tokens)
        layers = copy.copy(layers) if layers is not None else mlx_cache.make_prompt_cache(plain)
        plain(mx.array([rest]), cache=layers)
        mx.eval([c.state for c in layers])
        cache.insert_cache("x", tokens, layers)
    ours = store.tree.totals.nbytes / 1e6
    theirs = cache.nbytes / 1e6
    return {"context": context, "branches": BRANCHES, "treadle MB": ours, "mlx_lm MB": theirs, "ratio": theirs / ours}
