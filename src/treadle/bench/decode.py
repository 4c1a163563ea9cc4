"""One stream: the loop against `mlx_lm.generate`'s on the same model, prompt and device, by turns.

python -m treadle.bench decode [--model smollm2 | random:8b:4] [--prompt 100 1000] [--tokens 96] [--rounds 3]
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from treadle.bench import rival, roofline
from treadle.bench.drive import loop_of, random_request, run
from treadle.bench.report import report
from treadle.bench.roofline import Roofline, Work
from treadle.bench.shapes import Subject, plain_of, subject_of
from treadle.bench.values import positive


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="treadle.bench decode", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompt", type=positive, nargs="+", default=[100, 1000])
    parser.add_argument("--tokens", type=positive, default=96)
    parser.add_argument("--rounds", type=positive, default=3)
    args = parser.parse_args(argv)
    subject, plain = subject_of(args.model), plain_of(args.model)
    limit, work = roofline.measured(), Work.of(subject, plain)
    rows = []
    for prompt in args.prompt:
        ids = random_request("x", subject.caps.vocab_size, prompt, args.tokens).prompt
        ours, theirs = [], []
        for _ in range(args.rounds + 1):  # the first of each warms up
            ours.append(_ours(subject, prompt, args.tokens))
            theirs.append(rival.stream(plain, ids, args.tokens))
        rows.append(_row(prompt, args.tokens, np.array(ours[1:]), np.array(theirs[1:]), limit, work))
    report("decode", rows, model=subject.name, weight_gb=subject.weight_bytes / 1e9, **limit.facts)


def _row(prompt: int, tokens: int, ours: Any, theirs: Any, limit: Roofline, work: Work) -> dict[str, float | None]:
    """Medians over the rounds of (prefill tokens/s, decode tokens/s), our share of theirs and of what could be.

    The least that a prefill reads are the weights, once; a step of decoding also reads the rows of its text.
    """
    (prefill, decode), (their_prefill, their_decode) = np.median(ours, axis=0), np.median(theirs, axis=0)
    once, step = work.step_bytes(()), work.step_bytes([prompt + tokens / 2])
    return {
        "prompt": prompt,
        "prefill tok/s": float(prefill),
        "mlx_lm prefill": float(their_prefill),
        "prefill ratio": float(prefill / their_prefill),
        "prefill of roofline": limit.share(prompt / prefill, once, work.step_flops(prompt, 1)),
        "decode tok/s": float(decode),
        "mlx_lm decode": float(their_decode),
        "decode ratio": float(decode / their_decode),
        "GB/step": None if step is None else step / 1e9,
        "decode of roofline": limit.share(1 / decode, step, work.step_flops(1, 1)),
    }


def _ours(subject: Subject, prompt: int, tokens: int) -> tuple[float, float]:
    loop = loop_of(subject)
    line = run(loop, [random_request("x", subject.caps.vocab_size, prompt, tokens)])["x"]
    return prompt / line.ttft, line.speed()
