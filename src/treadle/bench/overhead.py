"""What the loop costs beside the model: its steps against a bare look-ahead loop over the same model, by turns.

    python -m treadle.bench overhead [--model random:tiny | random:8b] [--prompt 100] [--tokens 128] [--rounds 3]

The bare loop feeds the likeliest token back while it is not computed yet and reads the one before: no requests,
sampling settings, stop conditions or outputs. Nothing can decode this model faster one token at a time.
"""

from __future__ import annotations

import argparse
import time

import mlx.core as mx
import numpy as np

from treadle.bench import roofline
from treadle.bench.drive import loop_of, random_request, run
from treadle.bench.report import report
from treadle.bench.roofline import Work
from treadle.bench.shapes import Subject, plain_of, subject_of
from treadle.bench.values import positive
from treadle.models.capabilities import forward, new_layers

CHUNK = 512
WARM = 8  # tokens before the clock starts


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="treadle.bench overhead", description=__doc__)
    parser.add_argument("--model", default="random:tiny")
    parser.add_argument("--prompt", type=positive, default=100)
    parser.add_argument("--tokens", type=positive, default=128)
    parser.add_argument("--rounds", type=positive, default=3)
    args = parser.parse_args(argv)
    if args.tokens <= WARM + 1:
        parser.error(f"--tokens must be more than {WARM + 1}")
    subject = subject_of(args.model)
    limit, work = roofline.measured(), Work.of(subject, plain_of(args.model))
    bare, ours = [], []
    for _ in range(args.rounds + 1):  # the first of each warms up
        bare.append(_bare(subject, args.prompt, args.tokens))
        ours.append(_ours(subject, args.prompt, args.tokens))
    bare_s, loop_s = float(np.median(bare[1:])), float(np.median(ours[1:]))
    num_bytes, flops = work.step_bytes([args.prompt + args.tokens / 2]), work.step_flops(1, 1)
    row = {
        "prompt": args.prompt,
        "bare tok/s": 1 / bare_s,
        "loop tok/s": 1 / loop_s,
        "ratio": bare_s / loop_s,
        "overhead us/step": 1e6 * (loop_s - bare_s),
        "GB/step": None if num_bytes is None else num_bytes / 1e9,
        "bare of roofline": limit.share(bare_s, num_bytes, flops),
        "of roofline": limit.share(loop_s, num_bytes, flops),
    }
    report("overhead", [row], model=subject.name, **limit.facts)


def _ours(subject: Subject, prompt: int, tokens: int) -> float:
    """Seconds a token."""
    return 1 / run(loop_of(subject), [random_request("x", subject.caps.vocab_size, prompt, tokens)])["x"].speed(WARM)


def bare_text(subject: Subject, prompt: int, tokens: int) -> tuple[list[int], list[float]]:
    """The tokens, and when each was read."""
    ids = random_request("x", subject.caps.vocab_size, prompt, tokens).prompt.tolist()
    layers = new_layers(subject.model, subject.caps)
    for start in range(0, prompt - 1, CHUNK):
        forward(subject.model, [ids[start : min(start + CHUNK, prompt - 1)]], layers)
        mx.eval(layers.arrays())
    text: list[int] = []
    times: list[float] = []
    drawn = None
    for i in range(tokens + 1):
        feed = mx.array(ids[-1:]) if drawn is None else drawn
        if i < tokens:
            layers.begin([1], in_place=True)
            drawn = mx.argmax(subject.forward(feed[:, None], layers)[:, -1], axis=-1)
            layers.end()
            mx.async_eval(drawn)  # type: ignore[no-untyped-call]
        if i:
            text.append(int(np.array(feed)[0]))
            times.append(time.perf_counter())
    return text, times


def _bare(subject: Subject, prompt: int, tokens: int) -> float:
    """Seconds a token."""
    _, times = bare_text(subject, prompt, tokens)
    return (times[-1] - times[WARM]) / (len(times) - 1 - WARM)
