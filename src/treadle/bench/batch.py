"""Many streams: throughput of 1, 4, 16 rows in the one loop, and their ratio to one stream in the same run.

python -m treadle.bench batch [--model smollm2 | random:8b:4] [--streams 1 4 16] [--prompt 64] [--tokens 64]
"""

from __future__ import annotations

import argparse
import time

from treadle.bench.drive import loop_of, random_request
from treadle.bench.report import report
from treadle.bench.shapes import Subject, subject_of


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="treadle.bench batch", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args(argv)
    subject = subject_of(args.model)
    speeds = {n: max(_speed(subject, n, args.prompt, args.tokens) for _ in range(args.rounds)) for n in args.streams}
    one = speeds[args.streams[0]] / args.streams[0]
    rows = [{"streams": n, "tok/s": s, "ms/step": 1000 * n / s, "times one stream": s / one} for n, s in speeds.items()]
    report("batch", rows, model=subject.name, prompt=args.prompt)


def _speed(subject: Subject, streams: int, prompt: int, tokens: int) -> float:
    """Tokens per second over all rows, from the moment all rows decode until the first one ends."""
    loop = loop_of(subject, max_rows=max(streams, 1))
    requests = [
        random_request(f"r{i}", subject.caps.vocab_size, prompt, tokens + 4 * streams, i) for i in range(streams)
    ]
    for request in requests:
        loop.submit(request)
    while sum(len(g.rows) for g in loop.groups) < streams:
        loop.step()
    for _ in range(4):
        loop.step()
    began, made = time.perf_counter(), 0
    while loop.num_running == streams and made < tokens * streams:
        made += sum(len(o.tokens) for o in loop.step())
    seconds = time.perf_counter() - began
    for request in requests:
        loop.abort(request.id)
    return made / seconds
