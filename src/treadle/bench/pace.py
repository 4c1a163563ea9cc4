"""A long prefill beside a running stream: what it does to the stream's inter-token times.

    python -m treadle.bench pace [--model smollm2] [--prompt 60000] [--tokens 200]

The long prompt is cut to the model's context. The budget rule stands in `engine/scheduler.py`.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from treadle.bench.drive import loop_of, random_request
from treadle.bench.report import report
from treadle.bench.shapes import Subject, subject_of
from treadle.bench.values import positive


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="treadle.bench pace", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompt", type=positive, default=60_000)
    parser.add_argument("--tokens", type=positive, default=200)
    args = parser.parse_args(argv)
    subject = subject_of(args.model)
    length = min(args.prompt, subject.caps.context_length - 8)
    _gaps(subject, 64, 20)  # warm up
    alone = _gaps(subject, None, args.tokens)
    beside = _gaps(subject, length, args.tokens)
    rows = [_row("alone", alone), _row(f"beside a prefill of {length}", beside)]
    report("pace", rows, model=subject.name, median_ratio=float(np.median(beside) / np.median(alone)))


def _row(name: str, gaps: list[float]) -> dict[str, object]:
    ms = 1000 * np.array(gaps)
    return {
        "stream": name,
        "median ms": float(np.median(ms)),
        "p95 ms": float(np.percentile(ms, 95)),
        "longest ms": float(ms.max()),
        "mean ms": float(ms.mean()),
    }


def _gaps(subject: Subject, prefill: int | None, tokens: int) -> list[float]:
    """Inter-token seconds of one stream while another prompt is prefilled (all of them lie within the prefill)."""
    loop = loop_of(subject)
    vocab = subject.caps.vocab_size
    loop.submit(random_request("stream", vocab, 32, tokens + 8))
    while not loop.groups:
        loop.step()
    for _ in range(4):
        loop.step()
    if prefill is not None:
        loop.submit(random_request("long", vocab, prefill, 1, 1))
    times: list[float] = []
    while len(times) < tokens and any(s.id == "stream" for s in loop.sequences()):
        made = [o for o in loop.step() if o.id == "stream" and o.tokens]
        times += [time.perf_counter()] * len(made)
        if prefill is not None and not loop.prefilling:
            break
    return np.diff(times).tolist()
