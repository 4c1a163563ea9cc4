"""One stream: the loop against `mlx_lm.generate.stream_generate` on the same model, prompt and device, by turns.

python -m treadle.bench decode [--model smollm2 | random:8b | random:8b:4] [--tokens 128] [--rounds 3]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import mlx.core as mx
import numpy as np

from treadle.bench.drive import loop_of, random_request, run
from treadle.bench.report import report
from treadle.bench.shapes import Subject, subject_of
from treadle.runtime import mlx_lm_module


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="treadle.bench decode", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompt", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    subject = subject_of(args.model)
    plain = subject_of(args.model, tuned=False) if args.model.startswith("random:") else subject
    rows = []
    for prompt in args.prompt:
        ours, theirs = [], []
        for _ in range(args.rounds + 1):  # the first of each warms up
            ours.append(_ours(subject, prompt, args.tokens))
            theirs.append(_mlx_lm(plain, prompt, args.tokens))
        rows.append(_row(prompt, np.array(ours[1:]), np.array(theirs[1:])))
    report("decode", rows, model=subject.name, copy_gb_s=copy_bandwidth(), weight_gb=subject.weight_bytes / 1e9)


def _row(prompt: int, ours: Any, theirs: Any) -> dict[str, float]:
    """Medians over the rounds of (prefill tokens/s, decode tokens/s), and our share of theirs."""
    a, b = np.median(ours, axis=0), np.median(theirs, axis=0)
    names = ("prefill", "decode")
    row: dict[str, float] = {"prompt": prompt}
    for i, name in enumerate(names):
        row |= {
            f"{name} tok/s": float(a[i]),
            f"mlx_lm {name}": float(b[i]),
            f"{name} ratio": float(a[i] / b[i]),
        }
    return row


def _ours(subject: Subject, prompt: int, tokens: int) -> tuple[float, float]:
    loop = loop_of(subject)
    line = run(loop, [random_request("x", subject.caps.vocab_size, prompt, tokens)])["x"]
    return prompt / line.ttft, line.speed()


def _mlx_lm(subject: Subject, prompt: int, tokens: int) -> tuple[float, float]:
    generate = mlx_lm_module("generate")
    ids = random_request("x", subject.caps.vocab_size, prompt, tokens).prompt
    began = time.perf_counter()
    times = []
    for _ in generate.generate_step(mx.array(ids), subject.model, max_tokens=tokens):
        times.append(time.perf_counter() - began)
    return prompt / times[0], (len(times) - 1) / (times[-1] - times[0])


def copy_bandwidth(megabytes: int = 256) -> float:
    """GB/s read and written by an element-wise copy in this process, best of five."""
    a = mx.zeros((megabytes * 2**18,), mx.float32)
    best = 0.0
    for _ in range(5):
        mx.eval(a)
        began = time.perf_counter()
        mx.eval(a + 1)
        best = max(best, 2 * a.nbytes / (time.perf_counter() - began) / 1e9)
    return best
