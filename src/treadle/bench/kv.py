"""What packed rows cost and save while a sequence runs: bytes per token, speed of decoding, peak of a long prefill.

    python -m treadle.bench kv [--model smollm2] [--context 4096] [--steps 40] [--bits 16 8 8/4 4] [--prefill 0]

Every format reads the same random ids. Decoding is timed by turns, so that a machine whose speed drifts treats all
alike; the figures are the quickest step, which other work on the machine disturbs least, and the median. Bytes per
token are what the device counts between half of the context and all of it. `--prefill N` also measures the peak of a
prefill of N tokens beyond the weights.
"""

from __future__ import annotations

import argparse
import gc
import logging
import time
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from treadle.bench import roofline
from treadle.bench.report import report
from treadle.bench.roofline import Work
from treadle.bench.shapes import Subject, plain_of, subject_of
from treadle.bench.values import positive
from treadle.cache.formats import parse
from treadle.cache.layers import Layers
from treadle.engine.compiled import Forward, forward_of
from treadle.models.capabilities import new_layers
from treadle.models.packed_attention import install
from treadle.runtime import device_facts
from treadle.types import KvFormat

log = logging.getLogger("treadle.bench")

CHUNK = 512
MOST_TRIES = 3
APART = 0.25  # by how much of the first half the second may differ: the first holds more exactly, or in advance
BURST = 8  # steps of one format before it is the next one's turn
BF16_BYTES = 2


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="treadle.bench kv", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--context", type=positive, default=4096)
    parser.add_argument("--steps", type=positive, default=40)
    parser.add_argument("--bits", nargs="+", default=["16", "8", "8/4", "4"])
    parser.add_argument("--prefill", type=int, default=0)
    args = parser.parse_args(argv)
    subject, plain = subject_of(args.model), plain_of(args.model)
    if device_facts().backend == "cpu":  # where bfloat16 is slow, and rows of loaded models are float32
        subject.model.set_dtype(mx.float32)
        mx.eval(subject.model.parameters())
    limit, work = roofline.measured(), Work.of(subject, plain)
    install(subject.model)
    formats = [parse(text) for text in args.bits]
    bench = _Bench(subject, args.context, args.prefill)
    rows = [bench.sizes(kv) for kv in formats]
    times = bench.decode(formats, args.steps)
    for row, kv in zip(rows, formats, strict=True):
        row["step ms"] = 1e3 * min(times[kv])
        row["median ms"] = 1e3 * float(np.median(times[kv]))
        row["of exact speed"] = min(times[formats[0]]) / min(times[kv])
        read = None if work.weight_bytes is None else work.weight_bytes + bench.row_bytes[kv]
        row["GB/step"] = None if read is None else read / 1e9
        row["of roofline"] = limit.share(min(times[kv]), read, work.step_flops(1, 1))
    report("kv", rows, model=subject.name, context=args.context, steps=args.steps, **limit.facts)


class _Bench:
    def __init__(self, subject: Subject, context: int, prefill: int) -> None:
        self.subject = subject
        self.context = context
        self.prefill = prefill
        rng = np.random.default_rng(0)
        self.ids = rng.integers(0, subject.caps.vocab_size, max(context, prefill)).tolist()
        self.held: dict[KvFormat, Layers] = {}
        self.forwards: dict[KvFormat, Forward] = {}
        self.row_bytes: dict[KvFormat, int] = {}

    def _fill(self, layers: Layers, end: int) -> None:
        """Compute the rows of the first `end` tokens."""
        model = self.subject.model
        while (start := layers.lengths[0]) < end:
            ids = self.ids[start : min(start + CHUNK, end)]
            layers.begin([len(ids)])
            model(mx.array([ids]), cache=layers.caches)
            layers.end()
            mx.eval(layers.arrays())
            mx.clear_cache()

    def _new(self, kv: KvFormat, num_tokens: int) -> Layers:
        layers = new_layers(self.subject.model, self.subject.caps, kv)
        layers.reserve(num_tokens)
        return layers

    def _filled(self, kv: KvFormat) -> tuple[Layers, int, int]:
        """Layers that hold the context, and the bytes of its halves. Buffers grow as they are filled here.

        What an earlier part of a suite lets go late would be counted too. Then the halves differ, and it is done anew.
        """
        for _ in range(MOST_TRIES):
            layers = new_layers(self.subject.model, self.subject.caps, kv)
            base = _active()
            self._fill(layers, self.context // 2)
            half = _active()
            self._fill(layers, self.context)
            first, second = half - base, _active() - half
            if abs(second - first) < APART * first:
                break
        else:
            log.warning("The bytes of %s are doubtful: two halves of the context never took about as much.", kv)
        return layers, first, second

    def sizes(self, kv: KvFormat) -> dict[str, Any]:
        """Bytes by the device's count, of buffers that hold what is needed."""
        layers, first, second = self._filled(kv)
        per_value = sum(r.keys.shape[1] * r.keys.shape[3] + r.values.shape[1] * r.values.shape[3] for r in layers.rows)
        bf16 = BF16_BYTES * per_value
        row: dict[str, Any] = {
            "format": str(kv),
            "bytes a token": second / (self.context - self.context // 2),
            "of bf16": second / (self.context - self.context // 2) / bf16,
            "all of bf16": (first + second) / self.context / bf16,
        }
        self.held[kv], self.row_bytes[kv] = layers, first + second
        caps = replace(self.subject.caps, kv=kv)  # as a server has it whose rows are held so
        self.forwards[kv] = forward_of(self.subject.model, caps, device_facts().backend, "auto")
        if self.prefill:
            row["prefill peak MB"] = self._peak(kv) / 1e6
        return row

    def _peak(self, kv: KvFormat) -> int:
        layers = self._new(kv, self.prefill)
        base = _active()
        mx.reset_peak_memory()
        self._fill(layers, self.prefill)
        return mx.get_peak_memory() - base

    def decode(self, formats: list[KvFormat], steps: int) -> dict[KvFormat, list[float]]:
        """Seconds of a step by format, as a mean over BURST steps each, of every turn but the first."""
        times: dict[KvFormat, list[float]] = {kv: [] for kv in formats}
        for _ in range(1 + -(-steps // BURST)):
            for kv in formats:
                times[kv].append(self._burst(self.held[kv], self.forwards[kv]) / BURST)
        return {kv: line[1:] for kv, line in times.items()}

    def _burst(self, layers: Layers, forward: Forward) -> float:
        """Seconds of BURST steps, each built while the device computes the one before, as the loop does it."""
        token = mx.array([[self.ids[0]]])
        mx.eval(token)
        began = time.perf_counter()
        for _ in range(BURST):
            layers.begin([1], in_place=True)
            drawn = mx.argmax(forward(token, layers)[:, -1:], axis=-1)
            layers.end()
            mx.async_eval(drawn)  # type: ignore[no-untyped-call]
            mx.eval(token)
            token = drawn
        mx.eval(token, layers.arrays())
        return time.perf_counter() - began


def _active() -> int:
    gc.collect()
    return mx.get_active_memory()
